"""Checks of kernels that fuse several operations for few rows: layers of each head with rotated queries, a norm with cache rows, a gated
layer with router logits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.reference import ops
from kdgen.verify.kernels import tolerances
from kdgen.verify.kernels.attention import drawn_angles
from kdgen.verify.kernels.dense import interleaved
from kdgen.verify.kernels.harness import (
    SLICE_TILES,
    Grid,
    Harness,
    Registry,
    check_rows,
    for_template,
    guard,
    poison,
    split_guard,
)
from kdgen.verify.kernels.paged import PagedCache
from kdgen.weights.formats import numpy_dtype, pack_mma_a

Array = NDArray[Any]

CHECKS: Registry = {}


@for_template(CHECKS, ["linear_heads.cu.j2"])
def check_linear_heads(harness: Harness) -> None:
    """y[m, h] = W[h] x[m, h], and behind it, where the kernel rotates, what stands behind x[m, h], turned by the row's position."""
    p, most, every = harness.p, max(harness.tokens), harness.kernel.grid[2].times
    heads, cols, rope = harness.few(every), p.splits * p.split_steps * 16, p.rope if p.rotates else 0
    x = harness.random("bf16", most, heads, cols + rope)
    w = harness.random("f32", heads, p.rows, cols, scale=cols**-0.5).astype(numpy_dtype("bf16"))
    packed, positions = pack_mma_a(w), harness.rng.permutation(2 * most)[:most].astype(np.int32)
    cos, sin = drawn_angles(harness, 2 * most, p.rope // 2)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        memory = np.full((count, p.x_stride), np.nan, x.dtype)
        for head in range(heads):
            memory[:, head * p.x_batch_stride : head * p.x_batch_stride + cols + rope] = x[rows, head]
        y = harness.poisoned("bf16", guard(count), p.y_stride)
        turning = {"row_position": positions[rows], "cos_table": cos, "sin_table": sin} if p.rotates else {}
        harness.launch(
            Grid(count, replaced={2: heads}), num_tokens=harness.integer(count), x=harness.input(memory), weight=harness.input(packed), y=y,
            **harness.inputs(turning),
        )  # fmt: skip
        written = split_guard(harness, "y", harness.read(y), count).reshape(count, every, p.y_batch_stride)
        harness.findings.untouched("y of other heads", written[:, heads:])
        harness.findings.untouched("y behind its outputs", written[:, :heads, p.rows + rope :])
        mine = written[:, :heads]
        return {"y": mine[..., : p.rows]} | ({"rotated": mine[..., p.rows : p.rows + rope]} if rope else {})

    values, error = np.empty((2, most, heads, p.rows))
    for head in range(heads):
        values[:, head] = ops.linear(x[:, head, :cols], w[head])
        error[:, head] = tolerances.dot(tolerances.terms_norm(x[:, head, :cols], w[head]), cols)
    expected = {"y": (values, error + tolerances.EPS32 * np.abs(values) + tolerances.stored(values, p.act))}
    if rope:
        turned = ops.rope(x[..., cols:], cos[positions], sin[positions], p.interleave)
        size = np.abs(x[..., cols:].astype(np.float64)).max(axis=-1, keepdims=True)
        expected["rotated"] = turned, 4 * tolerances.EPS32 * size + tolerances.stored(turned, p.act)
    check_rows(harness, run, expected)


@for_template(CHECKS, ["norm_and_cache.cu.j2"])
def check_norm_and_cache(harness: Harness) -> None:
    """The low-rank query's norm, and cache rows in their sequence's slot and nowhere else."""
    norm, p, most, sequences = harness.p.norm, harness.p.cache, max(harness.tokens), 3
    row = p.kv_lora + p.rope
    positions = harness.rng.permutation(2 * most)[:most].astype(np.int32)
    capacity = 2 * most + 5
    slots = harness.rng.permutation(capacity)[:most].astype(np.int32)
    sequence = harness.rng.integers(0, sequences, most).astype(np.int32)
    projected = harness.random("f32", most, norm.width + row)
    projected *= np.exp2(harness.rng.integers(-8, 8, (most, 1))).astype(np.float32)
    gain, latent_gain = harness.random("f32", norm.width), harness.random("f32", p.kv_lora)
    cos, sin = drawn_angles(harness, 2 * most, p.rope // 2)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        cache = PagedCache(harness, poison(harness.act, 1, sequences, capacity, row), p.tiled)
        q_a = harness.poisoned(harness.act, guard(count), norm.width)
        harness.launch(
            Grid(count),
            num_tokens=harness.integer(count),
            row_sequence=harness.input(cache.sequences[sequence[rows]]),
            row_position=harness.input(positions[rows]),
            row_slot=harness.input(slots[rows]),
            q_a_kv_a=harness.input(projected[rows]),
            q_a_weight=harness.input(gain),
            kv_a_weight=harness.input(latent_gain),
            cos_table=harness.input(cos),
            sin_table=harness.input(sin),
            q_a=q_a,
            kv_cache=cache.device,
            **cache.arguments,
        )
        written = cache.written("kv_cache", sequence[rows], slots[rows])
        return {"q_a": split_guard(harness, "q_a", harness.read(q_a), count), "kv_cache": written}

    q, latent, key = np.split(projected, [norm.width, norm.width + p.kv_lora], axis=1)
    query = ops.rmsnorm(q, gain, norm.eps)
    normed = ops.rmsnorm(latent, latent_gain, p.eps)
    turned = ops.rope(key, cos[positions], sin[positions], p.interleave)
    cache_rows = np.concatenate([normed, turned], axis=1)
    size = np.broadcast_to(2 * np.abs(key.astype(np.float64)).max(axis=1, keepdims=True), key.shape)
    error = np.concatenate([tolerances.normed(normed, p.kv_lora), 4 * tolerances.EPS32 * size], axis=1)
    check_rows(
        harness,
        run,
        {
            "q_a": (query, tolerances.normed(query, norm.width) + tolerances.stored(query, norm.act)),
            "kv_cache": (cache_rows, error + tolerances.stored(cache_rows, p.act)),
        },
    )


@for_template(CHECKS, ["linear_and_router.cu.j2"])
def check_linear_and_router(harness: Harness) -> None:
    """silu(gate) * up of a gated layer's first outputs, and the logits of all experts."""
    p, experts, most = harness.p.linear, harness.p.router.experts, max(harness.tokens)
    wanted = harness.few(p.rows // 2, SLICE_TILES * 8)
    x = harness.random("bf16", most, p.cols)
    router = harness.random("bf16", experts, p.cols, scale=p.cols**-0.5)
    w = harness.random("f32", 1, 2 * wanted, p.cols, scale=p.cols**-0.5).astype(numpy_dtype("bf16"))
    packed = pack_mma_a(interleaved(w, 8))

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        y, logits = harness.poisoned("bf16", guard(count), p.y_stride), harness.poisoned("f32", guard(count), experts)
        harness.launch(
            # one block takes all row tiles and groups of experts; of three, one has fewer of both
            Grid(count, replaced={0: 1 + count % 3}, row_tiles=-(-wanted // 8)),
            num_tokens=harness.integer(count),
            x=harness.input(x[rows]),
            weight=harness.input(packed),
            y=y,
            router_weight=harness.input(router),
            router_logits=logits,
        )
        got = split_guard(harness, "y", harness.read(y), count)
        harness.findings.untouched("y of other rows", got[:, wanted:])
        return {"y": got[:, :wanted], "logits": split_guard(harness, "logits", harness.read(logits), count)}

    both, off = ops.linear(x, w[0]), tolerances.dot(tolerances.terms_norm(x, w[0]), p.cols)
    gate, up = both[:, :wanted], both[:, wanted:]
    y, error = ops.silu(gate) * up, tolerances.swiglu(gate, up, off[:, :wanted], off[:, wanted:])
    expected = {
        "y": (y, error + tolerances.EPS32 * np.abs(y) + tolerances.stored(y, p.out)),
        "logits": (ops.linear(x, router), tolerances.dot(tolerances.terms_norm(x, router), p.cols)),
    }
    check_rows(harness, run, expected)
