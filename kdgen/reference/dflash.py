"""The DFlash drafter in float64 NumPy (arXiv 2602.06036): what the generated drafter is held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.reference import ops
from kdgen.reference.published import read_rope
from kdgen.spec.drafter import DraftSpec

Array = NDArray[Any]
F64 = NDArray[np.float64]


@dataclass(frozen=True)
class DraftCache:
    """Keys (normed and rotated) and values of committed tokens, both [layers, T, key heads, head_dim]."""

    keys: F64
    values: F64

    @property
    def length(self) -> int:
        return int(self.keys.shape[1])


def visible(draft: DraftSpec, layer: int, queries: Array, keys: Array) -> NDArray[np.bool_]:
    """[Q, K]: whether the row at each of the ``queries``' positions sees the key at each of the ``keys``'."""
    window, apart = draft.window(layer), queries[:, None] - keys[None, :]
    if not window:
        return np.ones(apart.shape, bool)
    near: NDArray[np.bool_] = np.abs(apart) < window
    return near & (apart >= 0) if draft.sliding_mask == "causal" else near


class ReferenceDrafter:
    """A drafter over its checkpoint tensors, with its target's ``embedding`` and ``head``, both [V, hidden]."""

    def __init__(self, draft: DraftSpec, weights: Mapping[str, Array], embedding: Array, head: Array) -> None:
        self.draft = draft
        self._rope = read_rope(draft.model_dump(mode="json"), draft.head_dim)
        self._weights = weights
        self._embedding, self._head = embedding.astype(np.float64), head.astype(np.float64)

    def empty_cache(self) -> DraftCache:
        shape = (self.draft.num_hidden_layers, 0, self.draft.num_key_value_heads, self.draft.head_dim)
        return DraftCache(np.zeros(shape), np.zeros(shape))

    def extend(self, cache: DraftCache, features: Array) -> DraftCache:
        """``cache`` with the keys and values of the tokens behind it, whose target ``features`` are [T, feature_width]."""
        context = ops.rmsnorm(ops.linear(features, self._weight("fc.weight")), self._weight("hidden_norm.weight"), self.draft.rms_norm_eps)
        positions = np.arange(cache.length, cache.length + len(features))
        new = [self._keys_values(layer, context, positions) for layer in range(self.draft.num_hidden_layers)]
        keys, values = (np.stack(parts) for parts in zip(*new, strict=True))
        return DraftCache(np.concatenate([cache.keys, keys], axis=1), np.concatenate([cache.values, values], axis=1))

    def block(self, cache: DraftCache, root: int, size: int) -> tuple[F64, F64]:
        """(hidden [B, hidden] after the final norm, logits [B − 1, V] of depths 1 … B − 1) of a block behind all of ``cache``."""
        draft, end = self.draft, cache.length + size
        positions = np.arange(cache.length, end)
        x = self._embedding[[root, *[draft.mask_token_id] * (size - 1)]]
        for layer in range(draft.num_hidden_layers):
            prefix = f"layers.{layer}."
            h = ops.rmsnorm(x, self._weight(f"{prefix}input_layernorm.weight"), draft.rms_norm_eps)
            keys, values = self._keys_values(layer, h, positions)
            keys, values = np.concatenate([cache.keys[layer], keys]), np.concatenate([cache.values[layer], values])
            query = self._heads(layer, "q", h, positions)
            seen = visible(draft, layer, positions, np.arange(end))
            x = x + self._biased(layer, "o", self.attention(query, keys, values, seen).reshape(size, -1))
            h = ops.rmsnorm(x, self._weight(f"{prefix}post_attention_layernorm.weight"), draft.rms_norm_eps)
            x = x + ops.swiglu(h, *(self._weight(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up", "down")))
        hidden = ops.rmsnorm(x, self._weight("norm.weight"), draft.rms_norm_eps)
        return hidden, ops.linear(hidden[1:], self._head)

    def attention(self, query: Array, keys: Array, values: Array, seen: NDArray[np.bool_]) -> F64:
        """query [Q, heads, D] over keys and values [K, key heads, D], ``seen`` [Q, K]: [Q, heads, D]."""
        group = self.draft.group_heads
        scores = np.einsum("qhd,khd->qhk", query, np.repeat(keys, group, axis=1)) * self.draft.head_dim**-0.5
        weights = ops.softmax(np.where(seen[:, None, :], scores, -np.inf))
        out: F64 = np.einsum("qhk,khd->qhd", weights, np.repeat(values, group, axis=1))
        return out

    def _keys_values(self, layer: int, x: Array, positions: Array) -> tuple[F64, F64]:
        values = self._biased(layer, "v", x).reshape(len(x), self.draft.num_key_value_heads, self.draft.head_dim)
        return self._heads(layer, "k", x, positions), values

    def _heads(self, layer: int, name: str, x: Array, positions: Array) -> F64:
        """Queries or keys of rows x: each head normed, then rotated as a whole, pairs half a head apart."""
        heads = self._biased(layer, name, x).reshape(len(x), -1, self.draft.head_dim)
        heads = ops.rmsnorm(heads, self._weight(f"layers.{layer}.self_attn.{name}_norm.weight"), self.draft.rms_norm_eps)
        return ops.rope(heads, *self._rope.tables(positions), interleave=False)

    def _biased(self, layer: int, name: str, x: Array) -> F64:
        key = f"layers.{layer}.self_attn.{name}_proj"
        return ops.linear(x, self._weight(f"{key}.weight"), self._weight(f"{key}.bias") if self.draft.attention_bias else None)

    def _weight(self, key: str) -> F64:
        return self._weights[key].astype(np.float64)
