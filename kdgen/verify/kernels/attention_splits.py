"""Checks of the kernels that join attention's splits, alone or with the layer of each head behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.plan.ir import Kernel
from kdgen.reference import ops
from kdgen.verify.kernels import tolerances
from kdgen.verify.kernels.attention import in_pieces
from kdgen.verify.kernels.harness import (
    Grid,
    Harness,
    Registry,
    check_rows,
    for_template,
    guard,
    split_guard,
)
from kdgen.weights.formats import numpy_dtype, pack_mma_a

Array = NDArray[Any]
CHECKS: Registry = {}
#: Splits that are more than a kernel makes weights for at a time, and than it looks ahead for the largest of.
SPLITS, MANY_SPLITS = 68, 170
FEW_SPLITS = 4  #: of rows in company, where a kernel makes as many weights at a time as its block has threads


@dataclass(frozen=True)
class Parts:
    """What attention leaves of token rows: the splits of each, of which it has those that are ``live`` [M, S]."""

    positions: NDArray[np.int32]
    live: NDArray[np.bool_]
    values: Array  # [M, S, heads, latent]
    maxima: Array  # [M, S, heads]
    sums: Array

    def inputs(self, rows: NDArray[np.int64], wgmma: bool) -> dict[str, Array]:
        """The kernels' inputs for chosen rows, by parameter name."""
        partial = [self.values[rows], self.maxima[rows], self.sums[rows]]
        if wgmma:
            partial = [in_pieces(partial[0]), *(array.transpose(0, 2, 1).copy() for array in partial[1:])]
        values, maxima, sums = partial
        return {"row_position": self.positions[rows], "split_values": values, "split_max": maxima, "split_sum": sums}

    def joined(self, heads: int, wgmma: bool) -> tuple[Array, Array]:
        """The first heads' latents [M, heads, latent] in float64, and how far off they may be before they are stored."""
        live = self.live[..., None]
        m = np.where(live, self.maxima, -np.inf)[:, :, :heads].astype(np.float64)
        if wgmma:
            m = m * np.log(2)
        scale = np.exp(m - m.max(axis=1, keepdims=True))
        parts = scale[..., None] * np.where(live[..., None], self.values, 0)[:, :, :heads]
        total = (scale * np.where(live, self.sums, 0)[:, :, :heads]).sum(axis=1)[..., None]
        expected = parts.sum(axis=1) / total
        spread = np.where(np.isfinite(m), m.max(axis=1, keepdims=True) - m, 0)[..., None]
        relative = tolerances.probabilities(np.zeros(1), spread, m.shape[1])
        return expected, (np.abs(parts) * relative).sum(axis=1) / total + np.abs(expected) * relative.max(axis=1)


def drawn_parts(harness: Harness, wgmma: bool, most: int, splits: int) -> Parts:
    """So many rows' splits, at most so many of each, with maxima far apart; NaN where a row has none."""
    p = harness.p
    positions = harness.rng.integers(0, p.splits.begin(splits - 1), most).astype(np.int32)
    edges = [p.splits.begin(splits - 1), 0, *(p.splits.begin(split) - back for split in (1, 2) for back in (1, 0))]
    positions[: len(edges)] = edges[:most]
    live = np.arange(splits) <= np.array([p.splits.of(int(position)) for position in positions])[:, None]
    maxima = harness.random("f32", most, splits, p.heads, scale=8.0)
    sums = (1 + np.abs(harness.random("f32", most, splits, p.heads, scale=16.0))).astype(np.float32)
    values = harness.random("f32", most, splits, p.heads, p.kv_lora) * sums[..., None]
    if wgmma:
        values = values.astype(numpy_dtype("bf16"))
    for array in (maxima, sums, values):
        array[~live] = np.nan
    return Parts(positions, live, values, maxima, sums)


