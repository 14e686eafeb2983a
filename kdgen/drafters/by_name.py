"""Every drafter by its name, in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kdgen.drafters.base import Drafter
from kdgen.drafters.dflash import DFlashDrafter
from kdgen.drafters.ngram import NgramDrafter
from kdgen.drafters.synthetic import AdversarialDrafter, RandomDrafter, ReplayDrafter
from kdgen.errors import KdgenError

#: Drafters that users have; the others are made for tests.
OF_USERS = ("ngram", "dflash")
NAMES = (*OF_USERS, "replay", "random", "adversarial")


@dataclass(frozen=True)
class Making:
    """What drafters are made from. ``truth`` is the text that plain decoding gives, which replay and adversarial know; replay is wrong with
    probability ``error_rate`` at each token. ``block_size`` and ``chain`` are DFlash's."""

    vocab_size: int
    truth: Sequence[int] = ()
    error_rate: float = 0.0
    seed: int = 0
    block_size: int = 8
    chain: bool = False


def drafter_called(name: str, making: Making) -> Drafter:
    """The drafter of that name. Raises KdgenError where there is none."""
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
    raise KdgenError(f"no drafter is called {name!r}; there are {', '.join(NAMES)}")
