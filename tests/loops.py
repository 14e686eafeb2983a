"""How often the loops of the templates run while ``kdgen verify`` checks kernels: never, once, twice or more, and the most.

    python -m tests.loops [SPEC …]

prints one line for each loop of each kernel that the default command checks, or checks when specs are named; ``full-size`` instead of a
spec names those of kdgen.verify.kernels.full_size. A loop is known
by its template and its number there. A counter stands in each loop's head: a loader of templates writes it into the text before Jinja
reads it, and everything else is as in ``kdgen verify``, so that the checks see the same kernels. Unrolled C++ loops count as loops,
Jinja's do not.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jinja2
import numpy as np

from kdgen.backends.cpu import CpuBackend
from kdgen.codegen.render import context_of, environment
from kdgen.codegen.source import Source
from kdgen.files.resources import templates_dir
from kdgen.plan.ir import Plan
from kdgen.spec.model import Spec, load_spec
from kdgen.verify.kernels.check import check_kernel
from kdgen.verify.kernels.full_size import Group as Checked
from kdgen.verify.kernels.full_size import groups
from kdgen.verify.kernels.harness import TOKENS
from kdgen.verify.parts.kernels import inputs_of
from kdgen.verify.plans import plans_for, shared_plans
from kdgen.verify.tasks import DEFAULT_SPECS
from kdgen.verify.variants import variants

FOLDERS = ("kernels", "lib")
_HEAD = re.compile(r"//[^\n]*|{#.*?#}|\b(?:for|while) \(|\bdo \{", re.DOTALL)
_COUNTER = """
EMU_API unsigned loops_of_{name}[{loops}][5];
unsigned loops_of_{name}[{loops}][5] = {{}};
namespace {name} {{
struct CountedLoop {{
  unsigned *seen, trips;
  CountedLoop(int loop) : seen(loops_of_{name}[loop]), trips(0) {{}}
  bool again(bool more) {{
    trips += more;
    return more;
  }}
  ~CountedLoop() {{
    seen[trips < 2 ? trips : 2] = 1;
    if (trips > seen[3]) seen[3] = trips;
    if (~trips > seen[4]) seen[4] = ~trips;
  }}
}};
}}
"""


@dataclass(frozen=True)
class Loop:
    """A loop of a template: the ``number``-th of the file, 1 for the first, in line ``line``, and its head as it stands there."""

    template: str
    number: int
    line: int
    head: str


@dataclass(frozen=True)
class Trips:
    """How often a loop ran, of all times that a thread got to it: whether ever not at all, once, twice or more; and the most. ``varies``:
    one kernel ran it sometimes more and sometimes less often.
    """

    never: bool = False
    once: bool = False
    more: bool = False
    most: int = 0
    varies: bool = False

    def __or__(self, other: Trips) -> Trips:
        never, once, more = self.never or other.never, self.once or other.once, self.more or other.more
        return Trips(never, once, more, max(self.most, other.most), self.varies or other.varies)


def _heads(text: str) -> Iterator[tuple[int, int, str]]:
    """(where a loop begins, where its head ends, its keyword) of each loop in a template, comments left out."""
    for match in _HEAD.finditer(text):
        word = match[0].split(" ")[0]
        if word not in ("for", "while", "do") or (word == "while" and text[: match.start()].rstrip().endswith("}")):
            continue  # the end of a do is no loop of its own
        at, depth = match.end(), 1
        while word != "do" and depth:
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
        yield match.start(), at, word


@functools.cache
def loops() -> tuple[Loop, ...]:
    """All loops of all templates, in a fixed order: a loop's place here is its number in kernels' tables."""
    found = []
    for path in sorted(path for folder in FOLDERS for path in (templates_dir() / folder).glob("*.j2")):
        text = path.read_text(encoding="utf-8")
        for number, (begin, end, _) in enumerate(_heads(text), 1):
            found.append(Loop(path.name, number, text.count("\n", 0, begin) + 1, " ".join(text[begin:end].split())))
    return tuple(found)


def counted(template: str, text: str) -> str:
    """A template's text with a counter in the head of each loop."""
    first = next((place for place, loop in enumerate(loops()) if loop.template == template), 0)
    parts, last = [], 0
    for loop, (begin, end, word) in enumerate(_heads(text), first):
        name = f"loop_{loop}"
        opening = f"if (CountedLoop {name}({loop}); false) {{\n}} else "
        inside = text[begin:end].partition("(")[2][:-1]
        if word == "for":
            start, condition, step = inside.split(";")
            head = f"for ({start}; {name}.again({condition.strip() or 'true'}); {step})"
        else:
            head = f"while ({name}.again({inside}))" if word == "while" else f"do {{ {name}.again(true);"
        parts += [text[last:begin], opening, head]
        last = end
    whole = "".join([*parts, text[last:]])
    return re.sub(r"^ *#pragma unroll.*\n", "", whole, flags=re.MULTILINE)  # which must stand right before its loop


