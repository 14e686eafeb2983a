"""Matrices as a checkpoint stores them, in float64: every format that a checkpoint may have, one branch each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.reference import int4


def stored_tensor(stored: Mapping[str, NDArray[Any]], key: str) -> NDArray[np.float64]:
    """The tensor ``key`` of a checkpoint. A quantized matrix is dequantized. Raises KeyError when the checkpoint has no such tensor."""
    if f"{key}_packed" in stored:
        _, cols = stored[f"{key}_shape"]
        return int4.decode(stored[f"{key}_packed"], stored[f"{key}_scale"], int(cols))
    return stored[key].astype(np.float64)
