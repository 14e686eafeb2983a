"""Hypothesis strategies: whole models, whole decoding situations and draft rows, valid by construction.

Models and situations are those of ``kdgen verify --fuzz`` (kdgen.verify.decoding.random_cases), with Hypothesis making the choices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kdgen.spec.model import Spec
from kdgen.verify.decoding import random_cases as drawn
from kdgen.verify.decoding.random_cases import ODD, TILED, RoundsDraw, Situation, T

__all__ = ["ODD", "TILED", "draft_rows", "rounds_draws", "situations", "specs"]


class HypothesisChoices:
    """``random_cases.Choices`` that Hypothesis makes, and shrinks."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def one_of(self, name: str, options: Sequence[T]) -> T:
        return self._draw(st.sampled_from(options), label=name)

    def integer(self, name: str, low: int, high: int) -> int:
        return self._draw(st.integers(low, high), label=name)


@st.composite
def specs(
    draw: st.DrawFn,
    sizes: tuple[int, ...] = ODD,
    max_layers: int = 3,
    quantized: bool | None = False,
    dtypes: tuple[str, ...] = ("bfloat16", "float32"),
) -> Spec:
    """A small valid Spec; ``quantized`` None draws either. ``sizes=TILED`` gives what tensor-core paths accept."""
    return drawn.draw_spec(HypothesisChoices(draw), sizes, max_layers, quantized, dtypes)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Up to four requests with drafters, chunks, samplings and stops of their own, that join and leave."""
    return drawn.draw_situation(HypothesisChoices(draw))


@st.composite
def rounds_draws(draw: st.DrawFn) -> RoundsDraw:
    """A request decoded by rounds: budgets in turn, samplings, stops, blocks and room of any kind."""
    return drawn.draw_rounds(HypothesisChoices(draw))


@st.composite
def draft_rows(draw: st.DrawFn, max_depth: int = 4, max_width: int = 4) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """(tokens, log_probs) [h, k], best first: sixteenths, so that sums are exact and ties are common, and some of probability zero."""
    depth, width = draw(st.integers(0, max_depth)), draw(st.integers(1, max_width))
    sixteenths = st.integers(-64, 0).map(lambda n: n / 16) | st.just(float("-inf"))
    rows = [sorted(draw(st.lists(sixteenths, min_size=width, max_size=width)), reverse=True) for _ in range(depth)]
    tokens = [draw(st.permutations(range(width))) for _ in range(depth)]
    return np.array(tokens, np.int64).reshape(depth, width), np.array(rows, np.float32).reshape(depth, width)
