"""The model's DFlash drafter (arXiv 2602.06036). It runs on the device, in its target's steps; see ``kdgen.plan.draft_step``."""

from __future__ import annotations

from collections.abc import Sequence

from kdgen.drafters.base import DeviceDrafter, DeviceDraftRequest


class DFlashDrafter(DeviceDrafter):
    """Requests a draft of a block of ``block_size`` rows, at most as many as the drafter was trained for.

    With ``chain``, a draft is the most probable token of each depth, as in the DFlash paper, instead of a tree.
    """

    name = "dflash"

    def __init__(self, block_size: int, chain: bool = False) -> None:
        self.block_size, self.chain = block_size, chain

    def propose(self, context: Sequence[int], depths: int) -> DeviceDraftRequest:
        return DeviceDraftRequest(min(depths, self.block_size - 1), self.block_size, 1 if self.chain else 0)
