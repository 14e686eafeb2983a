"""Where a decode leaves the reference is found, whatever is wrong before or after."""

from __future__ import annotations

import numpy as np
import pytest

from kdgen.spec.model import load_spec
from kdgen.verify.decoding.first_difference import first_departure
from kdgen.verify.published import reference_of
from kdgen.weights.random import random_weights

TOKENS = [5, 17, 9, 3]


@pytest.mark.parametrize(("layer", "position"), [(0, 0), (2, 3)])
def test_the_first_layer_and_position_are_named(layer: int, position: int) -> None:
    spec = load_spec("tiny")
    weights = random_weights(spec, 0)
    cache = reference_of(spec, weights).forward(TOKENS).rows.astype(np.float32)
    assert first_departure(spec, "f32", weights, TOKENS, cache).startswith("all layers' cache rows agree with the reference")
    cache[layer, position, 1] += 1.0
    cache[layer + 1, 0] *= 2
    said = first_departure(spec, "f32", weights, TOKENS, cache)
    assert said.startswith(f"layer {layer} is the first") and f"at position {position}," in said and "less than 0.001" in said
    cache[layer, position, 1] = np.nan
    assert first_departure(spec, "f32", weights, TOKENS, cache).startswith(f"layer {layer} is the first")
