"""Where a decode leaves the float64 reference: the first layer whose cache rows do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.plan.ir import Compute
from kdgen.spec.model import Spec
from kdgen.verify.published import reference_of

#: The error of a cache row, over the row's root mean square, from which it counts as another row: far above rounding in models of a few
#: layers, far below what a wrong operand makes of it.
_FAR: Mapping[Compute, float] = {"f32": 1e-3, "bf16": 0.15}


def first_departure(
    spec: Spec, compute: Compute, weights: Mapping[str, NDArray[Any]], tokens: Sequence[int], cache: NDArray[np.generic]
) -> str:
    """The first layer whose cache row of some token is not the reference's, and the first such token, in a sentence.

    ``cache`` [layers, length, cache_row_dim] has the rows of the first tokens. A layer's row depends on what the layers before it gave,
    so the fault lies in that layer's projections to the row, or behind the row of the layer before.
    """
    rows = min(len(tokens), cache.shape[1])
    expected = reference_of(spec, weights).forward(tokens[:rows]).rows
    ours = cache[:, :rows].astype(np.float64)
    scale = np.sqrt(np.square(expected).mean(axis=2)) + np.finfo(np.float64).tiny
    with np.errstate(invalid="ignore"):
        error = np.nan_to_num(np.abs(ours - expected), nan=np.inf).max(axis=2) / scale
    far = error > _FAR[compute]
    if not far.any():
        return "all layers' cache rows agree with the reference: the error is after the last layer's attention, or in the head"
    layer = int(far.any(axis=1).argmax())
    position = int(far[layer].argmax())
    return (
        f"layer {layer} is the first whose cache row differs from the reference's, at position {position}, by"
        f" {error[layer, position]:.3g} of the row's size, where rounding makes less than {_FAR[compute]:g}"
    )
