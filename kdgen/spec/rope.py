"""The engine's RoPE tables. The reference makes its own (``kdgen.reference.published``).

They follow transformers' float32 arithmetic (``modeling_rope_utils``). At large positions two implementations differ by the rounding
of the angle more than by the rounding of the table.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kdgen.spec.drafter import DraftSpec
from kdgen.spec.fields import RopeScaling
from kdgen.spec.model import Spec


def _yarn(scaling: RopeScaling, theta: float, dim: int, frequencies: NDArray[np.float32]) -> NDArray[np.float32]:
    """Blend of stretched (divided by factor) and original inverse frequencies, by how often each pair turns in the original context."""

    def correction_dim(rotations: float) -> float:
        return dim * math.log(scaling.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction_dim(scaling.beta_fast)), 0)
    high = min(math.ceil(correction_dim(scaling.beta_slow)), dim - 1)
    width = np.float32(high - low if high != low else 0.001)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / width, np.float32(0), np.float32(1))
    extrapolated = np.float32(1) - ramp
    with np.errstate(over="ignore"):  # stretched beyond float32 means not turning at all
        stretched = np.float32(1) / (np.float32(scaling.factor) * frequencies)
    blend: NDArray[np.float32] = stretched * (np.float32(1) - extrapolated) + (np.float32(1) / frequencies) * extrapolated
    return blend


def _rotated(spec: Spec | DraftSpec) -> int:
    """Elements of a head that are rotated: all in a drafter, a part in its target."""
    return spec.head_dim if isinstance(spec, DraftSpec) else spec.qk_rope_head_dim


def inverse_frequencies(spec: Spec | DraftSpec) -> NDArray[np.float32]:
    """Radians a position for each rotated pair, [pairs] float32."""
    dim = _rotated(spec)
    frequencies = np.float32(spec.rope_theta) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    if spec.rope_scaling is None:
        return np.float32(1) / frequencies
    return _yarn(spec.rope_scaling, spec.rope_theta, dim, frequencies)


def rope_tables(spec: Spec | DraftSpec, positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(cos, sin), each float32 [positions, pairs], YaRN's amplitude included."""
    angles = np.arange(positions, dtype=np.float32)[:, None] * inverse_frequencies(spec)[None, :]
    amplitude = np.float32(1.0 if spec.rope_scaling is None else spec.rope_scaling.cos_sin_factor)
    return np.cos(angles) * amplitude, np.sin(angles) * amplitude
