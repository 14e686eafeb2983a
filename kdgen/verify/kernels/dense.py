"""Checks of the dense and row-wise kernels: linear layers, norms, embedding, router logits, the experts' weighted sum."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.backends.base import DeviceArray
from kdgen.plan.ir import Kernel
from kdgen.reference import ops
from kdgen.verify.kernels import tolerances
from kdgen.verify.kernels.harness import (
    SLICE_TILES,
    Grid,
    Harness,
    Registry,
    Skip,
    check_rows,
    for_template,
    guard,
    poison,
    spaced,
    split_guard,
)
from kdgen.verify.kernels.inboxes import Inboxes
from kdgen.weights.formats import numpy_dtype, pack_mma_a

Array = NDArray[Any]

CHECKS: Registry = {}
#: Host memory that a slice may take for one weight; input-major weights cannot be cut to a few rows.
SLICE_WEIGHT_BYTES = 400 << 20


#: Templates that read weights in tensor-core fragments.
MMA_LINEARS = ("linear_mma.cu.j2", "linear_wgmma.cu.j2")
ROUTER = "router_logits_mma.cu.j2"


@for_template(CHECKS, ["linear_f32.cu.j2", *MMA_LINEARS])
def check_linear(harness: Harness) -> None:
    """y[m, b] = W[b] x[m, b] (+ bias), through SiLU for gated layers, added to the residual for accumulating ones. A kernel for
    many rows must have the bits of the one for few, and one that sends its results of the one that does not."""
    p = harness.p
    if harness.decode_twin:
        harness.tokens += (p.tokens + 1,)
    most = max(harness.tokens)
    outputs, batch = p.rows // 2 if p.gated else p.rows, harness.kernel.grid[2].times
    mma = harness.kernel.template in MMA_LINEARS
    tile = (8 if p.gated else 16) if mma else 32
    # a slice takes whole batch entries where there are several, which are small, and a few row tiles where there is one
    batches = harness.few(batch)
    wanted = harness.few(outputs, SLICE_TILES * tile) if batch == 1 else outputs
    out, outbox = p.out if mma else "float", getattr(p, "outbox", None)

    x = harness.random(harness.act, most, batches, p.cols)
    w = harness.random("f32" if mma or p.weight == "float" else "bf16", batches, (2 if p.gated else 1) * wanted, p.cols, scale=p.cols**-0.5)
    if mma:
        w = w.astype(numpy_dtype("bf16"))
    bias = harness.random("f32", p.rows) if p.bias else None
    residual = harness.random("f32", most, batches, wanted)
    packed = _linear_weight(harness, w, wanted, batches)

    def run(rows: NDArray[np.int64], kernel: Kernel | None = None) -> dict[str, Array]:
        count = len(rows)
        # everything that the kernel must not read is NaN; the last row ends where its last input does
        x_rows = _scatter(x[rows], p.x_stride, p.x_batch_stride, batch)
        router = (kernel or harness.kernel).template == ROUTER  # which has names of its own for rows and results, and a block a row tile
        source, target = ("hidden", "logits") if router else ("x", "y")
        arguments = {"num_tokens": harness.integer(count), **harness.inputs({source: x_rows, "weight": packed})}
        if bias is not None:
            arguments["bias"] = harness.input(bias)
        row_tiles = -(-wanted // tile)
        replaced = {0: row_tiles, 2: batches} if router or not mma else {2: batches}
        grid = Grid(count, replaced=replaced, row_tiles=row_tiles, kernel=kernel)
        if outbox and not kernel:
            inboxes = Inboxes(harness, outbox.ranks, outbox.width, count, outbox.counters)
            harness.launch(grid, **arguments, **inboxes.arguments())
            return {"y": inboxes.sent(wanted)[:, None]}
        y_shape = (guard(count), p.y_stride)
        y = harness.poisoned("bf16" if out == "bf16" else "f32", *y_shape)
        if p.accumulate:
            start = poison("f32", *y_shape)
            start[:count, :wanted] = residual[rows, 0]
            harness.backend.write(y, start)
        harness.launch(grid, **arguments, **{target: y})
        written = split_guard(harness, "y", harness.read(y), count).copy()
        columns = _columns(wanted, batches, p.y_batch_stride)
        result = written[:, columns].reshape(count, batches, wanted)
        others = np.ones(p.y_stride, bool)
        others[columns] = False
        harness.findings.untouched("y between its outputs", written[:, others])
        return {"y": result}

    check_rows(harness, run, {"y": _expected(p, x, w, bias, residual, out)})
    if twin := harness.decode_twin or (outbox and harness.plan.kernel(p.same_bits_as[0])):
        rows = np.arange(most)
        harness.findings.same_bits(f"y of {twin.name}", run(rows)["y"], run(rows, twin)["y"])


def _expected(p: Any, x: Array, w: Array, bias: Array | None, residual: Array, out: str) -> tuple[Array, Array]:
    """(y, tolerance) [M, batches, N] of a linear layer with parameters ``p``, for x [M, batches, K], w [batches, N or 2·N (gate, then up),
    K] and residual [M, batches, N].
    """
    wanted = residual.shape[2]
    expected, error = np.empty((2, *residual.shape))
    for b in range(x.shape[1]):
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
    return expected, error


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


def _linear_weight(harness: Harness, w: Array, wanted: int, batches: int) -> Array:
    """Logical w [batches, wanted or 2·wanted (gate, then up), K] in the kernel's layout, first rows only where it is a slice."""
    p = harness.p
    if getattr(p, "row_major", False):
        return w
    if harness.kernel.template in MMA_LINEARS:
        return pack_mma_a(interleaved(w, 8) if p.gated else w)
    needed = batches * p.rows * p.cols * w.dtype.itemsize
    if harness.sliced and needed > SLICE_WEIGHT_BYTES:
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
def check_rmsnorm(harness: Harness) -> None:
    p, most = harness.p, max(harness.tokens)
    x = harness.random("f32", most, p.width)
    x *= np.exp2(harness.rng.integers(-8, 8, (most, 1))).astype(np.float32)  # the smallest rows are where eps counts
    weight = harness.random("f32", p.width)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        y = harness.poisoned(harness.act, guard(count), p.width)
        ours = {"x": _scatter(x[rows, None], p.x_stride, 0, 1)}
        if p.chosen:  # from among all of them
            ours = {"row_list": rows.astype(np.int32), "x": _scatter(x[:, None], p.x_stride, 0, 1)}
        harness.launch(Grid(count), num_tokens=harness.integer(count), weight=harness.input(weight), y=y, **harness.inputs(ours))
        return {"y": split_guard(harness, "y", harness.read(y), count)}

    expected = ops.rmsnorm(x, weight, p.eps)
    check_rows(harness, run, {"y": (expected, tolerances.normed(expected, p.width) + tolerances.stored(expected, p.act))})


