"""Some of the default ``kdgen verify``'s tasks: a short way to what it would find there.

Run as a script, with a copy of kdgen on the path and words of the tasks' titles; prints the first check that failed as JSON, or nothing.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

from kdgen.backends import open_backend
from kdgen.spec.model import load_spec
from kdgen.verify.kernels import full_size
from kdgen.verify.plans import plans_for
from kdgen.verify.report.checks import Check
from kdgen.verify.tasks import DEFAULT_SPECS, tasks
from kdgen.verify.variants import variants


def first_failure(words: Sequence[str]) -> Check | None:
    """Of the tasks that have the first of ``words`` as their title, or else in it, then of those with the next.

    Raises ValueError for a word that is in no title.
    """
    specs = [load_spec(name) for name in DEFAULT_SPECS]
    plans, others = plans_for(specs, None), plans_for(variants(), None)
    every = tasks(open_backend("cpu"), specs, plans, others, tuple(full_size.groups()))
    for word in words:
        named = [task for task in every if task.title == word] or [task for task in every if word in task.title]
        if not named:
            raise ValueError(f"no task of kdgen verify has {word!r} in its title")
        for task in named:
            for check in task.make(lambda _: None):
                if check.status == "failed":
                    return check
    return None


if __name__ == "__main__":
    found = first_failure(sys.argv[1:])
    if found is not None:
        print(json.dumps(dataclasses.asdict(found)))
