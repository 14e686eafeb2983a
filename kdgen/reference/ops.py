"""Each operation of the model in float64, written as the formula reads (modelling code: transformers' ``modeling_deepseek_v3``).

Rows come first: T token rows, S cached rows. Every function takes and returns float64 unless it says otherwise, and none
knows how the kernels are made.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.reference.published import Router

Array = NDArray[Any]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


def rmsnorm(x: Array, weight: Array, eps: float) -> F64:
    """x [..., N] divided by its root mean square, times weight [N]."""
    x = x.astype(np.float64)
    normed: F64 = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight.astype(np.float64)
    return normed


def linear(x: Array, weight: Array, bias: Array | None = None) -> F64:
    """x [..., K] times weight [N, K] transposed, plus bias [N]: [..., N]."""
    y: F64 = x.astype(np.float64) @ weight.astype(np.float64).T
    return y if bias is None else y + bias.astype(np.float64)


def silu(x: Array) -> F64:
    """x·σ(x), without overflow for large negative x."""
    return x.astype(np.float64) * sigmoid(x)


def sigmoid(x: Array) -> F64:
    """1 / (1 + e^−x), from e^−|x| so that nothing overflows."""
    x = x.astype(np.float64)
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def softmax(x: Array) -> F64:
    """Over the last axis; −inf entries get 0. A row of −inf alone gives NaN."""
    x = x.astype(np.float64)
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    probabilities: F64 = e / e.sum(axis=-1, keepdims=True)
    return probabilities


def rope(x: Array, cos: Array, sin: Array, interleave: bool) -> F64:
    """Rotate pairs of x [T, ..., D] by the angles of their rows' positions, cos and sin [T, D/2].

    Pairs are (x0, x1), (x2, x3), … when interleaved and (x_i, x_{i+D/2}) otherwise; the result keeps the input's order.
    """
    x = x.astype(np.float64)
    shape = (cos.shape[0], *(1,) * (x.ndim - 2), cos.shape[1])
    c, s = cos.astype(np.float64).reshape(shape), sin.astype(np.float64).reshape(shape)
    half = x.shape[-1] // 2
    first, second = (np.s_[..., 0::2], np.s_[..., 1::2]) if interleave else (np.s_[..., :half], np.s_[..., half:])
    out = np.empty_like(x)
    out[first] = x[first] * c - x[second] * s
    out[second] = x[second] * c + x[first] * s
    return out


def split_kv_b(kv_b: Array, heads: int, nope: int, v_dim: int) -> tuple[F64, F64]:
    """kv_b_proj [H·(nope+v), C] into W_UK [H, nope, C] and W_UV [H, v, C]."""
    per_head = kv_b.astype(np.float64).reshape(heads, nope + v_dim, -1)
    return per_head[:, :nope], per_head[:, nope:]


def mla_attention(q_nope: Array, q_rope: Array, keys: Array, w_uk: Array, w_uv: Array, visible: NDArray[np.bool_], scale: float) -> F64:
    """Absorbed multi-head latent attention over given cache rows.

    q_nope [T, H, nope], q_rope [T, H, rope]; keys [S, C + rope], rows [c_kv | k_rope]; w_uk [H, nope, C], w_uv [H, v, C];
    visible [T, S] true where a row sees a key (at least one a row). Returns [T, H, v].
    """
    latent = w_uk.shape[-1]
    c_kv, k_rope = keys[:, :latent].astype(np.float64), keys[:, latent:].astype(np.float64)
    q_latent = np.einsum("thn,hnc->thc", q_nope.astype(np.float64), w_uk)
    scores = (q_latent @ c_kv.T + q_rope.astype(np.float64) @ k_rope.T) * scale
    weights = softmax(np.where(visible[:, None, :], scores, -np.inf))
    out: F64 = np.einsum("thc,hvc->thv", weights @ c_kv, w_uv)
    return out


def top_k(scores: Array, k: int) -> I64:
    """Indices [..., k] of the largest entries of the last axis, largest first; equal ones by index, lowest first."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :k].astype(np.int64)


def router(logits: Array, router: Router, bias: Array | None) -> tuple[I64, F64]:
    """The experts of each row and their weights, both [T, chosen], best choice first; logits [T, E], bias [E].

    The bias takes part in the choice, not in the weights. Ties go to the lowest index, of groups and of experts.
    """
    scores = softmax(logits) if router.softmax else sigmoid(logits)
    choice = scores if bias is None else scores + bias.astype(np.float64)
    if router.best:
        rows = np.arange(len(choice))[:, None]
        grouped = choice.reshape(len(choice), router.groups, -1)
        best = np.sort(grouped, axis=-1)[..., ::-1]
        kept = np.zeros((len(choice), router.groups), bool)
        kept[rows, top_k(best[..., : router.best].sum(axis=-1), router.kept_groups)] = True
        choice = np.where(kept[:, :, None], grouped, -np.inf).reshape(choice.shape)
    experts = top_k(choice, router.chosen)
    weights = np.take_along_axis(scores, experts, axis=-1)
    if router.normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return experts, weights * router.factor


def swiglu(x: Array, gate: Array, up: Array, down: Array) -> F64:
    """down · (silu(gate · x) ⊙ up · x); x [T, H], gate and up [I, H], down [H, I]."""
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def argmax(logits: Array) -> I64:
    """Index of the largest logit of each row; the lowest of equal ones."""
    best: I64 = np.argmax(logits, axis=-1).astype(np.int64)
    return best


def log_softmax(logits: Array) -> F64:
    """Logits [..., V] minus their log-sum-exp."""
    x = logits.astype(np.float64)
    top = x.max(axis=-1, keepdims=True)
    log_probs: F64 = x - top - np.log(np.exp(x - top).sum(axis=-1, keepdims=True))
    return log_probs


def top_k_log_probs(logits: Array, k: int) -> tuple[I64, F64]:
    """The k most probable tokens of each row and their log-probabilities over the whole vocabulary; ties: the lowest id."""
    tokens = top_k(logits, k)
    return tokens, np.take_along_axis(log_softmax(logits), tokens, axis=-1)
