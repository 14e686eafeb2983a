"""The kernel and checker parts of the default ``kdgen verify``, of one template's kernels alone: a short way to what it would find there.

Run as a script, with a copy of kdgen on the path and a template's name; prints the first check that failed as JSON, or nothing.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

from kdgen.backends import open_backend
from kdgen.plan.ir import Kernel
from kdgen.spec.model import load_spec
from kdgen.verify.kernels import full_size
from kdgen.verify.kernels.twins import with_those_held_to
from kdgen.verify.plans import Plans, plans_for
from kdgen.verify.report.checks import Check
from kdgen.verify.tasks import DEFAULT_SPECS, tasks
from kdgen.verify.variants import variants

ALWAYS = {"tree_build.cu.j2", "tree_accept.cu.j2"}  # which hold the oracle's trees


def first_failure(template: str) -> Check | None:
    def narrow(plans: Plans) -> Plans:
        return [(spec, dataclasses.replace(plan, kernels=wanted_of(plan.kernels))) for spec, plan in plans]

    def wanted_of(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
        return with_those_held_to(kernels, [kernel for kernel in kernels if kernel.template in {template, *ALWAYS}])

    specs = [load_spec(name) for name in DEFAULT_SPECS]
    plans, others = narrow(plans_for(specs, None)), narrow(plans_for(variants(), None))
    full_sized = [own for group in full_size.groups() if (own := group.of(template)).plan.kernels]
    for task in tasks(open_backend("cpu"), specs, plans, others, full_sized):
        for check in task.make(lambda _: None):
            if check.part not in ("kernel", "tables", "numbers", "trees", "checker", "primitives"):
                return None
            if check.status == "failed":
                return check
    return None


if __name__ == "__main__":
    found = first_failure(sys.argv[1])
    if found is not None:
        print(json.dumps(dataclasses.asdict(found)))