class _Loader(jinja2.FileSystemLoader):
    def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str, object]:  # type: ignore[override]
        text, path, fresh = super().get_source(environment, template)
        return counted(template, text), path, fresh


@functools.cache
def _environment() -> jinja2.Environment:
    env = environment()
    env.loader = _Loader([templates_dir() / folder for folder in FOLDERS])
    return env


def load_counted(backend: CpuBackend, plan: Plan) -> None:
    """Load the kernels of ``plan`` with their loops counted."""
    sources = []
    for kernel in plan.kernels:
        text = _environment().get_template(kernel.template).render(context_of(kernel))
        counter = _COUNTER.format(name=kernel.name, loops=len(loops()))
        opening = f"namespace {kernel.name} {{"
        text = text.replace(opening, f"{counter}\n{opening}", 1)
        sources.append(Source(kernel.name, text, kernel.block, kernel.smem, overlaps=True, cluster=kernel.cluster))
    backend.load(sources)


def read_trips(backend: CpuBackend, kernel: str) -> dict[Loop, Trips]:
    """Of each loop that a thread of the loaded ``kernel`` got to."""
    library = ctypes.CDLL(str(backend._kernels[kernel].library))
    table = np.array((ctypes.c_uint32 * (5 * len(loops()))).in_dll(library, f"loops_of_{kernel}")).reshape(-1, 5)
    seen = {loop: [int(value) for value in row] for loop, row in zip(loops(), table, strict=True) if row.any()}
    return {loop: Trips(bool(n), bool(o), bool(m), most, most != 0xFFFFFFFF - least) for loop, (n, o, m, most, least) in seen.items()}


def trips_of(backend: CpuBackend, checked: Checked) -> dict[str, dict[Loop, Trips]]:
    """By kernel, how its loops ran while its check did. Raises RuntimeError when a check fails."""
    spec, plan = checked.spec, checked.plan
    load_counted(backend, plan)
    for kernel in plan.kernels:
        check = check_kernel(backend, spec, plan, kernel, inputs_of(0, kernel), checked.size, checked.tokens)
        if not check.ok:
            raise RuntimeError(f"{spec.name} {plan.compute} {kernel.name}: {check.why}")
    return {kernel.name: read_trips(backend, kernel.name) for kernel in plan.kernels}


def all_checked(specs: Sequence[Spec]) -> Iterator[Checked]:
    """The kernels of ``specs``, of variants, of both on two ranks, and those that run in full size."""
    plans = [*plans_for(specs, None), *plans_for(variants(), None)]
    shared = [(spec, each) for spec, plan in plans if plan.family == "generic" for each in shared_plans(spec, plan)]
    yield from (Checked(spec, plan, "full", TOKENS) for spec, plan in (*plans, *shared) if plan.kernels)
    yield from groups()


def main(names: Sequence[str]) -> None:
    backend = CpuBackend()
    checked = groups() if list(names) == ["full-size"] else all_checked([load_spec(name) for name in names or DEFAULT_SPECS])
    together: dict[Loop, Trips] = {}
    for each in checked:
        title = f"{each.spec.name} {each.plan.compute} {each.plan.family}"
        for kernel, found in trips_of(backend, each).items():
            for loop, trips in found.items():
                together[loop] = together.get(loop, Trips()) | trips
                print(f"{title:28} {kernel:32} {_line(loop, trips)}")
    print("\nall together")
    for loop in loops():
        print(_line(loop, together.get(loop, Trips())))


def _line(loop: Loop, trips: Trips) -> str:
    seen = "".join(mark if there else "-" for mark, there in zip("012", (trips.never, trips.once, trips.more), strict=True))
    return f"{loop.template:30} {loop.number:3} {seen} most {trips.most:7}  {loop.head}"


if __name__ == "__main__":
    main(sys.argv[1:])
