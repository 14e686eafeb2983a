"""``python -m tests.mutants [WORD…]``: run every mutant (those whose name or file holds a word), print and write what caught each.

With ``--write`` the table goes to mutants.md in the checkout, which git ignores. ``--jobs N`` mutants run at a time; ``--kind NAME`` those
of a class. docs/exactness.md describes the method.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from tests.mutants.mutants import MUTANTS
from tests.mutants.run import ROOT, Result, run, times_of_checks

PAGE = ROOT / "mutants.md"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--kind", help="run the mutants of this class alone")
    parser.add_argument("--expected", action="store_true", help="run what should see a mutant, and no whole command when that misses it")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if not options.words or any(word in m.name or word in m.file for word in options.words)]
    chosen = [m for m in chosen if options.kind in (None, m.kind)]
    times = times_of_checks() if options.write else {}
    results = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for future in as_completed([pool.submit(run, mutant, not options.expected) for mutant in chosen]):
            results.append(result := future.result())
            print(f"{result.mutant.name}: {caught_by(result)}{'' if result.as_expected else '  (unexpected)'}", flush=True)
    results.sort(key=lambda result: chosen.index(result.mutant))
    print(summary(results))
    print(by_class(results))
    if options.write:
        whole = f"The unedited command took {max(times.values()):.0f} s on this machine, cold compiler cache included."
        PAGE.write_text(f"# Mutants\n\n{summary(results)} {whole}\n\n{table(results, times)}", encoding="utf-8")
    return 0 if all(result.caught for result in results) else 1


def caught_by(result: Result) -> str:
    return f"{result.part}: {result.check or result.why}" if result.caught else "SURVIVED"


def summary(results: Sequence[Result]) -> str:
    survived = [result.mutant.name for result in results if not result.caught]
    parts = ", ".join(f"{part} {count}" for part, count in Counter(result.part for result in results if result.caught).most_common())
    return f"{len(results) - len(survived)} of {len(results)} caught ({parts}). Survived: {', '.join(survived) or 'none'}."


def by_class(results: Sequence[Result]) -> str:
    """How many of each class were run and caught; the classes that have a name."""
    lines = ["| class | written | caught | survived |", "|---|---:|---:|---:|"]
    for kind in dict.fromkeys(result.mutant.kind for result in results if result.mutant.kind):
        caught = [result.caught for result in results if result.mutant.kind == kind]
        lines.append(f"| {kind} | {len(caught)} | {sum(caught)} | {len(caught) - sum(caught)} |")
    return "\n".join(lines)


def table(results: Sequence[Result], times: Mapping[str, float]) -> str:
    lines = ["| mutant | caught by | after s |", "|---|---|---:|"]
    for result in results:
        seconds = times.get(f"{result.part}: {result.check}")
        if seconds is None:  # the checker has a line a kernel where it fails, and one for all where it does not
            seconds = times.get(f"{result.part}: {result.check.partition(',')[0]}, all kernels")
        after = "" if seconds is None else f"{seconds:.0f}"
        lines.append(f"| {result.mutant.name} | {caught_by(result)} | {after} |".replace("SURVIVED", "**survived**"))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
