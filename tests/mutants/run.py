"""Run one mutant: the edit in a copy of kdgen, and ``kdgen verify --fail-fast`` over that copy, as a user would run it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutants import Mutant

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT = 900


@dataclass(frozen=True)
class Result:
    """What ``kdgen verify`` said: the first check that failed, or why there is none."""

    mutant: Mutant
    caught: bool
    part: str
    check: str
    why: str
    seconds: float  #: processor time of the command until then


def apply(mutant: Mutant, copy: Path) -> None:
    """Make a copy of kdgen with the mutant's edit; nothing generated is there, so that no comparison of texts gives it away."""
    for folder in ("kdgen", "templates", "specs"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "tests" / "oracle").mkdir(parents=True)
    (copy / "tests" / "oracle" / "data").symlink_to(ROOT / "tests" / "oracle" / "data")
    file = copy / mutant.file
    text = file.read_text(encoding="utf-8")
    if text.count(mutant.right) != 1:
        raise ValueError(f"{mutant.name}: the text to edit stands {text.count(mutant.right)} times in {mutant.file}: write it anew")
    file.write_text(text.replace(mutant.right, mutant.wrong), encoding="utf-8")


#: The command, which says at its end on stderr how much processor time it took.
COMMAND = """
import atexit, resource, sys
usage = [resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN]
atexit.register(lambda: print(sum(sum(resource.getrusage(who)[:2]) for who in usage), file=sys.stderr))
from kdgen.cli import main
main()
"""


def run(mutant: Mutant) -> Result:
    with tempfile.TemporaryDirectory(prefix="kdgen-mutant-") as folder:
        copy = Path(folder)
        apply(mutant, copy)
        command = [sys.executable, "-c", COMMAND, "verify", "--fail-fast", "--json", "--backend", "cpu"]
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return Result(mutant, True, "hang", "", f"no end within {TIMEOUT} s", TIMEOUT)
    if done.returncode < 0:
        return Result(mutant, True, "crash", "", f"signal {-done.returncode}", 0.0)
    *said, seconds = done.stderr.strip().splitlines()
    if done.returncode == 2:
        return Result(mutant, True, "refused", "", said[0] if said else "", float(seconds))
    checks = json.loads(done.stdout)["checks"]
    failed = next((check for check in checks if check["status"] == "failed"), None)
    if failed is None:
        return Result(mutant, False, "", "", "", float(seconds))
    return Result(mutant, True, failed["part"], f"{failed['spec']} {failed['compute']}, {failed['name']}", failed["why"], float(seconds))
