"""The text of one kernel, with the facts that a compiler and a launch need."""

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
    #: The text calls ``griddepcontrol_wait``, so a GPU may start the kernel while the previous one runs.
    overlaps: bool = False
    #: Blocks of a cluster, among which a GPU with clusters divides a block's threads; each has ``smem`` bytes.
    cluster: int = 1
    #: Names of the parameters through which it reads or writes before its wait, besides those that are ``__restrict__``.
    early: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """The text to compile, which is also the cache's key: ``text`` with empty lines instead of the comment at its top.

        That comment has the spec's name and hash. Another name, or another end token, does not change the machine code.
        """
        top = re.match(r"(?://[^\n]*(?<!\\)\n)*", self.text)
        lines = top[0].count("\n") if top else 0
        return "\n" * lines + self.text.split("\n", lines)[-1]
