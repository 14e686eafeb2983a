"""Check of the engine's RoPE tables against YaRN's formulas in float64, by the reference's own reading of the keys."""

from __future__ import annotations

import numpy as np

from kdgen.reference.published import read_rope
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
        values = model.model_dump(mode="json")
        rope = read_rope(values, values["head_dim" if whose else "qk_rope_head_dim"])
        amplitude, angles = rope.amplitude, np.arange(count)[:, None] * rope.frequencies()
        for name, table, expected in (("cos", cos, np.cos(angles)), ("sin", sin, np.sin(angles))):
            findings.close(f"{whose}{name}", table, amplitude * expected, amplitude * EPS32 * (ROUNDINGS * angles + 2))
    return findings
