"""Run one mutant: the edit in a copy of kdgen, and the default ``kdgen verify --fail-fast`` over that copy."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kdgen.codegen.render import parts_of
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT = 900  #: seconds of the whole command, three times what it takes by itself
#: Processor seconds of the short ways, ten times what the longest takes: what hangs mostly computes, and a busy machine hangs nothing.
SHORT_CPU_SECONDS = 300
VERIFY = ("-c", "from kdgen.cli import main; main()", "verify", "--json", "--backend", "cpu", "--jobs", "1")


@dataclass(frozen=True)
class Result:
    """What ``kdgen verify`` or the tests said: the first check that failed, or why there is none; and whether what should see the mutant
    has seen it."""

    mutant: Mutant
    caught: bool
    part: str
    check: str
    why: str
    as_expected: bool


def _copy(copy: Path, tests: bool = False) -> None:
    """kdgen without anything generated, so that no comparison of texts gives a mutant away; with its tests where these are to see it."""
    for folder in ("kdgen", "templates", "specs", "demo"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    if tests:
        shutil.copytree(ROOT / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__", "data"))
        shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / "tests" / "oracle").mkdir(parents=True, exist_ok=True)
    (copy / "tests" / "oracle" / "data").symlink_to(ROOT / "tests" / "oracle" / "data")


def apply(mutant: Mutant, copy: Path) -> None:
    """Make a copy of kdgen with the mutant's edit."""
    _copy(copy, bool(mutant.tests))
    file = copy / mutant.file
    text = file.read_text(encoding="utf-8")
    if text.count(mutant.right) != 1:
        raise ValueError(f"{mutant.name}: the text to edit stands {text.count(mutant.right)} times in {mutant.file}: write it anew")
    file.write_text(text.replace(mutant.right, mutant.wrong), encoding="utf-8")


def run(mutant: Mutant, whole: bool = True) -> Result:
    """A template's mutant is first looked for by that template's own kernels, then each by the tasks that should see it; whatever they miss
    gets the ``whole`` command. A mutant that tests should see gets these alone.
    """
    try:
        return _run(mutant, whole)
    except subprocess.TimeoutExpired:
        return Result(mutant, True, "hang", "", f"no end within {TIMEOUT} s", mutant.part == "hang")


def _run(mutant: Mutant, whole: bool) -> Result:
    with tempfile.TemporaryDirectory(prefix="kdgen-mutant-") as folder:
        copy = Path(folder)
        apply(mutant, copy)
        if mutant.tests:
            return _tested(mutant, _python(copy, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", mutant.tests))
        short = [("kernels_of.py", template) for template in _templates_with(Path(mutant.file))]
        for script, *words in [*short, *([("tasks_of.py", *mutant.tasks)] if mutant.tasks else [])]:
            done = _python(copy, str(ROOT / "tests" / "mutants" / script), *words, cpu_seconds=SHORT_CPU_SECONDS)
            if done.returncode or done.stdout:
                return _result(mutant, done, json.loads(done.stdout) if done.stdout else None, bool(mutant.tasks))
        if not whole:
            return Result(mutant, False, "", "", "", False)
        done = _python(copy, *VERIFY, "--fail-fast")
        checks = json.loads(done.stdout)["checks"] if done.stdout else []
        return _result(mutant, done, next((check for check in checks if check["status"] == "failed"), None), False)


def _tested(mutant: Mutant, done: subprocess.CompletedProcess[str]) -> Result:
    """The first test that failed; 1 is pytest's exit code for failed tests, and what else there is but 0 is no finding."""
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{mutant.name}: {mutant.tests} did not run: {done.stdout[-500:]}{done.stderr[-500:]}")
    failed = [line.removeprefix("FAILED ") for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    check, _, why = (failed or [""])[0].partition(" - ")
    return Result(mutant, bool(done.returncode), "tests" if done.returncode else "", check, why, bool(done.returncode))


def _templates_with(file: Path) -> list[str]:
    """The kernels' templates that have the text of ``file``: itself, or those that take it from templates/lib."""
    if file.parent.name == "kernels":
        return [file.name]
    kernels = sorted(path.name for path in (ROOT / "templates" / "kernels").iterdir())
    return [name for name in kernels if file.parent.name == "lib" and file.name in parts_of(name)]


def times_of_checks() -> dict[str, float]:
    """When an unedited ``kdgen verify`` has finished each of its checks, in seconds, with nothing compiled before; by part and check."""
    with tempfile.TemporaryDirectory(prefix="kdgen-mutant-") as folder:
        copy = Path(folder)
        _copy(copy)
        done = _python(copy, *VERIFY, environment={"KDGEN_CACHE_DIR": str(copy / "cache")})
        done.check_returncode()
    times, seconds = {}, 0.0
    for check in json.loads(done.stdout)["checks"]:
        seconds += check["seconds"]
        times[f"{check['part']}: {check['spec']} {check['compute']}, {check['name']}"] = seconds
    return times


def _python(
    copy: Path, *arguments: str, environment: Mapping[str, str] | None = None, cpu_seconds: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Raises subprocess.TimeoutExpired after TIMEOUT. A process that computes for ``cpu_seconds`` ends with SIGXCPU."""
    everything = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", **(environment or {})}
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, cwd=copy, env=everything, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            if cpu_seconds is not None:
                resource.prlimit(process.pid, resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 5))
            out, err = process.communicate(timeout=TIMEOUT)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _result(mutant: Mutant, done: subprocess.CompletedProcess[str], failed: dict[str, str] | None, expected: bool) -> Result:
    """``expected``: it was run because it should see the mutant; else the mutant's ``part`` says what should."""
    if failed is not None:
        check = f"{failed['spec']} {failed['compute']}, {failed['name']}"
        return Result(mutant, True, failed["part"], check, failed["why"], expected or failed["part"] == mutant.part)
    if done.returncode == -signal.SIGXCPU:
        return Result(mutant, True, "hang", "", f"no end within {SHORT_CPU_SECONDS} s of a processor", mutant.part == "hang")
    if done.returncode:  # 2: refused with an error; 1 without a report, or a signal: it fell over
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        part = "refused" if done.returncode in (1, 2) else "crash"
        return Result(mutant, True, part, "", said, expected or part == mutant.part)
    return Result(mutant, False, "", "", "", False)
