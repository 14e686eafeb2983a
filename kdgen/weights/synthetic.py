"""Made-up weights for models too large to draw value by value: packed tensors tiled from a small pool of random values.

Every tensor, expert and head starts elsewhere in its pool, whose length is prime, so that no two rows of a model are alike.
Router, norms and biases decide routing and keep activations in bounds. They are drawn in full, as ``RandomWeights`` draws them, and the
pools have that module's scales.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

from kdgen.plan.formats import format_of
from kdgen.plan.ir import Weight
from kdgen.spec.fields import TensorGroup
from kdgen.spec.model import Spec
from kdgen.weights.checkpoint import DTYPES
from kdgen.weights.formats import on_host
from kdgen.weights.pack import PackedWeights, packed_parts
from kdgen.weights.pools import Array, Pools
from kdgen.weights.random import RandomWeights

#: Checkpoint bytes up to which ``RandomWeights`` is quick enough.
MOST_DRAWN = 2e9


def checkpoint_bytes(spec: Spec) -> int:
    """Bytes of a published checkpoint of ``spec``, as far as it decides sizes: a tensor that may be stored in two types counts as bf16."""
    matrix = 2 if spec.dtype == "bfloat16" else 4

    def item(group: TensorGroup) -> int:
        return DTYPES[group.stored[0]].itemsize if group.stored else matrix if group.kind == "matrix" else 2

    return sum(math.prod(group.shape) * group.count * times * item(group) for group, times in spec.tensor_kinds())


class SyntheticWeights(PackedWeights):
    """Packed weights that depend on the seed, the plan's layouts and nothing else, made at the speed of a copy."""

    def __init__(self, spec: Spec, seed: int) -> None:
        self._drawn, self._pools, self._seed = RandomWeights(spec, seed), Pools(seed), seed

    def parts(self, weight: Weight, layer: int) -> Iterator[Array]:
        batch, rows, cols = weight.logical
        vector_or_router = weight.layout == "row_major" and weight.name != "embed_tokens"
        form = on_host(format_of(weight))
        if vector_or_router or form.is_padded(weight.layout, rows, cols):
            yield from packed_parts(weight, layer, self._drawn.__getitem__)
            return
        deviation = self._drawn.deviation(weight.sources[0].replace("{i}", str(layer)).replace("{e}", "0"))
        for entry in range(batch):
            rank = f":{weight.part.index}" if weight.part else ""  # ranks hold different parts
            digest = hashlib.sha256(f"{self._seed}:{weight.device_name(layer)}:{entry}{rank}".encode()).digest()
            start = int.from_bytes(digest[:8], "little")
            yield from form.made_up(weight, self._pools, deviation, start)
