"""The whole model in float64 NumPy: what every kernel, backend and decode is held against.

It is made to be read, and to be right. It serves models of a few million parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.reference import ops
from kdgen.reference.published import read
from kdgen.reference.stored import stored_tensor

Array = NDArray[Any]
F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Forward:
    """What a forward over T token rows gives, all float64.

    ``logits`` [T, V]; ``rows`` [layers, T, cache_row_dim], the new cache rows; ``features`` [layers, T, hidden], each layer's
    output, before the final norm.
    """

    logits: F64
    rows: F64
    features: F64


class ReferenceModel:
    """The model of a ``config.json``'s mapping, or of a spec's, whose keys are the same, over checkpoint tensors by published key (without
    a ``language_model.`` prefix). The reference's own code reads the mapping (``kdgen.reference.published``).

    Tensors are converted to float64 when first used, and kept. Routed experts may be quantized (``kdgen.reference.stored``).
    """

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Array]) -> None:
        self.published = read(config)
        self._stored = weights
        self._converted: dict[str, F64] = {}

    def weight(self, key: str) -> F64:
        """The tensor ``key`` as float64, dequantized if need be. Raises KeyError when the checkpoint has no such tensor."""
        if key not in self._converted:
            self._converted[key] = stored_tensor(self._stored, key)
        return self._converted[key]

    def empty_cache(self) -> F64:
        """A cache of no rows, [layers, 0, cache_row_dim]."""
        return np.zeros((self.published.layers, 0, self.published.latent + self.published.rope.width))

    def forward(
        self,
        tokens: Sequence[int] | Array,
        cache: F64 | None = None,
        positions: Sequence[int] | Array | None = None,
        visible: NDArray[np.bool_] | None = None,
    ) -> Forward:
        """Run T tokens after the S rows of ``cache`` [layers, S, cache_row_dim].

        Without ``positions`` and ``visible`` the tokens follow the cache in order, each seeing what is before it and itself. A tree
        step gives its rows' logical ``positions`` [T], and ``visible`` [T, S + T], whose last T columns are the step's own rows.
        """
        ids = np.asarray(tokens, np.int64)
        cache = self.empty_cache() if cache is None else cache
        before, rows = cache.shape[1], len(ids)
        where = np.arange(before, before + rows) if positions is None else np.asarray(positions, np.int64)
        if visible is None:
            visible = np.arange(before + rows) <= np.arange(before, before + rows)[:, None]
        x = self.weight("model.embed_tokens.weight")[ids]
        new_rows, features = [], []
        for layer in range(self.published.layers):
            prefix = f"model.layers.{layer}."
            h = ops.rmsnorm(x, self.weight(f"{prefix}input_layernorm.weight"), self.published.eps)
            attended, row = self.attention(layer, h, cache[layer], where, visible)
            x = x + attended
            h = ops.rmsnorm(x, self.weight(f"{prefix}post_attention_layernorm.weight"), self.published.eps)
            x = x + (self.moe(layer, h) if layer >= self.published.dense_layers else self._swiglu(f"{prefix}mlp.", h))
            new_rows.append(row)
            features.append(x)
        head = "model.embed_tokens.weight" if self.published.tied else "lm_head.weight"
        logits = ops.linear(ops.rmsnorm(x, self.weight("model.norm.weight"), self.published.eps), self.weight(head))
        return Forward(logits, np.stack(new_rows), np.stack(features))

    def attention(self, layer: int, h: Array, cache: Array, positions: Array, visible: NDArray[np.bool_]) -> tuple[F64, F64]:
        """One layer's attention over normed rows h [T, hidden] and its cache [S, row]: (output [T, hidden], new cache rows [T, row])."""
        p, prefix = self.published, f"model.layers.{layer}.self_attn."
        cos, sin = p.rope.tables(positions)
        if p.query_rank is None:
            q = ops.linear(h, self.weight(f"{prefix}q_proj.weight"))
        else:
            q_a = self._biased(f"{prefix}q_a_proj", h)
            q_a = ops.rmsnorm(q_a, self.weight(f"{prefix}q_a_layernorm.weight"), p.inner_eps)
            q = ops.linear(q_a, self.weight(f"{prefix}q_b_proj.weight"))
        q = q.reshape(len(h), p.heads, p.nope + p.rope.width)
        q_nope, q_rope = q[..., : p.nope], q[..., p.nope :]
        q_rope = ops.rope(q_rope, cos, sin, p.interleaved)

        kv = self._biased(f"{prefix}kv_a_proj_with_mqa", h)
        c_kv = ops.rmsnorm(kv[:, : p.latent], self.weight(f"{prefix}kv_a_layernorm.weight"), p.inner_eps)
        k_rope = ops.rope(kv[:, p.latent :], cos, sin, p.interleaved)
        row = np.concatenate([c_kv, k_rope], axis=1)

        w_uk, w_uv = ops.split_kv_b(self.weight(f"{prefix}kv_b_proj.weight"), p.heads, p.nope, p.value)
        keys = np.concatenate([cache, row])
        o = ops.mla_attention(q_nope, q_rope, keys, w_uk, w_uv, visible, p.softmax_scale)
        return self._biased(f"{prefix}o_proj", o.reshape(len(h), -1)), row

    def moe(self, layer: int, h: Array) -> F64:
        """One layer's mixture of experts over normed rows h [T, hidden], the shared expert included: [T, hidden]."""
        p, prefix = self.published, f"model.layers.{layer}.mlp."
        assert p.router is not None
        bias = self.weight(f"{prefix}gate.e_score_correction_bias") if p.router.bias else None
        experts, weights = ops.router(ops.linear(h, self.weight(f"{prefix}gate.weight")), p.router, bias)
        out = np.zeros((len(h), p.hidden))
        for expert in np.unique(experts):
            rows, slots = np.nonzero(experts == expert)
            out[rows] += weights[rows, slots, None] * self._swiglu(f"{prefix}experts.{expert}.", h[rows])
        if p.shared_width:
            out += self._swiglu(f"{prefix}shared_experts.", h)
        return out

    def greedy(self, prompt: Sequence[int] | Array, new_tokens: int) -> tuple[list[int], F64]:
        """(``new_tokens`` greedy tokens, logits [len(prompt) + new_tokens − 1, V] that chose them and scored the prompt)."""
        step = self.forward(prompt)
        cache, logits, tokens = step.rows, [step.logits], [int(ops.argmax(step.logits[-1]))]
        while len(tokens) < new_tokens:
            step = self.forward(tokens[-1:], cache)
            cache = np.concatenate([cache, step.rows], axis=1)
            logits.append(step.logits)
            tokens.append(int(ops.argmax(step.logits[-1])))
        return tokens, np.concatenate(logits)

    def _swiglu(self, prefix: str, x: Array) -> F64:
        gate, up, down = (self.weight(f"{prefix}{name}_proj.weight") for name in ("gate", "up", "down"))
        return ops.swiglu(x, gate, up, down)

    def _biased(self, name: str, x: Array) -> F64:
        return ops.linear(x, self.weight(f"{name}.weight"), self.weight(f"{name}.bias") if self.published.biased else None)
