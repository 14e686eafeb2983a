"""The text of one kernel, with what a compiler and a launch need to know of it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """The CUDA C++ text of one kernel.

    The text has exactly one ``extern "C" __global__`` function, called ``name``, inside ``namespace <name>``;
    it includes only ``primitives.cuh``. ``block`` is its launch bound, ``smem`` its dynamic shared memory in bytes.
    """

    name: str
    text: str
    block: int
    smem: int
    #: The text waits for the kernel before it by itself (``griddepcontrol_wait``), so a GPU may start it early.
    overlaps: bool = False
    #: Blocks that a block's threads are divided among where a GPU has clusters; each has ``smem``.
    cluster: int = 1
    #: Parameters by name through which it reads or writes before it has waited, besides those that are ``__restrict__``.
    early: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """What is compiled, and what caches are keyed by: ``text`` with the comment at its top left empty, line by line.

        The comment names the spec and its hash. Another name, or another end token, changes neither of them in the machine code.
        """
        top = re.match(r"(?://[^\n]*(?<!\\)\n)*", self.text)
        lines = top[0].count("\n") if top else 0
        return "\n" * lines + self.text.split("\n", lines)[-1]
