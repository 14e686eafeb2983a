"""Checks of what forwards of few rows do in one launch: layers of each head and rotated queries, a norm and cache rows, all of these, a
gated layer and router logits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.backends.base import DeviceArray
from kdgen.plan.params import RmsNorm, RopeCache
from kdgen.reference import ops
from kdgen.verify import tolerances
from kdgen.verify.attention import drawn_angles
from kdgen.verify.bench import SLICE_TILES, Bench, Registry, cache_slots, check_rows, for_template, guard, split_guard, written_rows
from kdgen.verify.dense import interleaved
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


class _Projected:
    """Drawn rows of [q_a | c_kv | k_rope], where their cache rows go in one of three sequences, and what those must be."""

    def __init__(self, bench: Bench, norm: RmsNorm, cache: RopeCache) -> None:
        self.bench, self.p, most = bench, cache, max(bench.tokens)
        self.row = cache.kv_lora + cache.rope
        self.positions = bench.rng.permutation(2 * most)[:most].astype(np.int32)
        self.capacity = cache_slots(bench, 2 * most + 5)
        self.slots = bench.rng.permutation(self.capacity)[:most].astype(np.int32)
        self.sequence = bench.rng.integers(0, 3, most).astype(np.int32)
        self.values = bench.random("f32", most, norm.width + self.row)
        self.values *= np.exp2(bench.rng.integers(-8, 8, (most, 1))).astype(np.float32)
        self.gain, self.latent_gain = bench.random("f32", norm.width), bench.random("f32", cache.kv_lora)
        self.tables = drawn_angles(bench, 2 * most, cache.rope // 2)

    def inputs(self, rows: NDArray[np.int64]) -> list[DeviceArray]:
        """A kernel's arguments up to both gains."""
        of_rows = (each[rows] for each in (self.sequence, self.positions, self.slots, self.values))
        return [self.bench.input(each) for each in (*of_rows, self.gain, self.latent_gain)]

    def angles(self) -> list[DeviceArray]:
        return [self.bench.input(table) for table in self.tables]

    def cache(self) -> DeviceArray:
        return self.bench.poisoned(self.bench.act, 3, self.capacity, self.row)

    def written(self, cache: DeviceArray, rows: NDArray[np.int64]) -> Array:
        return written_rows(self.bench, cache, self.sequence[rows], self.slots[rows])

    def expected_cache(self) -> tuple[Array, Array]:
        """Cache rows, and their tolerance."""
        p, (cos, sin) = self.p, self.tables
        latent, key = np.split(self.values[:, -self.row :], [p.kv_lora], axis=1)
        normed = ops.rmsnorm(latent, self.latent_gain, p.eps)
        turned = ops.rope(key, cos[self.positions], sin[self.positions], p.interleave)
        rows = np.concatenate([normed, turned], axis=1)
        size = np.broadcast_to(2 * np.abs(key.astype(np.float64)).max(axis=1, keepdims=True), key.shape)
        error = np.concatenate([tolerances.normed(normed, p.kv_lora), 4 * tolerances.EPS32 * size], axis=1)
        return rows, error + tolerances.stored(rows, p.act)


@for_template(CHECKS, ["norm_and_cache.cu.j2"])
def check_norm_and_cache(bench: Bench) -> None:
    """The low-rank query's norm, and cache rows in their sequence's slot and nowhere else."""
    norm = bench.p.norm
    projected = _Projected(bench, norm, bench.p.cache)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        q_a, cache = bench.poisoned(bench.act, guard(len(rows)), norm.width), projected.cache()
        inputs = (bench.integer(len(rows)), *projected.inputs(rows), *projected.angles())
        bench.launch(*inputs, q_a, cache, projected.capacity, tokens=len(rows))
        return {"q_a": split_guard(bench, "q_a", bench.read(q_a), len(rows)), "kv_cache": projected.written(cache, rows)}

    query = ops.rmsnorm(projected.values[:, : norm.width], projected.gain, norm.eps)
    error = tolerances.normed(query, norm.width) + tolerances.stored(query, norm.act)
    check_rows(bench, run, {"q_a": (query, error), "kv_cache": projected.expected_cache()})