@for_template(CHECKS, ["mla_combine.cu.j2", "mla_combine_wgmma.cu.j2", "mla_combine_rows.cu.j2"])
def check_combine(harness: Harness) -> None:
    """Split results joined: values over sums, each weighed by e^(max − largest max), or the power of 2."""
    p, most = harness.p, max(harness.tokens)
    wgmma = harness.kernel.template != "mla_combine.cu.j2"
    twin = harness.decode_twin
    heads = harness.few(p.heads // 8) * 8 if wgmma else harness.few(p.heads)  # it joins 8 at a time
    parts = drawn_parts(harness, wgmma, most, SPLITS if wgmma else FEW_SPLITS)

    def run(rows: NDArray[np.int64], kernel: Kernel | None = None, parts: Parts = parts) -> dict[str, Array]:
        count = len(rows)
        output = harness.poisoned(harness.act, guard(count), p.heads, p.kv_lora)
        every_head = {1: heads // 8 * p.kv_lora // 64 if wgmma else heads}
        if twin and not kernel:
            every_head = {0: heads // 8}
        harness.launch(
            Grid(count, replaced=every_head, kernel=kernel), num_tokens=harness.integer(count), output=output,
            max_splits=parts.live.shape[1], **harness.inputs(parts.inputs(rows, wgmma)),
        )  # fmt: skip
        got = split_guard(harness, "output", harness.read(output), count)
        harness.findings.untouched("output of other heads", got[:, heads:])
        return {"output": got[:, :heads]}

    expected, error = parts.joined(heads, wgmma)
    check_rows(harness, run, {"output": (expected, error + tolerances.stored(expected, harness.act))})
    # more splits than weights are made for at a time, and a last one that outweighs the others by more than a float holds
    long = drawn_parts(harness, wgmma, 2, MANY_SPLITS if wgmma else p.block + FEW_SPLITS)
    long.maxima[0, -1] += 256
    expected, error = long.joined(heads, wgmma)
    got = run(np.arange(2), parts=long)["output"]
    harness.findings.close("output of many splits", got, expected, error + tolerances.stored(expected, harness.act))
    if twin:
        every = np.arange(most)
        harness.findings.same_bits(f"output of {twin.name}", run(every)["output"], run(every, twin)["output"])


@for_template(CHECKS, ["combine_and_heads.cu.j2"])
def check_combine_and_heads(harness: Harness) -> None:
    """y[m, h] = W[h] x[m, h], where x are split results joined; the bits are those of the two kernels that it stands for."""
    p, most = harness.p, max(harness.tokens)
    heads = harness.few(p.heads // 8) * 8  # as many as the kernel that joins splits takes at a time
    some, long = drawn_parts(harness, True, most, SPLITS), drawn_parts(harness, True, 2, MANY_SPLITS)
    long.maxima[0, -1] += 256  # the last split outweighs the others by more than a float holds
    w = harness.random("f32", heads, p.rows, p.kv_lora, scale=p.kv_lora**-0.5).astype(numpy_dtype("bf16"))
    packed, combine, linear = pack_mma_a(w), harness.plan.kernel(p.combine), harness.plan.kernel(p.linear)

    def run(rows: NDArray[np.int64], alone: bool = True, parts: Parts = some) -> dict[str, Array]:
        count, splits = len(rows), parts.live.shape[1]
        number, inputs = harness.integer(count), harness.inputs(parts.inputs(rows, wgmma=True))
        weight, y = harness.input(packed), harness.poisoned("bf16", guard(count), p.heads, p.rows)
        if alone:
            grid = Grid(count, replaced={0: heads})
            harness.launch(grid, num_tokens=number, weight=weight, y=y, max_splits=splits, max_rows=count, **inputs)
        else:
            latent = harness.poisoned("bf16", guard(count), p.heads, p.kv_lora)
            grid = Grid(count, replaced={1: heads // 8 * p.kv_lora // 64}, kernel=combine)
            harness.launch(grid, num_tokens=number, output=latent, max_splits=splits, **inputs)
            harness.launch(Grid(count, replaced={2: heads}, kernel=linear), num_tokens=number, x=latent, weight=weight, y=y)
        got = split_guard(harness, "y", harness.read(y), count)
        harness.findings.untouched("y of other heads", got[:, heads:])
        return {"y": got[:, :heads]}

    x, off = some.joined(heads, wgmma=True)
    off = off + tolerances.stored(x, "bf16")
    values, error = np.empty((2, most, heads, p.rows))
    for head in range(heads):
        values[:, head] = ops.linear(x[:, head], w[head])
        error[:, head] = ops.linear(off[:, head], np.abs(w[head])) + tolerances.dot(tolerances.terms_norm(x[:, head], w[head]), p.kv_lora)
    check_rows(harness, run, {"y": (values, error + tolerances.EPS32 * np.abs(values) + tolerances.stored(values, "bf16"))})
    for parts in (some, long):
        every, title = np.arange(len(parts.positions)), f"y of {combine.name} and {linear.name}, {parts.live.shape[1]} splits"
        harness.findings.same_bits(title, run(every, parts=parts)["y"], run(every, alone=False, parts=parts)["y"])
