"""Check of the RoPE tables, which engine and reference share so that both rotate by the same bits: against YaRN's formulas in float64."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kdgen.rope import rope_tables
from kdgen.spec import RopeScaling, Spec
from kdgen.verify.bench import Findings
from kdgen.verify.tolerances import EPS32

POSITIONS = 300
ROUNDINGS = 4.0  #: of an angle: of the power, its inverse, the blend and the product, each relative to it


def check_tables(spec: Spec) -> Findings:
    """cos and sin of the first positions."""
    findings = Findings()
    count = min(POSITIONS, spec.max_position_embeddings)
    amplitude, angles = _amplitude(spec.rope_scaling), np.arange(count)[:, None] * _frequencies(spec)
    for name, table, function in zip(("cos", "sin"), rope_tables(spec, count), (np.cos, np.sin), strict=True):
        tolerance = amplitude * EPS32 * (ROUNDINGS * angles + 2)
        findings.close(name, table, amplitude * function(angles), tolerance)
    return findings


def _frequencies(spec: Spec) -> NDArray[np.float64]:
    """Radians a position of each pair. Pairs that turn often in the original context stay, slow ones are stretched, a ramp between
    (YaRN, arXiv 2309.00071, section 3.2; the ramp's ends are whole pairs, as in the published code)."""
    half = spec.qk_rope_head_dim // 2
    plain: NDArray[np.float64] = spec.rope_theta ** -(np.arange(half) / half)
    if (yarn := spec.rope_scaling) is None:
        return plain

    def pair_that_turns(times: float) -> float:
        return half * math.log(yarn.original_max_position_embeddings / (2 * math.pi * times)) / math.log(spec.rope_theta)

    first = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(yarn.beta_slow)), 2 * half - 1)
    stretched = np.clip((np.arange(half) - first) / (last - first or 0.001), 0, 1)
    return plain * (1 - stretched) + plain / yarn.factor * stretched


def _amplitude(yarn: RopeScaling | None) -> float:
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor

    def magnitude(weight: float) -> float:
        return 1 + 0.1 * weight * math.log(yarn.factor)

    if yarn.mscale and yarn.mscale_all_dim:
        return magnitude(yarn.mscale) / magnitude(yarn.mscale_all_dim)
    return magnitude(1)
