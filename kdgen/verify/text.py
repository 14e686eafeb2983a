"""What can be read off kernels' texts and seen by no run of them on a CPU: the rules that their schedule and their bits rest on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kdgen.plan.ir import Launch, Plan, Program
from kdgen.render import Rendered

_WAIT = re.compile(r"\b(?:begin_after|wait_for)_previous_kernel\(\);")
_ALLOW = re.compile(r"\b(?:begin_after_previous_kernel|allow_next_kernel)\(\);")
_ATOMIC = re.compile(r"\batomic[A-Z]\w*\s*\(")
_FAST = re.compile(r"\b__(?:exp|exp10|log|log2|log10|sin|cos|tan|pow|fdividef|frcp|fsqrt|frsqrt)\w*\s*\(")
#: Kernels some of whose threads wait for these, each time before they read them; all others of their inputs are old.
_LOADERS_WAIT = {"mla_attention_wgmma.cu.j2": frozenset({"query", "kv_cache"})}


@dataclass(frozen=True)
class _Text:
    """A kernel as the rules see it."""

    name: str
    code: str  #: all of it, without comments
    body: str  #: of the kernel function itself
    parameters: tuple[str, ...]
    written: frozenset[str]  #: parameters that it may write through once the next kernel may have started
    early: frozenset[str]  #: those of other kernels' data that it may read before it waits
    late: bool  #: it lets the next kernel start only after its own wait
    loaders_wait: bool


def text_problems(kernels: Sequence[Rendered]) -> list[str]:
    """GPUs start kernels early, so each waits before it can end. Sums have an order, so nothing is added atomically. One formula has one
    rounding, so no fast function replaces an exact one.
    """
    found = []
    for rendered in kernels:
        text = _read(rendered)
        waits = list(_WAIT.finditer(text.body))
        if len(waits) != 1 and not (text.loaders_wait and waits):
            found.append(f"{text.name} waits {len(waits)} times for the kernel before it")
        elif re.search(r"\breturn\b", text.body[: waits[0].start()]):
            found.append(f"{text.name} has return before it waits for the kernel before it")
        for rule, pattern in (("atomic operation", _ATOMIC), ("inexact function", _FAST)):
            if used := pattern.search(text.code):
                found.append(f"{text.name} uses the {rule} {used[0].rstrip('( ')}")
    return found


def schedule_problems(plan: Plan, kernels: Sequence[Rendered]) -> list[str]:
    """What kernels read before they wait must be old in every program of ``plan``, whose kernels these all are."""
    texts = {rendered.kernel.name: _read(rendered) for rendered in kernels}
    found = [problem for program in plan.programs for problem in _early_reads(program, texts)]
    return list(dict.fromkeys(found))


def _early_reads(program: Program, texts: dict[str, _Text]) -> Iterator[str]:
    """Reads before the wait of what may be new. It is old where, since it was written, some kernel has let the next one start only after
    its own wait: all that ran before that kernel was done then.
    """
    any_late, fresh = False, set[str]()  # what was written since the last such kernel
    for launch in (launch for launch, _ in program.launches() if launch.kernel in texts):
        text = texts[launch.kernel]
        for name in sorted(text.early):
            buffer = _buffer_of(launch, text, name)
            if buffer is not None and (not any_late or buffer in fresh):
                yield f"{text.name} reads {name} before it waits for the kernel before it, and in {program.name} it may be new"
        if text.late:
            any_late, fresh = True, set()
        fresh |= {buffer for name in text.written if (buffer := _buffer_of(launch, text, name)) is not None}


def _buffer_of(launch: Launch, text: _Text, parameter: str) -> str | None:
    place = text.parameters.index(parameter)
    arg = launch.args[place] if place < len(launch.args) else None
    return arg.name if arg is not None and arg.kind in ("buffer", "layer_buffer") else None


def _read(rendered: Rendered) -> _Text:
    code = re.sub(r"//.*", "", rendered.text)
    head, _, body = code.partition("__global__")[2].partition("{")
    declared = [declaration.strip() for declaration in head[head.rindex("(") + 1 : head.rindex(")")].split(",")]
    names = tuple(re.split(r"[\s*]+", declaration)[-1] for declaration in declared)
    pointers = {name: declaration for name, declaration in zip(names, declared, strict=True) if "*" in declaration}
    waited = _LOADERS_WAIT.get(rendered.kernel.template, frozenset())
    waits, allow = list(_WAIT.finditer(body)), _ALLOW.search(body)
    before = body[: waits[-1 if waited else 0].start()] if waits else body
    early = {name for name, declaration in pointers.items() if "__restrict__" not in declaration and _uses(before, name)}
    if waited:  # by threads that only read
        early = {name for name in early - waited if pointers[name].startswith("const ")}
    late = bool(waits and allow and waits[0].end() <= allow.start())
    open_to_next = body[allow.end() :] if allow else body
    written = {name for name, declaration in pointers.items() if not declaration.startswith("const ") and _uses(open_to_next, name)}
    return _Text(rendered.kernel.name, code, body, names, frozenset(written), frozenset(early), late, bool(waited))


def _uses(code: str, name: str) -> bool:
    return re.search(rf"(?<![.\w]){name}\b", code) is not None