@for_template(CHECKS, ["embed.cu.j2"])
def check_embed(harness: Harness) -> None:
    p, most = harness.p, max(harness.tokens)
    vocab = harness.few(p.rows, 64)
    table = harness.random("f32" if "float" in harness.kernel.parameter("table").type else "bf16", vocab, p.hidden)
    tokens = harness.rng.integers(0, vocab, most).astype(np.int32)
    tokens[[0, -1]] = vocab - 1, 0
    places = spaced(vocab, p.rows)
    expected = table[tokens].astype(np.float64)
    if p.sharded:
        _check_sharded_embed(harness, table, places, tokens, expected)
        return
    tokens[2::5] = ~tokens[2::5]  # roots that logits with a NaN or an infinity chose
    expected[2::5] = table[0]

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        residual = harness.poisoned("f32", guard(count), p.hidden)
        whole, ids = harness.spread(table, places, p.rows)
        known = np.where(tokens < 0, tokens, ids[tokens])
        harness.launch(Grid(count), num_tokens=harness.integer(count), tokens=harness.input(known[rows]), table=whole, residual=residual)
        return {"residual": split_guard(harness, "residual", harness.read(residual), count)}

    check_rows(harness, run, {"residual": (expected, np.zeros(1))})


def _check_sharded_embed(harness: Harness, table: Array, places: Array, tokens: Array, expected: Array) -> None:
    """A rank's rows of the table begin at token ``first``; tokens before and behind them are others' and get zeros."""
    p, first = harness.p, 1000
    expected[1:3] = 0.0

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        y, residual = (harness.poisoned("f32", guard(count), p.hidden) for _ in range(2))
        whole, numbers = harness.spread(table, places, p.rows)
        ids = numbers[tokens] + first
        ids[1], ids[2] = first - 1, first + p.rows
        source: dict[str, DeviceArray | int] = {
            "num_tokens": harness.integer(count), "tokens": harness.input(ids[rows].astype(np.int32)), "table": whole, "first_token": first,
        }  # fmt: skip
        if p.outbox:
            inboxes = Inboxes(harness, p.outbox.ranks, p.outbox.width, count, p.outbox.counters)
            harness.launch(Grid(count), residual=residual, **source, **inboxes.arguments())
            sent = inboxes.sent(p.hidden)
        else:
            harness.launch(Grid(count), y=y, residual=residual, **source)
            sent = split_guard(harness, "y", harness.read(y), count)
        return {"y": sent, "residual": split_guard(harness, "residual", harness.read(residual), count)}

    check_rows(harness, run, {"y": (expected, np.zeros(1)), "residual": (np.zeros_like(expected), np.zeros(1))})


