"""Check of the RoPE tables, which engine and reference share so that both rotate by the same bits: against YaRN's formulas in float64."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kdgen.draft_spec import DraftSpec
from kdgen.fields import RopeScaling
from kdgen.rope import rope_tables
from kdgen.spec import Spec
from kdgen.verify.bench import Findings
from kdgen.verify.tolerances import EPS32

POSITIONS = 300
ROUNDINGS = 4.0  #: of an angle: of the power, its inverse, the blend and the product, each relative to it


def check_tables(spec: Spec) -> Findings:
    """cos and sin of the first positions, the drafter's too where there is one."""
    findings = Findings()
    count = min(POSITIONS, spec.max_position_embeddings)
    for model, whose in ((spec, ""), (spec.draft, "the drafter's ")):
        if model is None:
            continue
        cos, sin = rope_tables(model, count)
        amplitude, angles = _amplitude(model.rope_scaling), np.arange(count)[:, None] * _frequencies(model, cos.shape[1])
        for name, table, expected in (("cos", cos, np.cos(angles)), ("sin", sin, np.sin(angles))):
            findings.close(f"{whose}{name}", table, amplitude * expected, amplitude * EPS32 * (ROUNDINGS * angles + 2))
    return findings


def _frequencies(spec: Spec | DraftSpec, half: int) -> NDArray[np.float64]:
    """Radians a position of each pair. Pairs that turn often in the original context stay, slow ones are stretched, a ramp between
    (YaRN, arXiv 2309.00071, section 3.2; the ramp's ends are whole pairs, as in the published code)."""
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
