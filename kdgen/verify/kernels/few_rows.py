"""Checks of what forwards of few rows do in one launch: layers of each head and rotated queries, a norm and cache rows, a gated layer
and router logits."""

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
    Bench,
    Registry,
    cache_slots,
    check_rows,
    for_template,
    guard,
    poison,
    split_guard,
    written_rows,
)
from kdgen.weights.pack import numpy_dtype, pack_mma_a

Array = NDArray[Any]

CHECKS: Registry = {}


@for_template(CHECKS, ["linear_heads.cu.j2"])
def check_linear_heads(bench: Bench) -> None:
    """y[m, h] = W[h] x[m, h], and behind it, where the kernel rotates, what stands behind x[m, h], turned by the row's position."""
    p, most, every = bench.p, max(bench.tokens), bench.kernel.grid[2].times
    heads, cols, rope = bench.few(every), p.splits * p.split_steps * 16, p.rope if p.rotates else 0
    x = bench.random("bf16", most, heads, cols + rope)
    w = bench.random("f32", heads, p.rows, cols, scale=cols**-0.5).astype(numpy_dtype("bf16"))
    packed, positions = pack_mma_a(w), bench.rng.permutation(2 * most)[:most].astype(np.int32)
    cos, sin = drawn_angles(bench, 2 * most, p.rope // 2)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        memory = np.full((count, p.x_stride), np.nan, x.dtype)
        for head in range(heads):
            memory[:, head * p.x_batch_stride : head * p.x_batch_stride + cols + rope] = x[rows, head]
        y = bench.poisoned("bf16", guard(count), p.y_stride)
        turning = [bench.input(positions[rows]), bench.input(cos), bench.input(sin)] if p.rotates else []
        bench.launch(bench.integer(count), bench.input(memory), bench.input(packed), *turning, y, tokens=count, grid={2: heads})
        written = split_guard(bench, "y", bench.read(y), count).reshape(count, every, p.y_batch_stride)
        bench.findings.untouched("y of other heads", written[:, heads:])
        bench.findings.untouched("y behind its outputs", written[:, :heads, p.rows + rope :])
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
    check_rows(bench, run, expected)


@for_template(CHECKS, ["norm_and_cache.cu.j2"])
def check_norm_and_cache(bench: Bench) -> None:
    """The low-rank query's norm, and cache rows in their sequence's slot and nowhere else."""
    norm, p, most, sequences = bench.p.norm, bench.p.cache, max(bench.tokens), 3
    row = p.kv_lora + p.rope
    positions = bench.rng.permutation(2 * most)[:most].astype(np.int32)
    capacity = cache_slots(bench, 2 * most + 5)
    slots = bench.rng.permutation(capacity)[:most].astype(np.int32)
    sequence = bench.rng.integers(0, sequences, most).astype(np.int32)
    projected = bench.random("f32", most, norm.width + row)
    projected *= np.exp2(bench.rng.integers(-8, 8, (most, 1))).astype(np.float32)
    gain, latent_gain = bench.random("f32", norm.width), bench.random("f32", p.kv_lora)
    cos, sin = drawn_angles(bench, 2 * most, p.rope // 2)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        unwritten = poison(bench.act, sequences, capacity, row)
        cache, numbers = bench.far_apart(unwritten)
        meta = numbers[sequence[rows]], positions[rows], slots[rows]
        inputs = [bench.input(each) for each in (*meta, projected[rows], gain, latent_gain, cos, sin)]
        q_a = bench.poisoned(bench.act, guard(count), norm.width)
        bench.launch(bench.integer(count), *inputs, q_a, cache, capacity, tokens=count)
        written = written_rows(bench, cache, numbers, unwritten, sequence[rows], slots[rows])
        return {"q_a": split_guard(bench, "q_a", bench.read(q_a), count), "kv_cache": written}

    q, latent, key = np.split(projected, [norm.width, norm.width + p.kv_lora], axis=1)
    query = ops.rmsnorm(q, gain, norm.eps)
    normed = ops.rmsnorm(latent, latent_gain, p.eps)
    turned = ops.rope(key, cos[positions], sin[positions], p.interleave)
    cache_rows = np.concatenate([normed, turned], axis=1)
    size = np.broadcast_to(2 * np.abs(key.astype(np.float64)).max(axis=1, keepdims=True), key.shape)
    error = np.concatenate([tolerances.normed(normed, p.kv_lora), 4 * tolerances.EPS32 * size], axis=1)
    check_rows(
        bench,
        run,
        {
            "q_a": (query, tolerances.normed(query, norm.width) + tolerances.stored(query, norm.act)),
            "kv_cache": (cache_rows, error + tolerances.stored(cache_rows, p.act)),
        },
    )


@for_template(CHECKS, ["linear_and_router.cu.j2"])
def check_linear_and_router(bench: Bench) -> None:
    """silu(gate) * up of a gated layer's first outputs, and the logits of all experts."""
    p, experts, most = bench.p.linear, bench.p.router.experts, max(bench.tokens)
    wanted = bench.few(p.rows // 2, SLICE_TILES * 8)
    x = bench.random("bf16", most, p.cols)
    router = bench.random("bf16", experts, p.cols, scale=p.cols**-0.5)
    w = bench.random("f32", 1, 2 * wanted, p.cols, scale=p.cols**-0.5).astype(numpy_dtype("bf16"))
    packed = pack_mma_a(interleaved(w, 8))

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        y, logits = bench.poisoned("bf16", guard(count), p.y_stride), bench.poisoned("f32", guard(count), experts)
        bench.launch(
            bench.integer(count), bench.input(x[rows]), bench.input(packed), y, bench.input(router), logits, tokens=count,
            # one block takes all row tiles and groups of experts; of three, one has fewer of both
            row_tiles=-(-wanted // 8), grid={0: 1 + count % 3},
        )  # fmt: skip
        got = split_guard(bench, "y", bench.read(y), count)
        bench.findings.untouched("y of other rows", got[:, wanted:])
        return {"y": got[:, :wanted], "logits": split_guard(bench, "logits", bench.read(logits), count)}

    both, off = ops.linear(x, w[0]), tolerances.dot(tolerances.terms_norm(x, w[0]), p.cols)
    gate, up = both[:, :wanted], both[:, wanted:]
    y, error = ops.silu(gate) * up, tolerances.swiglu(gate, up, off[:, :wanted], off[:, wanted:])
    expected = {
        "y": (y, error + tolerances.EPS32 * np.abs(y) + tolerances.stored(y, p.out)),
        "logits": (ops.linear(x, router), tolerances.dot(tolerances.terms_norm(x, router), p.cols)),
    }
    check_rows(bench, run, expected)
