"""SIGKILL at random points of build, import, quantize and generate; the next run must be right and leave nothing of the killed one."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.campaign.inputs import Finding
from tests.campaign.judge import files_below
from tests.campaign.process import environment, kill_group, run, start
from tests.campaign.subjects import Subjects, generate, random_seed

COMMANDS = ("build", "import", "quantize", "generate")  #: those that are killed, and that find the disk full


@dataclass(frozen=True)
class Killed:
    """How often a command was killed before its end, and what was wrong afterwards."""

    command: str
    kills: int
    findings: tuple[Finding, ...]


def jobs(subjects: Subjects) -> dict[str, Callable[[Path], list[str]]]:
    """``COMMANDS`` by name; each is given the folder that it writes into."""
    model = subjects.models[0].path
    return {
        "build": lambda folder: ["build", "tiny", "--arch", "sm_90a", "--out", str(folder / "generated")],
        "import": lambda folder: ["import", str(model), str(folder / "model.kdtr"), "--force"],
        "quantize": lambda folder: ["quantize", str(model), str(folder / "int4")],
        "generate": lambda _: generate(model),
    }


def kill_often(name: str, command: Callable[[Path], list[str]], times: int, seed: int, say: Callable[[str], None]) -> Killed:
    """Kill ``command`` ``times`` times at points spread over the time that it takes, on a cold cache each; after each kill run it to its
    end. It must then succeed, with the files and the answer of an undisturbed run, and nothing beside them."""
    rng = random_seed(seed, len(name))
    with tempfile.TemporaryDirectory(prefix="kdgen-kills-") as folder:
        undisturbed = Path(folder) / "undisturbed"
        began = time.perf_counter()
        expected = _run_whole(command, undisturbed)
        whole = time.perf_counter() - began
        if isinstance(expected, str):
            return Killed(name, 0, (Finding(name, f"the undisturbed run ended wrongly: {expected}"),))
        findings, kills = [], 0
        while kills < times and len(findings) < times:
            point = rng.random()
            work = Path(folder) / "work"
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            process = start(command(work), work, environment(work / "cache", TMPDIR=str(_temporary(work))))
            time.sleep(whole * point)
            alive = process.poll() is None
            kill_group(process.pid)
            process.communicate()
            if not alive:  # it was faster this time
                whole *= 0.97
                continue
            kills += 1
            if kills % 10 == 0:
                say(f"{name}: {kills} kills")
            if problem := _after(command, work, expected):
                findings.append(Finding(f"{name} killed after {whole * point:.2f} of {whole:.2f} s", problem))
                say(str(findings[-1]))
        return Killed(name, kills, tuple(findings))


def _temporary(work: Path) -> Path:
    folder = work / "tmp"
    folder.mkdir(exist_ok=True)
    return folder


def _run_whole(command: Callable[[Path], list[str]], work: Path) -> dict[str, str] | str:
    """What a run leaves, by file; or what it said, where it failed."""
    work.mkdir(exist_ok=True)
    arguments = command(work)
    if "quantize" in arguments:  # which never writes over a folder
        shutil.rmtree(arguments[-1], ignore_errors=True)
    outcome = run(arguments, work, environment(work / "cache", TMPDIR=str(_temporary(work))), most_seconds=300)
    if outcome.code != 0:
        return f"exit code {outcome.code}: {outcome.stderr[-300:]}"
    answer = str(json.loads(outcome.stdout)["tokens"]) if arguments[0] == "generate" else ""
    return left(work) | {"tokens": answer}


def left(work: Path) -> dict[str, str]:
    """The digest of every file below, but for the cache's, of which only unfinished ones count: entries are named by their content."""
    found = {}
    for name in sorted(files_below(work)):
        path = work / name
        if path.is_dir() or (name.startswith("cache/") and ".tmp-" not in name):
            continue
        found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _after(command: Callable[[Path], list[str]], work: Path, expected: dict[str, str]) -> str:
    got = _run_whole(command, work)
    if isinstance(got, str):
        return f"the next run failed: {got}"
    return difference(got, expected)


def difference(got: dict[str, str], expected: dict[str, str]) -> str:
    """The first file that is not as expected; empty where there is none."""
    for name in sorted({*got, *expected}):
        if name not in expected:
            return f"{name} is left behind"
        if got.get(name) != expected[name]:
            return f"{name} differs from an undisturbed run's" if name in got else f"{name} is missing"
    return ""


def kill_all(times: int, subjects: Subjects, seed: int, names: Sequence[str], say: Callable[[str], None]) -> list[Killed]:
    """``kill_often`` for each of the commands named."""
    found = []
    commands = jobs(subjects)
    for name in names:
        found.append(kill_often(name, commands[name], times, seed, say))
        say(f"{name}: {found[-1].kills} kills, {len(found[-1].findings)} findings")
    return found
