"""How far a kernel's result may lie from float64's, written once. Each bound follows from the type and the reduction's length.

Inputs are taken as rounded already, so only the kernel's own roundings count. Bounds are arrays: one tolerance an element,
from the magnitudes that went into it. Integers have none; they must be equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F64 = NDArray[np.float64]

EPS32 = 2.0**-23  #: float32's spacing at 1: two roundings to nearest
BF16_ROUNDING = 2.0**-8  #: the most that rounding to bfloat16 changes a value by, relative to it
#: A float32 dot product's partial sums wander like sqrt(k) times a term; their roundings add up at random, and no bound by the sum
#: of magnitudes would notice a missing term. Four standard deviations and more, of rounding to nearest and of the truncation in
#: tensor cores alike.
DOT_FACTOR = 4.0
FUNCTION_ULPS = 8.0  #: an expf, a division and a few products: float32 roundings of a value computed by a short formula


def stored(value: Array, dtype: str) -> F64:
    """Rounding of ``value`` on its way to memory as ``float`` (none) or ``bf16``."""
    return np.abs(value).astype(np.float64) * (BF16_ROUNDING if dtype == "bf16" else 0.0)


def formula(value: Array) -> F64:
    """A value from a short formula of float32 operations, none of which cancels."""
    bound: F64 = FUNCTION_ULPS * EPS32 * np.abs(value)
    return bound


def dot(terms_norm: Array, length: int) -> F64:
    """A float32 dot product of ``length`` terms whose Euclidean norm, over the terms, is ``terms_norm``."""
    bound: F64 = DOT_FACTOR * EPS32 * np.sqrt(length) * terms_norm
    return bound


def terms_norm(x: Array, w: Array) -> F64:
    """Euclidean norm of the terms of x [M, K] times w [N, K] transposed: [M, N]."""
    norm: F64 = np.sqrt(np.square(x.astype(np.float64)) @ np.square(w.astype(np.float64)).T)
    return norm


def swiglu(gate: Array, up: Array, gate_error: Array, up_error: Array) -> F64:
    """silu(gate)·up where gate and up are off by their errors; silu's slope is at most 1.1."""
    sigma = 1 / (1 + np.exp(-np.clip(gate, -80, 80)))
    bound: F64 = 1.1 * gate_error * np.abs(up) + up_error * np.abs(gate * sigma) + formula(gate * sigma * up)
    return bound


def positive_sum(value: Array, length: int) -> F64:
    """A float32 sum of ``length`` terms of one sign: the partial sums are no larger than the result."""
    bound: F64 = EPS32 * (4 + np.sqrt(length)) * np.abs(value)
    return bound


def normed(value: Array, length: int) -> F64:
    """An RMSNorm output over ``length`` elements."""
    return positive_sum(value, length) + formula(value)


def probabilities(score_error: Array, below_max: Array, keys: int) -> F64:
    """Relative error of exp(score − max), or of a sum of ``keys`` such terms that is rescaled as the maximum grows.

    ``below_max`` is max − score: subtracting the two rounds by that much.
    """
    bound: F64 = score_error + EPS32 * (FUNCTION_ULPS + np.abs(below_max) + 2 * np.sqrt(keys) + keys / 8)
    return bound


def bf16_average(terms_norm: Array, terms_sum: Array) -> F64:
    """Σ p·c with p rounded to bfloat16: independent roundings, never more than all of them at their worst."""
    bound: F64 = np.minimum(4 * BF16_ROUNDING * terms_norm, BF16_ROUNDING * terms_sum)
    return bound


# ---- whole models -------------------------------------------------------------------------------------------------------

#: float32 logits of up to 7 against an oracle that is itself float32 and 2e-5 off (4e-5 with YaRN over 120 positions).
ORACLE_LOGITS = 5e-5
#: Roundings to bfloat16 that a layer's output has gone through: norms, queries, absorbed queries, probabilities, latents, attention,
#: MLP activations, router inputs.
BF16_ROUNDINGS_A_LAYER = 10


def float32_logits(expected: Array) -> float:
    """Largest error of a float32 model's logits: some hundred roundings of values that are summed with the largest."""
    return float(100 * EPS32 * np.abs(expected).max())


def bf16_logits(expected: Array, layers: int) -> float:
    """Root mean square error of a typical logits row: roundings add up at random, each relative to what it rounds.

    Three times that, for where two experts score alike a rounding changes the choice, and later rows attend to what came of it.
    """
    spread = float(np.sqrt(np.square(expected).mean()))
    return float(3 * BF16_ROUNDING * np.sqrt(BF16_ROUNDINGS_A_LAYER * layers) * spread)
