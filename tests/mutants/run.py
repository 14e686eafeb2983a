"""Run one mutant: the edit in a copy of kdgen, and the default ``kdgen verify --fail-fast`` over that copy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kdgen.render import parts_of
from tests.mutants.mutants import Mutant

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT = 900
VERIFY = ("-c", "from kdgen.cli import main; main()", "verify", "--json", "--backend", "cpu", "--jobs", "1")


@dataclass(frozen=True)
class Result:
    """What ``kdgen verify`` said: the first check that failed, or why there is none."""

    mutant: Mutant
    caught: bool
    part: str
    check: str
    why: str


def _copy(copy: Path) -> None:
    """kdgen without anything generated, so that no comparison of texts gives a mutant away."""
    for folder in ("kdgen", "templates", "specs"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "tests" / "oracle").mkdir(parents=True)
    (copy / "tests" / "oracle" / "data").symlink_to(ROOT / "tests" / "oracle" / "data")


def apply(mutant: Mutant, copy: Path) -> None:
    """Make a copy of kdgen with the mutant's edit."""
    _copy(copy)
    file = copy / mutant.file
    text = file.read_text(encoding="utf-8")
    if text.count(mutant.right) != 1:
        raise ValueError(f"{mutant.name}: the text to edit stands {text.count(mutant.right)} times in {mutant.file}: write it anew")
    file.write_text(text.replace(mutant.right, mutant.wrong), encoding="utf-8")


def run(mutant: Mutant) -> Result:
    """A template's mutant is first looked for by that template's own kernels; whatever they miss gets the whole command."""
    try:
        return _run(mutant)
    except subprocess.TimeoutExpired:
        return Result(mutant, True, "hang", "", f"no end within {TIMEOUT} s")


def _run(mutant: Mutant) -> Result:
    with tempfile.TemporaryDirectory(prefix="kdgen-mutant-") as folder:
        copy = Path(folder)
        apply(mutant, copy)
        for template in _templates_with(Path(mutant.file)):
            done = _python(copy, str(ROOT / "tests" / "mutants" / "kernels_of.py"), template)
            if done.returncode or done.stdout:
                return _result(mutant, done, json.loads(done.stdout) if done.stdout else None)
        done = _python(copy, *VERIFY, "--fail-fast")
        checks = json.loads(done.stdout)["checks"] if done.stdout else []
        return _result(mutant, done, next((check for check in checks if check["status"] == "failed"), None))


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


def _python(copy: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    everything = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", **(environment or {})}
    return subprocess.run([sys.executable, *arguments], cwd=copy, env=everything, capture_output=True, text=True, timeout=TIMEOUT)


def _result(mutant: Mutant, done: subprocess.CompletedProcess[str], failed: dict[str, str] | None) -> Result:
    if failed is not None:
        return Result(mutant, True, failed["part"], f"{failed['spec']} {failed['compute']}, {failed['name']}", failed["why"])
    if done.returncode:  # 2: refused with an error; 1 without a report, or a signal: it fell over
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Result(mutant, True, "refused" if done.returncode in (1, 2) else "crash", "", said)
    return Result(mutant, False, "", "", "")
