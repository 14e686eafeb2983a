"""Checks of the dense and row-wise kernels: linear layers, norms, embedding, router logits, the experts' weighted sum."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.backends.base import DeviceArray
from kdgen.plan.ir import Kernel
from kdgen.plan.ops.outbox import unsent
from kdgen.reference import ops
from kdgen.verify.kernels import tolerances
from kdgen.verify.kernels.harness import SLICE_TILES, Bench, Registry, Skip, check_rows, for_template, guard, poison, spaced, split_guard
from kdgen.verify.kernels.inboxes import Inboxes
from kdgen.weights.pack import numpy_dtype, pack_mma_a

Array = NDArray[Any]

CHECKS: Registry = {}
#: Host memory that a slice may take for one weight; input-major weights cannot be cut to a few rows.
SLICE_WEIGHT_BYTES = 400 << 20


#: Templates that read weights in tensor-core fragments.
MMA_LINEARS = ("linear_mma.cu.j2", "linear_wgmma.cu.j2")
ROUTER = "router_logits_mma.cu.j2"


@for_template(CHECKS, ["linear_f32.cu.j2", *MMA_LINEARS])
def check_linear(bench: Bench) -> None:
    """y[m, b] = W[b] x[m, b] (+ bias), through SiLU for gated layers, added to the residual for accumulating ones. A kernel for
    many rows must have the bits of the one for few, and one that sends its results of the one that does not."""
    p = bench.p
    if bench.decode_twin:
        bench.tokens += (p.tokens + 1,)
    most = max(bench.tokens)
    outputs, batch = p.rows // 2 if p.gated else p.rows, bench.kernel.grid[2].times
    mma = bench.kernel.template in MMA_LINEARS
    tile = (8 if p.gated else 16) if mma else 32
    # a slice takes whole batch entries where there are several, which are small, and a few row tiles where there is one
    batches = bench.few(batch)
    wanted = bench.few(outputs, SLICE_TILES * tile) if batch == 1 else outputs
    out, outbox = p.out if mma else "float", getattr(p, "outbox", None)

    x = bench.random(bench.act, most, batches, p.cols)
    w = bench.random("f32" if mma or p.weight == "float" else "bf16", batches, (2 if p.gated else 1) * wanted, p.cols, scale=p.cols**-0.5)
    if mma:
        w = w.astype(numpy_dtype("bf16"))
    bias = bench.random("f32", p.rows) if p.bias else None
    residual = bench.random("f32", most, batches, wanted)
    packed = _linear_weight(bench, w, wanted, batches)

    def run(rows: NDArray[np.int64], kernel: Kernel | None = None) -> dict[str, Array]:
        count = len(rows)
        # everything that the kernel must not read is NaN; the last row ends where its last input does
        x_rows = _scatter(x[rows], p.x_stride, p.x_batch_stride, batch)
        arguments: list[DeviceArray] = [bench.integer(count), bench.input(x_rows), bench.input(packed)]
        if bias is not None:
            arguments.append(bench.input(bias))
        row_tiles = -(-wanted // tile)
        by_tile = not mma or (kernel or bench.kernel).template == ROUTER  # a block each
        grid = {0: row_tiles, 2: batches} if by_tile else {2: batches}
        if outbox and not kernel:
            inboxes = Inboxes(bench, outbox.ranks, outbox.width, count, outbox.counters)
            bench.launch(*arguments, *inboxes.arguments(), tokens=count, grid=grid, row_tiles=row_tiles)
            return {"y": inboxes.sent(wanted)[:, None]}
        y_shape = (guard(count), p.y_stride)
        y = bench.poisoned("bf16" if out == "bf16" else "f32", *y_shape)
        if p.accumulate:
            start = poison("f32", *y_shape)
            start[:count, :wanted] = residual[rows, 0]
            bench.backend.write(y, start)
        bench.launch(*arguments, y, tokens=count, grid=grid, row_tiles=row_tiles, kernel=kernel)
        written = split_guard(bench, "y", bench.read(y), count).copy()
        columns = _columns(wanted, batches, p.y_batch_stride)
        result = written[:, columns].reshape(count, batches, wanted)
        others = np.ones(p.y_stride, bool)
        others[columns] = False
        bench.findings.untouched("y between its outputs", written[:, others])
        return {"y": result}

    expected = np.empty((most, batches, wanted))
    error = np.empty_like(expected)
    for b in range(batches):
        y, off = ops.linear(x[:, b], w[b]), tolerances.dot(tolerances.terms_norm(x[:, b], w[b]), p.cols)
        if p.gated:
            gate, up = y[:, :wanted], y[:, wanted:]
            y, off = ops.silu(gate) * up, tolerances.swiglu(gate, up, off[:, :wanted], off[:, wanted:])
        if bias is not None:
            y = y + bias[:wanted]
        if p.accumulate:
            off = off + tolerances.EPS32 * np.abs(y)
            y = y + residual[:, b]
        expected[:, b], error[:, b] = y, off + tolerances.EPS32 * np.abs(y) + tolerances.stored(y, out)
    check_rows(bench, run, {"y": (expected, error)})
    if twin := bench.decode_twin or (outbox and bench.plan.kernel(unsent(p.name))):
        rows = np.arange(most)
        bench.findings.same_bits(f"y of {twin.name}", run(rows)["y"], run(rows, twin)["y"])


def _scatter(x: Array, stride: int, batch_stride: int, batch: int) -> Array:
    """x [M, batches, K] to flat memory of rows ``stride`` apart and batch entries ``batch_stride`` apart, NaN between them."""
    count, batches, cols = x.shape
    memory = np.full(count * stride, np.nan, x.dtype)
    at = np.arange(count)[:, None, None] * stride + np.arange(batches)[None, :, None] * batch_stride + np.arange(cols)
    memory[at] = x
    return memory[: int(at.max()) + 1] if batches == batch else memory


def _columns(wanted: int, batches: int, batch_stride: int) -> NDArray[np.int64]:
    """Columns of a y row that hold outputs, batch entries first."""
    return (np.arange(batches)[:, None] * batch_stride + np.arange(wanted)).reshape(-1)


def _linear_weight(bench: Bench, w: Array, wanted: int, batches: int) -> Array:
    """Logical w [batches, wanted or 2·wanted (gate, then up), K] in the kernel's layout, first rows only where it is a slice."""
    p = bench.p
    if getattr(p, "row_major", False):
        return w
    if bench.kernel.template in MMA_LINEARS:
        return pack_mma_a(interleaved(w, 8) if p.gated else w)
    needed = batches * p.rows * p.cols * w.dtype.itemsize
    if bench.sliced and needed > SLICE_WEIGHT_BYTES:
        raise Skip(f"its input-major weight cannot be sliced and takes {needed >> 20} MiB")
    whole = np.full((batches, p.cols, p.rows), np.nan, w.dtype)
    by_input = w.swapaxes(1, 2)
    whole[:, :, :wanted] = by_input[:, :, :wanted]
    if p.gated:
        whole[:, :, p.rows // 2 : p.rows // 2 + wanted] = by_input[:, :, wanted:]
    return whole


def interleaved(w: Array, tile: int) -> Array:
    """[..., 2·N, K] of gate rows then up rows to ``tile`` gate rows, their up rows, and so on."""
    *batch, rows, cols = w.shape
    halves = w.reshape(*batch, 2, rows // 2 // tile, tile, cols)
    return np.ascontiguousarray(halves.swapaxes(-4, -3)).reshape(w.shape)


@for_template(CHECKS, ["rmsnorm.cu.j2"])
def check_rmsnorm(bench: Bench) -> None:
    p, most = bench.p, max(bench.tokens)
    x = bench.random("f32", most, p.width)
    x *= np.exp2(bench.rng.integers(-8, 8, (most, 1))).astype(np.float32)  # the smallest rows are where eps counts
    weight = bench.random("f32", p.width)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        y = bench.poisoned(bench.act, guard(count), p.width)
        ours = [bench.input(_scatter(x[rows, None], p.x_stride, 0, 1))]
        if p.chosen:  # from among all of them
            ours = [bench.input(rows.astype(np.int32)), bench.input(_scatter(x[:, None], p.x_stride, 0, 1))]
        bench.launch(bench.integer(count), *ours, bench.input(weight), y, tokens=count)
        return {"y": split_guard(bench, "y", bench.read(y), count)}

    expected = ops.rmsnorm(x, weight, p.eps)
    check_rows(bench, run, {"y": (expected, tolerances.normed(expected, p.width) + tolerances.stored(expected, p.act))})


@for_template(CHECKS, ["embed.cu.j2"])
def check_embed(bench: Bench) -> None:
    p, most = bench.p, max(bench.tokens)
    vocab = bench.few(p.rows, 64)
    table = bench.random("f32" if "float" in bench.kernel.parameter("table").type else "bf16", vocab, p.hidden)
    tokens = bench.rng.integers(0, vocab, most).astype(np.int32)
    tokens[[0, -1]] = vocab - 1, 0
    places = spaced(vocab, p.rows)
    expected = table[tokens].astype(np.float64)
    if p.sharded:
        _check_sharded_embed(bench, table, places, tokens, expected)
        return
    tokens[2::5] = ~tokens[2::5]  # roots that logits with a NaN or an infinity chose
    expected[2::5] = table[0]

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        residual = bench.poisoned("f32", guard(count), p.hidden)
        whole, ids = bench.spread(table, places, p.rows)
        known = np.where(tokens < 0, tokens, ids[tokens])
        bench.launch(bench.integer(count), bench.input(known[rows]), whole, residual, tokens=count)
        return {"residual": split_guard(bench, "residual", bench.read(residual), count)}

    check_rows(bench, run, {"residual": (expected, np.zeros(1))})


def _check_sharded_embed(bench: Bench, table: Array, places: Array, tokens: Array, expected: Array) -> None:
    """A rank's rows of the table begin at token ``first``; tokens before and behind them are others' and get zeros."""
    p, first = bench.p, 1000
    expected[1:3] = 0.0

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        y, residual = (bench.poisoned("f32", guard(count), p.hidden) for _ in range(2))
        whole, numbers = bench.spread(table, places, p.rows)
        ids = numbers[tokens] + first
        ids[1], ids[2] = first - 1, first + p.rows
        source = bench.integer(count), bench.input(ids[rows].astype(np.int32)), whole, first
        if p.outbox:
            inboxes = Inboxes(bench, p.outbox.ranks, p.outbox.width, count, p.outbox.counters)
            bench.launch(*source, *inboxes.arguments(), residual, tokens=count)
            sent = inboxes.sent(p.hidden)
        else:
            bench.launch(*source, y, residual, tokens=count)
            sent = split_guard(bench, "y", bench.read(y), count)
        return {"y": sent, "residual": split_guard(bench, "residual", bench.read(residual), count)}

    check_rows(bench, run, {"y": (expected, np.zeros(1)), "residual": (np.zeros_like(expected), np.zeros(1))})


@for_template(CHECKS, ["router_logits.cu.j2", ROUTER])
def check_router_logits(bench: Bench) -> None:
    p, most = bench.p, max(bench.tokens)
    mma = bench.kernel.template == ROUTER
    experts_a_block = 16 if mma else p.block_experts
    experts = bench.few(p.experts, SLICE_TILES * experts_a_block)
    hidden = bench.random(bench.act, most, p.hidden)
    weight = bench.random("bf16" if mma else "f32", experts, p.hidden, scale=p.hidden**-0.5)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        logits = bench.poisoned("f32", guard(count), p.experts)
        grid = {0: -(-experts // experts_a_block)}
        bench.launch(bench.integer(count), bench.input(hidden[rows]), bench.input(weight), logits, tokens=count, grid=grid)
        got = split_guard(bench, "logits", bench.read(logits), count)
        bench.findings.untouched("logits of other experts", got[:, experts:])
        return {"logits": got[:, :experts]}

    error = tolerances.dot(tolerances.terms_norm(hidden, weight), p.hidden)
    check_rows(bench, run, {"logits": (ops.linear(hidden, weight), error)})


@for_template(CHECKS, ["moe_combine.cu.j2"])
def check_moe_combine(bench: Bench) -> None:
    p, most = bench.p, max(bench.tokens)
    weights = np.abs(bench.random("f32", most, p.top_k))
    outputs = bench.random("f32", most, p.top_k, p.hidden)
    residual = bench.random("f32", most, p.hidden)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        start = poison("f32", guard(count), p.hidden)
        if p.accumulate:
            start[:count] = residual[rows]
        y = bench.input(start)
        source = bench.integer(count), bench.input(weights[rows]), bench.input(outputs[rows])
        if p.outbox:
            inboxes = Inboxes(bench, p.outbox.ranks, p.outbox.width, count, p.outbox.counters)
            bench.launch(*source, *([y] if p.accumulate else []), *inboxes.arguments(), tokens=count)
            return {"residual": inboxes.sent(p.hidden)}
        bench.launch(*source, y, tokens=count)
        return {"residual": split_guard(bench, "residual", bench.read(y), count)}

    terms = weights.astype(np.float64)[..., None] * outputs
    expected = terms.sum(axis=1) + (residual if p.accumulate else 0.0)
    error = tolerances.dot(np.sqrt(np.square(terms).sum(axis=1)), math.ceil(p.top_k)) + 2 * tolerances.EPS32 * np.abs(expected)
    check_rows(bench, run, {"residual": (expected, error)})
