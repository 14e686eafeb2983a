"""What can be read off kernels' texts and seen by no run of them on a CPU: the rules that their bits rest on."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kdgen.codegen.render import Rendered
from kdgen.verify.kernels.twins import sends

_ATOMIC = re.compile(r"\batomic[A-Z]\w*\s*\(")
_FAST = re.compile(r"\b__(?:exp|exp10|log|log2|log10|sin|cos|tan|pow|fdividef|frcp|fsqrt|frsqrt)\w*\s*\(")


def text_problems(kernels: Sequence[Rendered]) -> list[str]:
    """Sums have an order, so nothing is added atomically. One formula has one rounding, so no fast function replaces an exact one.

    A kernel that sends lets the next one begin once it has waited itself: the next one takes what lies before both for done.
    """
    found = []
    for rendered in kernels:
        code = re.sub(r"//.*", "", rendered.text)
        for rule, pattern in (("atomic operation", _ATOMIC), ("inexact function", _FAST)):
            if used := pattern.search(code):
                found.append(f"{rendered.kernel.name} uses the {rule} {used[0].rstrip('( ')}")
        if sends(rendered.kernel) and not _waits_first(code):
            found.append(f"{rendered.kernel.name} sends results, but lets the next kernel start before its own wait")
    return found


def _waits_first(code: str) -> bool:
    waits, allows = code.find("griddepcontrol_wait();"), code.find("griddepcontrol_launch_dependents();")
    return 0 <= waits < allows and "begin_after_previous_kernel();" not in code