@for_template(CHECKS, ["router_logits.cu.j2", ROUTER])
def check_router_logits(harness: Harness) -> None:
    p, most = harness.p, max(harness.tokens)
    mma = harness.kernel.template == ROUTER
    experts_a_block = 16 if mma else p.block_experts
    experts = harness.few(p.experts, SLICE_TILES * experts_a_block)
    hidden = harness.random(harness.act, most, p.hidden)
    weight = harness.random("bf16" if mma else "f32", experts, p.hidden, scale=p.hidden**-0.5)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        logits = harness.poisoned("f32", guard(count), p.experts)
        harness.launch(
            Grid(count, replaced={0: -(-experts // experts_a_block)}),
            num_tokens=harness.integer(count),
            hidden=harness.input(hidden[rows]),
            weight=harness.input(weight),
            logits=logits,
        )
        got = split_guard(harness, "logits", harness.read(logits), count)
        harness.findings.untouched("logits of other experts", got[:, experts:])
        return {"logits": got[:, :experts]}

    error = tolerances.dot(tolerances.terms_norm(hidden, weight), p.hidden)
    check_rows(harness, run, {"logits": (ops.linear(hidden, weight), error)})


@for_template(CHECKS, ["moe_combine.cu.j2"])
def check_moe_combine(harness: Harness) -> None:
    p, most = harness.p, max(harness.tokens)
    weights = np.abs(harness.random("f32", most, p.top_k))
    outputs = harness.random("f32", most, p.top_k, p.hidden)
    residual = harness.random("f32", most, p.hidden)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        start = poison("f32", guard(count), p.hidden)
        if p.accumulate:
            start[:count] = residual[rows]
        y = harness.input(start)
        source = harness.inputs({"topk_weights": weights[rows], "expert_output": outputs[rows]}) | {"num_tokens": harness.integer(count)}
        if p.outbox:
            inboxes = Inboxes(harness, p.outbox.ranks, p.outbox.width, count, p.outbox.counters)
            shared = {"shared_output": y} if p.accumulate else {}
            harness.launch(Grid(count), **source, **shared, **inboxes.arguments())
            return {"residual": inboxes.sent(p.hidden)}
        harness.launch(Grid(count), **source, **{"residual" if p.accumulate else "y": y})
        return {"residual": split_guard(harness, "residual", harness.read(y), count)}

    terms = weights.astype(np.float64)[..., None] * outputs
    expected = terms.sum(axis=1) + (residual if p.accumulate else 0.0)
    error = tolerances.dot(np.sqrt(np.square(terms).sum(axis=1)), math.ceil(p.top_k)) + 2 * tolerances.EPS32 * np.abs(expected)
    check_rows(harness, run, {"residual": (expected, error)})
