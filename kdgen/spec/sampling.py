"""How the next token is chosen from a row of logits."""

from __future__ import annotations

from dataclasses import dataclass

from kdgen.errors import KdgenError


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy. Filters apply in the order top-k, top-p, min-p, after the temperature.

    ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 leave everything in. With a ``seed`` (64 bits) the same sequence is drawn again, with
    or without speculation, in any batch: the noise is a function of seed, position and token id.
    Raises KdgenError for values outside their ranges.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100 or 0 < self.temperature < 1e-3:
            raise KdgenError(f"temperature must be 0 (greedy) or between 0.001 and 100, not {self.temperature}")
        if not 0 <= self.top_k < 2**31:
            raise KdgenError(f"top_k must be 0 (off) or a number of tokens, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise KdgenError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise KdgenError(f"min_p must be between 0 and 1, not {self.min_p}")
        if not 0 <= self.seed < 2**64:
            raise KdgenError(f"a seed has 64 bits, not {self.seed}")


GREEDY = Sampling()
