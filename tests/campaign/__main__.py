"""``python -m tests.campaign --minutes N``: the whole campaign, or one part of it; exit code 1 where something was found."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.campaign.disks import fill_all
from tests.campaign.entries import damage_entries
from tests.campaign.inputs import Finding, Tally, campaign
from tests.campaign.kills import COMMANDS, kill_all
from tests.campaign.process import import_everything
from tests.campaign.subjects import make_subjects
from tests.campaign.together import at_once

PARTS = ("inputs", "entries", "kills", "together", "disks")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="for the damaged inputs; the other parts take as long as they take")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="so many damaged inputs at most")
    parser.add_argument("--kills", type=int, default=100, help="SIGKILLs of each command")
    parser.add_argument("--writes", type=int, default=60, help="writes of each command at which the disk is full")
    parser.add_argument("--entries", type=int, default=30, help="damaged entries of the cache")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=PARTS, help="this part alone; may be given again")
    parser.add_argument(
        "--command", action="append", choices=COMMANDS, help="kills and disks: this command alone; may be given again (default: all)"
    )
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "kdgen-campaign", help="where inputs with findings go")
    options = parser.parse_args()
    chosen, commands = options.only or PARTS, options.command or COMMANDS
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {line}", file=sys.stderr, flush=True)

    options.keep.mkdir(parents=True, exist_ok=True)
    findings: list[Finding] = []
    rows: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kdgen-campaign-") as folder:
        say("writing the undamaged files")
        import_everything()
        subjects = make_subjects(Path(folder))
        if "inputs" in chosen:
            end = time.monotonic() + 60 * options.minutes

            def go_on(tally: Tally) -> bool:
                return time.monotonic() < end and tally.inputs < options.inputs

            tally = campaign(subjects, options.seed, options.keep, go_on, say)
            findings += tally.findings
            rows.append(f"damaged inputs: {tally}")
        if "entries" in chosen:
            found = damage_entries(options.entries, subjects, options.seed, say)
            findings += found
            rows.append(f"damaged entries of the cache: {options.entries}, {len(found)} findings")
        if "kills" in chosen:
            for killed in kill_all(options.kills, subjects, options.seed, commands, say):
                findings += killed.findings
                rows.append(f"{killed.command}: killed {killed.kills} times before its end, {len(killed.findings)} findings")
        if "together" in chosen:
            for count in (2, 5):
                found = at_once(count, subjects, say)
                findings += found
                rows.append(f"{count} of each command at once: {len(found)} findings")
        if "disks" in chosen:
            for filled in fill_all(options.writes, subjects, commands, say):
                findings += filled.findings
                rows.append(f"{filled.command}: disk full at {filled.tried} of {filled.writes} writes, {len(filled.findings)} findings")
    for finding in findings:
        print(f"FOUND {finding.case}: {finding.problem}" + (f" (kept in {finding.kept})" if finding.kept else ""))
    print("\n".join(rows))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
