"""Damaged entries of the cache of compiled kernels: the next run must notice, compile again, and give the same tokens."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.campaign.inputs import Finding
from tests.campaign.process import environment, run
from tests.campaign.subjects import Subjects, generate, random_seed


def damage_entries(times: int, subjects: Subjects, seed: int, say: Callable[[str], None]) -> list[Finding]:
    """Flip a bit of one entry, cut it, or empty it, ``times`` times; each time ``generate`` must answer as before."""
    rng = random_seed(seed, 1)
    findings = []
    model = subjects.models[0].path
    with tempfile.TemporaryDirectory(prefix="kdgen-entries-") as name:
        folder = Path(name)
        expected = _tokens(subjects.cache, folder, model)
        for attempt in range(times):
            cache = folder / "cache"
            shutil.rmtree(cache, ignore_errors=True)
            shutil.copytree(subjects.cache, cache)
            entries = sorted(path for path in cache.rglob("*") if path.is_file())
            entry = entries[int(rng.integers(len(entries)))]
            data = entry.read_bytes()
            place, kind = int(rng.integers(len(data))), ("flip", "cut", "empty")[attempt % 3]
            flipped = data[:place] + bytes([data[place] ^ (1 << int(rng.integers(8)))]) + data[place + 1 :]
            entry.write_bytes({"flip": flipped, "cut": data[:place], "empty": b""}[kind])
            got = _tokens(cache, folder, model)
            if got != expected:
                findings.append(Finding(f"cache entry {entry.name}, {kind} at {place}", f"{got} instead of {expected}"))
                say(str(findings[-1]))
    say(f"{times} damaged entries of the cache: {len(findings)} findings")
    return findings


def _tokens(cache: Path, folder: Path, model: Path) -> str:
    """The tokens, or what went wrong."""
    outcome = run(generate(model), folder, environment(cache), most_seconds=300)
    return str(json.loads(outcome.stdout)["tokens"]) if outcome.code == 0 else f"exit code {outcome.code}: {outcome.stderr[-300:]}"
