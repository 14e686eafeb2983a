"""Every kernel of a plan run alone, on random inputs, against float64 computed from the same inputs.

Each check also sees to it that a kernel writes what it should and nothing else, and that the bits of a token row do not depend on
where the row stands or what else is in the launch (DESIGN's exactness contract).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kdgen.backends.base import Backend
from kdgen.codegen.render import Rendered, render
from kdgen.errors import BackendError
from kdgen.plan.ir import Kernel, Plan
from kdgen.spec.model import Spec
from kdgen.verify.kernels import (
    attention,
    attention_schedule,
    attention_splits,
    choices,
    dense,
    drafter,
    drafter_attention,
    experts,
    few_rows,
    rank_sums,
    sampling,
    step_rows,
    trees,
)
from kdgen.verify.kernels.harness import TOKENS, Harness, Registry, Size, Skip

CHECKS: Registry = {
    **dense.CHECKS,
    **attention.CHECKS,
    **attention_schedule.CHECKS,
    **attention_splits.CHECKS,
    **few_rows.CHECKS,
    **experts.CHECKS,
    **step_rows.CHECKS,
    **choices.CHECKS,
    **trees.CHECKS,
    **sampling.CHECKS,
    **drafter.CHECKS,
    **drafter_attention.CHECKS,
    **rank_sums.CHECKS,
}


@dataclass(frozen=True)
class KernelCheck:
    """What one kernel's check gave. ``error`` and ``tolerance`` are those of the element that came closest to its tolerance.

    ``sliced``: only a part of the kernel's grid ran. ``bits`` of rows in other positions and companies were compared.
    """

    kernel: str
    template: str
    ran: bool
    tokens: tuple[int, ...]
    error: float
    tolerance: float
    ok: bool
    why: str = ""
    sliced: bool = False
    bits: int = 0


def load_kernels(backend: Backend, plan: Plan) -> list[Rendered]:
    """Render and load every kernel of ``plan``, under their own names; returns their texts."""
    kernels = render(plan)
    backend.load([rendered.source for rendered in kernels])
    return kernels


def check_kernel(
    backend: Backend,
    spec: Spec,
    plan: Plan,
    kernel: Kernel,
    rng: np.random.Generator,
    size: Size = "full",
    tokens: Sequence[int] = TOKENS,
) -> KernelCheck:
    """Check one kernel, which must be loaded (``load_kernels``). ``tokens`` are the token counts of its launches.

    A kernel that the backend stops (a race, an access out of bounds) failed; one without a check fails too.
    """

    def outcome(ran: bool, ok: bool, why: str, harness: Harness | None = None) -> KernelCheck:
        error, tolerance = (harness.findings.error, harness.findings.tolerance) if harness else (0.0, 0.0)
        sliced, bits = (harness.was_cut, harness.findings.bits) if harness else (False, 0)
        return KernelCheck(kernel.name, kernel.template, ran, tuple(tokens), error, tolerance, ok, why, sliced, bits)

    check = CHECKS.get(kernel.template)
    if check is None:
        return outcome(False, False, f"{kernel.template} has no check")
    with Harness(backend, spec, plan, kernel, rng, size, tuple(tokens)) as harness:
        try:
            check(harness)
        except Skip as reason:
            return outcome(False, False, str(reason), harness)
        except BackendError as error:
            return outcome(True, False, str(error), harness)
        problems = harness.findings.problems
    return outcome(True, not problems, _summary(problems), harness)


def _summary(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}"


def check_kernels(
    backend: Backend, spec: Spec, plan: Plan, seed: int = 0, size: Size = "full", tokens: Sequence[int] = TOKENS
) -> list[KernelCheck]:
    """Load and check every kernel of ``plan``, in its order. A kernel's inputs depend on ``seed`` and its place alone."""
    load_kernels(backend, plan)
    return [
        check_kernel(backend, spec, plan, kernel, np.random.default_rng([seed, place]), size, tokens)
        for place, kernel in enumerate(plan.kernels)
    ]
