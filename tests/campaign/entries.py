"""Damaged entries of the cache of compiled kernels: the next run must notice, compile again, and give the same tokens."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.campaign.inputs import Finding
from tests.campaign.process import environment, run
from tests.campaign.subjects import Subjects, generate, random_seed

KINDS = ("flip", "cut", "empty", "another's", "zeros")


def damage_entries(times: int, subjects: Subjects, seed: int, say: Callable[[str], None]) -> list[Finding]:
    """Damage the entries that ``generate`` reads, ``times`` times, every other time twice; each time it must answer as before, and so must
    the run after it."""
    rng = random_seed(seed, 1)
    findings = []
    model = subjects.models[0].path
    others = sorted(path for path in subjects.cache.rglob("*") if path.is_file())
    with tempfile.TemporaryDirectory(prefix="kdgen-entries-") as name:
        folder = Path(name)
        warm, cache = folder / "warm", folder / "cache"
        expected = _tokens(warm, folder, model)  # which leaves the entries that this command reads, and no others
        read = sorted(path.relative_to(warm) for path in warm.rglob("*") if path.is_file())
        for attempt in range(times):
            shutil.rmtree(cache, ignore_errors=True)
            shutil.copytree(warm, cache)
            done = []
            for _ in range(1 + attempt % 2):
                kind, entry = KINDS[int(rng.integers(len(KINDS)))], cache / read[int(rng.integers(len(read)))]
                entry.write_bytes(_damaged(entry.read_bytes(), kind, rng, others[int(rng.integers(len(others)))].read_bytes()))
                done.append(f"{entry.name}, {kind}")
            for run_of in ("the next run", "the one after it"):
                got = _tokens(cache, folder, model)
                if got != expected:
                    findings.append(Finding(f"cache entries {' and '.join(done)}", f"{run_of}: {got} instead of {expected}"))
                    say(str(findings[-1]))
                    break
    say(f"{times} times damaged entries of the cache: {len(findings)} findings")
    return findings


def _damaged(data: bytes, kind: str, rng: np.random.Generator, other: bytes) -> bytes:
    """A flipped bit, a cut end, nothing, a hole of zeros, or another entry's content."""
    place = int(rng.integers(max(1, len(data))))
    match kind:
        case "flip" if data:
            return data[:place] + bytes([data[place] ^ (1 << int(rng.integers(8)))]) + data[place + 1 :]
        case "cut":
            return data[:place]
        case "zeros":
            return data[:place] + bytes(len(data[place : place + 4096])) + data[place + 4096 :]
        case "another's":
            return other
        case _:
            return b""


def _tokens(cache: Path, folder: Path, model: Path) -> str:
    """The tokens, or what went wrong."""
    outcome = run(generate(model), folder, environment(cache), most_seconds=300)
    return str(json.loads(outcome.stdout)["tokens"]) if outcome.code == 0 else f"exit code {outcome.code}: {outcome.stderr[-300:]}"
