"""``python -m tests.mutants [WORD…]``: run every mutant (those whose name or file holds a word), print and write what caught each.

With ``--write`` the table in docs/mutants.md is written anew. ``--jobs N`` mutants run at a time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from tests.mutants.mutants import MUTANTS
from tests.mutants.run import ROOT, Result, run

PAGE = ROOT / "docs" / "mutants.md"
MARK = "<!-- what follows is written by python -m tests.mutants --write -->"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if not options.words or any(word in m.name or word in m.file for word in options.words)]
    results = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for future in as_completed([pool.submit(run, mutant) for mutant in chosen]):
            results.append(result := future.result())
            caught = f"{result.part}: {result.check or result.why}" if result.caught else "SURVIVED"
            unexpected = "" if result.part == result.mutant.part else f"  (expected {result.mutant.part})"
            print(f"{result.seconds:6.1f} s  {result.mutant.name}: {caught}{unexpected}", flush=True)
    results.sort(key=lambda result: chosen.index(result.mutant))
    print(summary(results))
    if options.write:
        head = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
        PAGE.write_text(f"{head}{MARK}\n\n{summary(results)}\n\n{table(results)}", encoding="utf-8")
    return 0 if all(result.caught for result in results) else 1


def summary(results: Sequence[Result]) -> str:
    survived = [result.mutant.name for result in results if not result.caught]
    parts = ", ".join(f"{part} {count}" for part, count in Counter(result.part for result in results if result.caught).most_common())
    seconds = [result.seconds for result in results if result.caught]
    times = f"; median {statistics.median(seconds):.0f} s, longest {max(seconds):.0f} s" if seconds else ""
    return f"{len(results) - len(survived)} of {len(results)} caught ({parts}){times}. Survived: {', '.join(survived) or 'none'}."


def table(results: Sequence[Result]) -> str:
    lines = ["| mutant | caught by | s |", "|---|---|---:|"]
    for result in results:
        caught = f"{result.part}: {result.check or result.why}" if result.caught else "**survived**"
        lines.append(f"| {result.mutant.name} | {caught} | {result.seconds:.0f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
