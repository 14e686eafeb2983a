"""Check of the engine's RoPE tables against YaRN's formulas in float64, by the reference's own reading of the keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.reference.published import Rope, read, read_rope
from kdgen.spec.model import Spec
from kdgen.spec.rope import rope_tables
from kdgen.verify.kernels.harness import Findings
from kdgen.verify.kernels.tolerances import EPS32

POSITIONS = 300
ROUNDINGS = 4.0  #: of an angle: of the power, its inverse, the blend and the product, each relative to it


def check_tables(spec: Spec, config: Mapping[str, Any] | None = None) -> Findings:
    """cos and sin of the first positions, the drafter's too where there is one. ``config`` has the target's keys (None: the spec's own)."""
    findings = Findings()
    count = min(POSITIONS, spec.max_position_embeddings)
    keys = spec.model_dump(mode="json") if config is None else config
    _compare(findings, "", rope_tables(spec, count), read(keys).rope)
    if spec.draft is not None:
        rope = read_rope(spec.draft.model_dump(mode="json"), spec.draft.head_dim)
        _compare(findings, "the drafter's ", rope_tables(spec.draft, count), rope)
    return findings


def _compare(findings: Findings, whose: str, tables: tuple[NDArray[np.float32], NDArray[np.float32]], rope: Rope) -> None:
    amplitude, angles = rope.amplitude, np.arange(len(tables[0]))[:, None] * rope.frequencies()
    for name, table, expected in zip(("cos", "sin"), tables, (np.cos(angles), np.sin(angles)), strict=True):
        findings.close(f"{whose}{name}", table, amplitude * expected, amplitude * EPS32 * (ROUNDINGS * angles + 2))
