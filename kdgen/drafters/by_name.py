"""The registry of drafters by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kdgen.drafters.base import Drafter
from kdgen.drafters.dflash import DFlashDrafter
from kdgen.drafters.ngram import NgramDrafter
from kdgen.drafters.synthetic import AdversarialDrafter, RandomDrafter, ReplayDrafter
from kdgen.errors import KdgenError

#: Drafters for users; the others are for tests.
OF_USERS = ("ngram", "dflash")
NAMES = (*OF_USERS, "replay", "random", "adversarial")


@dataclass(frozen=True)
class Making:
    """Arguments of drafters. ``truth`` has the tokens that plain decoding gives, for replay and adversarial; replay proposes a wrong token
    with probability ``error_rate``. ``block_size`` and ``chain`` are DFlash's."""

    vocab_size: int
    truth: Sequence[int] = ()
    error_rate: float = 0.0
    seed: int = 0
    block_size: int = 8
    chain: bool = False


def drafter_called(name: str, making: Making) -> Drafter:
    """The drafter called ``name``. Raises KdgenError for an unknown name."""
    if name == "ngram":
        return NgramDrafter()
    if name == "dflash":
        return DFlashDrafter(making.block_size, making.chain)
    if name == "replay":
        return ReplayDrafter(making.truth, making.vocab_size, making.error_rate, making.seed)
    if name == "random":
        return RandomDrafter(making.vocab_size, making.seed)
    if name == "adversarial":
        return AdversarialDrafter(making.truth, making.vocab_size, seed=making.seed)
    raise KdgenError(f"unknown drafter {name!r}; there are {', '.join(NAMES)}")