@for_template(CHECKS, ["queries_and_cache.cu.j2"])
def check_queries_and_cache(bench: Bench) -> None:
    """Cache rows, y[m, h] = W_uk[h] q_nope of q = W_q_b[h] norm(q_a[m]), and behind it q_rope turned by the row's position, all with the
    bits of the kernels that do a part each."""
    p, every = bench.p, bench.p.heads
    bench.tokens = tuple(sorted({min(tokens, p.max_tokens) for tokens in bench.tokens}))
    most, heads, width = max(bench.tokens), bench.few(every), p.nope + p.rope
    projected = _Projected(bench, p.norm, p.cache)
    w_q = bench.random("f32", heads, width, p.cols, scale=p.cols**-0.5).astype(numpy_dtype("bf16"))
    w_uk = bench.random("f32", heads, p.latent, p.nope, scale=p.nope**-0.5).astype(numpy_dtype("bf16"))
    packed, packed_uk = pack_mma_a(w_q), pack_mma_a(w_uk)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        y, cache = bench.poisoned("bf16", guard(len(rows)), every * p.cache.row), projected.cache()
        weights = bench.input(packed), bench.input(packed_uk)
        inputs = (bench.integer(len(rows)), *projected.inputs(rows), *weights, *projected.angles())
        bench.launch(*inputs, cache, y, projected.capacity, tokens=len(rows), grid={0: 1 + heads})
        written = split_guard(bench, "y", bench.read(y), len(rows)).reshape(len(rows), every, p.cache.row)
        bench.findings.untouched("y of other heads", written[:, heads:])
        mine, cached = written[:, :heads], projected.written(cache, rows)
        return {"y": mine[..., : p.latent], "rotated": mine[..., p.latent :], "kv_cache": cached}

    rows, count = np.arange(most), bench.integer(most)
    q_a, q, y = (bench.poisoned("bf16", most, wide) for wide in (p.cols, every * width, every * p.cache.row))
    cache, kernels = projected.cache(), bench.plan.kernel
    of_rows = (count, *projected.inputs(rows), *projected.angles())
    bench.launch(*of_rows, q_a, cache, projected.capacity, tokens=most, kernel=kernels(p.beside))
    bench.launch(count, q_a, bench.input(packed), q, tokens=most, row_tiles=heads * width // 16, kernel=kernels(p.q_b))
    bench.launch(count, q, bench.input(packed_uk), y, tokens=most, grid={2: heads}, row_tiles=p.latent // 16, kernel=kernels(p.w_uk))
    queries = np.ascontiguousarray(bench.read(q).reshape(most, every, width)[:, :heads])
    latents = np.ascontiguousarray(bench.read(y).reshape(most, every, p.cache.row)[:, :heads, : p.latent])
    cached = projected.written(cache, rows)
    bench.release()

    values, error = np.empty((2, most, heads, p.latent))
    for head in range(heads):
        nope = queries[:, head, : p.nope]
        values[:, head] = ops.linear(nope, w_uk[head])
        error[:, head] = tolerances.dot(tolerances.terms_norm(nope, w_uk[head]), p.nope)
    rope, (cos, sin) = queries[..., p.nope :], projected.tables
    turned = ops.rope(rope, cos[projected.positions], sin[projected.positions], p.cache.interleave)
    size = np.abs(rope.astype(np.float64)).max(axis=-1, keepdims=True)
    expected = {
        "y": (values, error + tolerances.EPS32 * np.abs(values) + tolerances.stored(values, p.cache.act)),
        "rotated": (turned, 4 * tolerances.EPS32 * size + tolerances.stored(turned, p.cache.act)),
        "kv_cache": projected.expected_cache(),
    }
    check_rows(bench, run, expected)
    found = run(rows)
    bench.findings.same_bits(f"y of {p.w_uk}", found["y"], latents)
    bench.findings.same_bits(f"kv_cache of {p.beside}", found["kv_cache"], cached)


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
