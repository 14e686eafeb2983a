"""What can be read off a kernel's text and seen by no run of it on a CPU: the rules that its schedule and its bits rest on."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kdgen.plan.params import ExpertsMma
from kdgen.render import Rendered

_WAIT = re.compile(r"\b(?:begin_after|wait_for)_previous_kernel\(\);")
_STATE = re.compile(r"\breturn\b|\*(?:num_tokens|step_count|num_active)\b")
_ATOMIC = re.compile(r"\batomic[A-Z]\w*\s*\(")
_FAST = re.compile(r"\b__(?:exp|exp10|log|log2|log10|sin|cos|tan|pow|fdividef|frcp|fsqrt|frsqrt)\w*\s*\(")


def text_problems(kernels: Sequence[Rendered]) -> list[str]:
    """GPUs start kernels early, so each waits, before it can end or read what the last one wrote. Sums have an order, so nothing is
    added atomically. One formula has one rounding, so no fast function replaces an exact one."""
    found = []
    bodies = {rendered.kernel.name: _body(rendered) for rendered in kernels}

    def lists_are_old(rendered: Rendered) -> bool:
        """Of experts_down, where experts_gate_up lets it start only after its own wait for the kernel that makes the lists."""
        params = rendered.kernel.params
        before = bodies.get("experts_gate_up", "").partition("allow_next_kernel();")
        return isinstance(params, ExpertsMma) and params.lists_are_old and bool(before[1] and _WAIT.search(before[0]))

    for rendered in kernels:
        code, body = re.sub(r"//.*", "", rendered.text), bodies[rendered.kernel.name]
        waits = list(_WAIT.finditer(body))
        if len(waits) != 1:
            found.append(f"{rendered.kernel.name} waits {len(waits)} times for the kernel before it")
        elif (early := _STATE.search(body[: waits[0].start()])) and not (early[0] == "*num_active" and lists_are_old(rendered)):
            found.append(f"{rendered.kernel.name} has {early[0]} before it waits for the kernel before it")
        for rule, pattern in (("atomic operation", _ATOMIC), ("inexact function", _FAST)):
            if used := pattern.search(code):
                found.append(f"{rendered.kernel.name} uses the {rule} {used[0].rstrip('( ')}")
    return found


def _body(rendered: Rendered) -> str:
    """The kernel itself, without comments."""
    return re.sub(r"//.*", "", rendered.text).partition("__global__")[2].partition("{")[2]
