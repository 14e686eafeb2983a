"""Random checkpoints: any spec's tensors made up on demand, in the published layout.

A tensor depends on the seed and its key alone, so that it can be made, dropped and made again, in any order and on any
machine. Scales keep activations of order one through any depth, and spread the logits enough that greedy choices are clear.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.plan.formats import expert_format
from kdgen.plan.tuning import mode_of
from kdgen.spec.fields import TensorGroup
from kdgen.spec.model import Spec
from kdgen.weights.formats import on_host
from kdgen.weights.pools import BF16

Array = NDArray[Any]

#: How far logits spread (their standard deviation): wide enough for clear winners, narrow enough for small float32 errors.
_LOGIT_SPREAD = 2.0


class RandomWeights(Mapping[str, Array]):
    """Checkpoint tensors by published key, made when asked for and not kept; a drafter's are among them where the spec has one.

    Matrices are bfloat16 (or float32 of bfloat16 values, when ``Spec.dtype`` says so), norms bfloat16, the router's bias float32,
    quantized experts int32 words, bfloat16 scales and an int64 shape. Every value is exactly a bfloat16.
    """

    def __init__(self, spec: Spec, seed: int) -> None:
        self.spec, self.seed = spec, seed
        drafted = spec.draft.tensors() if spec.draft else ()
        self._groups = {key: group for group in itertools.chain(spec.tensors(), drafted) for key in group.names()}
        self._inputs = {_matrix_key(key, group): math.prod((group.matrix or group.shape)[1:]) for key, group in self._groups.items()}
        self._experts = on_host(expert_format(spec, mode_of(spec, "f32")))

    def __getitem__(self, key: str) -> Array:
        return self._make(key, self._groups[key])

    def __contains__(self, key: object) -> bool:
        return key in self._groups

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def _make(self, key: str, group: TensorGroup) -> Array:
        digest = hashlib.sha256(f"{self.seed}:{key}".encode()).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
        if group.matrix is not None:
            return self._experts.random_part(group, generator, self.deviation(_matrix_key(key, group)))
        if len(group.shape) < 2:
            return self._vector(key, generator.standard_normal(group.shape, np.float32))
        stored = np.dtype(np.float32) if self.spec.dtype == "float32" and group.kind == "matrix" else BF16
        values = generator.standard_normal(group.shape, np.float32)
        values *= np.float32(self.deviation(key))
        return _exact(values, stored)

    @staticmethod
    def _vector(key: str, values: NDArray[np.float32]) -> Array:
        """A bias lies around 0. Every other vector multiplies, as the weights of norms do, and lies around 1."""
        if key.endswith("e_score_correction_bias"):
            return _exact(0.05 * values, np.dtype(np.float32))
        return _exact(0.1 * values if key.endswith("bias") else 1 + 0.1 * values, BF16)

    def deviation(self, key: str) -> float:
        """Standard deviation of the values of a matrix, quantized or not; its key ends in ``weight``."""
        if key == "model.embed_tokens.weight":
            return self._gain(key)
        return self._gain(key) / math.sqrt(self._inputs[key])

    def _gain(self, key: str) -> float:
        """Standard deviation of a matrix's outputs for inputs of order one."""
        if key == "lm_head.weight":
            return _LOGIT_SPREAD
        if key == "model.embed_tokens.weight":
            # Tied, the embedding is the head as well; its rows then must not be longer than a head's.
            return _LOGIT_SPREAD / math.sqrt(self.spec.hidden_size) if self.spec.tie_word_embeddings else 1.0
        if "o_proj" in key or "down_proj" in key:
            # These outputs add to the residual stream. Attention averages, so its outputs are small; a SwiGLU's are about a third.
            return 1.5
        return 1.0


def _matrix_key(key: str, group: TensorGroup) -> str:
    """The key of the matrix that a tensor is, or is a part of."""
    return key.removesuffix(f"_{group.kind}") if group.matrix else key


def _exact(values: NDArray[np.float32], dtype: np.dtype[Any]) -> Array:
    """Values rounded to bfloat16, held in ``dtype``."""
    rounded = values.astype(BF16)
    return rounded if dtype == BF16 else rounded.astype(dtype)


def random_weights(spec: Spec, seed: int) -> RandomWeights:
    """Random checkpoint tensors for ``spec``, by published key; see RandomWeights."""
    return RandomWeights(spec, seed)
