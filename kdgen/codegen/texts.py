"""The texts of a plan, and of the special plans in it, as files and as sources for a compiler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kdgen.codegen.render import render
from kdgen.codegen.source import Source
from kdgen.plan.arch import target_for
from kdgen.plan.build import own_kernels
from kdgen.plan.ir import Family, Plan


@dataclass(frozen=True)
class Generated:
    """The texts of one plan by file name, and for each target family the sources to compile, in the order of its plan."""

    plan: Plan
    texts: Mapping[str, str]
    sources: Mapping[Family, tuple[Source, ...]]

    def sources_for(self, arch: str) -> tuple[Source, ...]:
        return self.sources.get(target_for(arch).family, self.sources["generic"])


def generate(plan: Plan) -> Generated:
    """Render ``plan`` and the special plans in it. A kernel that only a special plan has, or has otherwise, is ``<name>_<family>.cu``.

    Raises KdgenError, with template and kernel, when a template does not fit its context.
    """
    rendered = {each.kernel.name: each for each in render(plan)}
    texts = {f"{name}.cu": each.text for name, each in rendered.items()}
    sources: dict[Family, tuple[Source, ...]] = {"generic": tuple(each.source for each in rendered.values())}
    for special in plan.special:
        own = {each.kernel.name: each for each in render(own_kernels(special, plan))}
        texts |= {f"{name}_{special.family}.cu": each.text for name, each in own.items()}
        sources[special.family] = tuple((own.get(kernel.name) or rendered[kernel.name]).source for kernel in special.kernels)
    return Generated(plan, texts, sources)
