"""A disk that is full at every write of build, import, quantize and generate: one message, nothing half written, and the next run right.

``full_disk.c`` is loaded before the C library and lets the Nth write below a folder fail; N goes over all of them.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.campaign.inputs import Finding
from tests.campaign.kills import difference, jobs, left
from tests.campaign.process import environment, run
from tests.campaign.subjects import Subjects

NEVER = 10**9  #: a write that no command reaches


@dataclass(frozen=True)
class Filled:
    """At how many writes a command found the disk full, of how many that it makes."""

    command: str
    writes: int
    tried: int
    findings: tuple[Finding, ...]


def _shim(folder: Path) -> Path:
    library = folder / "full_disk.so"
    source = Path(__file__).with_name("full_disk.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def fill(name: str, command: Callable[[Path], list[str]], most: int, say: Callable[[str], None]) -> Filled:
    """Run ``command`` with a disk that is full from the Nth write on, for at most ``most`` N spread over all its writes.

    It ends with 0 (where only the cache could not be written) or 2 and one message without a traceback, leaves no file of its own but
    whole ones, and the run after it is right.
    """
    with tempfile.TemporaryDirectory(prefix="kdgen-disks-") as folder_name:
        folder = Path(folder_name)
        library = _shim(folder)

        def attempt(after: int, work: Path) -> tuple[int, int, str]:
            shutil.rmtree(work, ignore_errors=True)
            (work / "tmp").mkdir(parents=True)
            count = folder / "count"
            count.unlink(missing_ok=True)
            more = {"KDGEN_FULL_AFTER": str(after), "KDGEN_FULL_COUNT": str(count), "KDGEN_FULL_BELOW": str(work)}
            outcome = run(
                command(work),
                work,
                environment(work / "cache", TMPDIR=str(work / "tmp"), **more, LD_PRELOAD=str(library)),
                most_seconds=300,
            )
            return outcome.code, count.stat().st_size if count.exists() else 0, outcome.stderr

        code, writes, said = attempt(NEVER, folder / "whole")
        if code != 0:
            return Filled(name, writes, 0, (Finding(name, f"with room on the disk it ended with {code}: {said[-300:]}"),))
        expected = left(folder / "whole")
        findings = []
        points = sorted({1 + place * (writes - 1) // max(1, most - 1) for place in range(most)}) if writes > most else range(1, writes + 1)
        for after in points:
            work = folder / "work"
            code, _, said = attempt(after, work)
            problem = ""
            if code not in (0, 2) or "Traceback" in said or "this is a bug" in said:
                problem = f"exit code {code}: {said[-400:]}"
            elif code == 2 and "space" not in said:
                problem = f"the message does not say that the disk is full: {said[-300:]!r}"
            elif code == 2 and (rest := set(left(work)) - set(expected)):
                problem = f"left behind: {', '.join(sorted(rest)[:3])}"
            elif code == 0 and (unlike := difference(left(work), expected)):
                problem = f"exit code 0, but {unlike}"
            else:
                if name == "quantize":
                    shutil.rmtree(work / "int4", ignore_errors=True)
                after_it = run(command(work), work, environment(work / "cache", TMPDIR=str(work / "tmp")), most_seconds=300)
                problem = after_it.stderr[-300:] if after_it.code else difference(left(work), expected)
                problem = f"the next run: {problem}" if problem else ""
            if problem:
                findings.append(Finding(f"{name}, disk full at write {after} of {writes}", problem))
                say(str(findings[-1]))
        say(f"{name}: disk full at {len(points)} of {writes} writes, {len(findings)} findings")
        return Filled(name, writes, len(points), tuple(findings))


def fill_all(most: int, subjects: Subjects, names: Sequence[str], say: Callable[[str], None]) -> list[Filled]:
    """``fill`` for each of the commands named."""
    commands = jobs(subjects)
    return [fill(name, commands[name], most, say) for name in names]
