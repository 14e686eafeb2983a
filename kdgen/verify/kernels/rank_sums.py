"""Checks of the kernels that put the ranks' parts together, and of those that send them there, too."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kdgen.plan.ops.ranks import PeerSum
from kdgen.reference import ops
from kdgen.verify.kernels import tolerances
from kdgen.verify.kernels.harness import Bench, Registry, check_rows, for_template, guard, poison, split_guard
from kdgen.verify.kernels.inboxes import RANK, SPARE_ROWS, Inboxes

Array = NDArray[Any]

CHECKS: Registry = {}


def _parts(values: Array, rows: NDArray[np.int64]) -> tuple[Array, int]:
    """What a gather leaves of ``values`` [ranks, M, ...] for a step of ``rows``: NaN behind each rank's rows. And the rows a rank."""
    bound = len(rows) + SPARE_ROWS
    gathered = np.full((values.shape[0], bound, *values.shape[2:]), -1, values.dtype)
    if values.dtype == np.float32:
        gathered[...] = np.nan
    gathered[:, : len(rows)] = values[:, rows]
    return gathered, bound


def _in_rank_order(parts: Array, residual: Array, bias: Array | None) -> Array:
    """What the contract promises, in float32: residual + (((r0 + r1) + r2) + … + bias), whatever the number of ranks and of rows."""
    total = parts[0]
    for each in parts[1:]:
        total = total + each
    return np.asarray(residual + (total if bias is None else total + bias))


def _ordered_parts(bench: Bench, most: int) -> Array:
    """Parts [ranks, most, width] whose sums depend on their order; in every third column nothing but the order decides the sum."""
    parts = bench.random("f32", bench.p.ranks, most, bench.p.width)
    for rank, value in enumerate(np.resize([1e8, 1, -1e8, 1], bench.p.ranks)):
        parts[rank, :, ::3] = value
    return parts


@for_template(CHECKS, ["rank_sum.cu.j2"])
def check_rank_sum(bench: Bench) -> None:
    p, most = bench.p, max(bench.tokens)
    parts = _ordered_parts(bench, most)
    residual = bench.random("f32", most, p.width)
    bias = bench.random("f32", p.width) if p.bias else None

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        start = poison("f32", guard(count), p.width)
        start[:count] = residual[rows]
        y = bench.input(start)
        gathered, bound = _parts(parts, rows)
        extra = [] if bias is None else [bench.input(bias)]
        bench.launch(bench.integer(count), bench.input(gathered), bound, *extra, y, tokens=count)
        return {"residual": split_guard(bench, "residual", bench.read(y), count)}

    check_rows(bench, run, {"residual": (_in_rank_order(parts, residual, bias), np.zeros(1))})


@for_template(CHECKS, ["rank_choice.cu.j2"])
def check_rank_choice(bench: Bench) -> None:
    """Ties between ranks, rows that only one rank has a token for, rows of NaNs, and rows of which a rank says that they are not finite."""
    p, most = bench.p, max(bench.tokens)
    values = bench.rng.integers(0, 3, (p.ranks, most)).astype(np.float32)  # many ties
    values[0, 0], values[-1, 0] = -0.0, 0.0
    each = p.vocab // p.ranks
    ids = bench.rng.integers(0, each, (p.ranks, most)).astype(np.int32) + each * np.arange(p.ranks, dtype=np.int32)[:, None]
    nothing = bench.rng.random((p.ranks, most)) < 0.2
    nothing[:, -1] = True
    values[nothing], ids[nothing] = -np.inf, 2**31 - 1
    damaged = nothing & (bench.rng.random((p.ranks, most)) < 0.5)
    odd = np.arange(1, most, 2)
    damaged[odd // 2 % p.ranks, odd] = True  # whichever rank it is
    parts = np.stack([values.view(np.int32), np.where(damaged, ~ids, ids)], axis=2)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        chosen = bench.poisoned("i32", guard(count))
        gathered, bound = _parts(parts, rows)
        bench.launch(bench.integer(count), bench.input(gathered), bound, chosen, tokens=count)
        return {"next_token": split_guard(bench, "next_token", bench.read(chosen), count)}

    expected = ids[values.argmax(axis=0), np.arange(most)]  # the first rank of the best has the lowest ids
    chosen = np.where(expected < p.vocab, expected, 0)
    check_rows(bench, run, {"next_token": (np.where(damaged.any(axis=0), ~chosen, chosen), np.zeros(1))})


@for_template(CHECKS, ["rank_logits.cu.j2"])
def check_rank_logits(bench: Bench) -> None:
    p, most = bench.p, max(bench.tokens)
    parts = bench.random("f32", p.ranks, most, p.vocab)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        joined = bench.poisoned("f32", guard(count), p.ranks * p.vocab)
        gathered, bound = _parts(parts, rows)
        bench.launch(bench.integer(count), bench.input(gathered), bound, joined, tokens=count)
        return {"joined": split_guard(bench, "joined", bench.read(joined), count)}

    expected = parts.swapaxes(0, 1).reshape(most, -1).astype(np.float64)
    check_rows(bench, run, {"joined": (expected, np.zeros(1))})


# ---- through the ranks' memory ------------------------------------------------------------------------------------------


@for_template(CHECKS, ["peer_sum.cu.j2"])
def check_peer_sum(bench: Bench) -> None:
    p, most = bench.p, max(bench.tokens)
    parts, residual = _ordered_parts(bench, most), bench.random("f32", most, p.width)
    bias = bench.random("f32", p.width) if p.bias else None
    totals = np.add.accumulate(parts, axis=0)[-1]  # float32, in rank order
    summing = np.arange(p.width) // 32 * p.ranks // -(-p.width // 32)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        start = poison("f32", guard(count), p.width)
        start[:count] = residual[rows]
        # beyond a few rows this rank sums some of the columns for all, and is sent the others' sums
        direct = count <= p.direct_rows
        mine = np.full(p.width, direct) | (summing == RANK)
        to_me = np.where(mine, parts, totals)
        y, inboxes = bench.input(start), Inboxes(bench, p.ranks, p.width, count, bench.kernel.grid[1].times).receive(to_me[:, rows])
        extra = [] if bias is None else [bench.input(bias)]
        bench.launch(bench.integer(count), bench.input(parts[RANK, rows]), *inboxes.arguments(), *extra, y, tokens=count)
        if direct:
            inboxes.check(parts[RANK, rows])
        else:
            to = np.stack([mine | (summing == rank) for rank in range(p.ranks)])
            inboxes.check(np.where(mine, totals, parts[RANK])[rows], to)
        return {"residual": split_guard(bench, "residual", bench.read(y), count)}

    check_rows(bench, run, {"residual": (_in_rank_order(parts, residual, bias), np.zeros(1))})


@for_template(CHECKS, ["peer_sum_norm.cu.j2"])
def check_peer_sum_norm(bench: Bench) -> None:
    """The residual and its norm, with the bits of the two kernels that do one each."""
    p, norm, most = bench.p, bench.p.norm, max(bench.tokens)
    parts, residual = bench.random("f32", p.ranks, most, norm.width), bench.random("f32", most, norm.width)
    parts *= np.exp2(bench.rng.integers(-8, 8, (most, 1))).astype(np.float32)  # the smallest rows are where eps counts
    residual *= np.float32(0.01)
    bias, gain = bench.random("f32", norm.width) * np.float32(0.01) if p.bias else None, bench.random("f32", norm.width)
    extra = [] if bias is None else [bias]

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        start = poison("f32", guard(count), norm.width)
        start[:count] = residual[rows]
        x, y = bench.input(start), bench.poisoned(bench.act, guard(count), norm.width)
        inboxes = Inboxes(bench, p.ranks, norm.width, count, p.counters).receive(parts[:, rows], mine=True)
        places = inboxes.arguments()
        bench.launch(bench.integer(count), *places, *map(bench.input, extra), x, bench.input(gain), y, tokens=count)
        inboxes.check(None)
        return {"residual": split_guard(bench, "residual", bench.read(x), count), "y": split_guard(bench, "y", bench.read(y), count)}

    terms = [*parts.astype(np.float64), residual, *(np.broadcast_to(each, residual.shape) for each in extra)]
    whole, error = np.sum(terms, axis=0), tolerances.EPS32 * (len(terms) + 1) * np.abs(terms).sum(axis=0)
    expected = ops.rmsnorm(whole, gain, norm.eps)
    root = np.sqrt(np.square(whole).mean(axis=1, keepdims=True) + norm.eps)  # an element's own error, and that of the root
    off = np.abs(gain) * error / root + np.abs(expected) * error.max(axis=1, keepdims=True) / root
    off = off + tolerances.normed(expected, norm.width) + tolerances.stored(expected, norm.act)
    check_rows(bench, run, {"residual": (_in_rank_order(parts, residual, bias), np.zeros(1)), "y": (expected, off)})
    _same_apart(bench, run(np.arange(most)), parts, residual, extra, gain)


def _same_apart(bench: Bench, found: dict[str, Array], parts: Array, residual: Array, extra: list[Array], gain: Array) -> None:
    """What the sum and the norm leave as a launch each has the bits ``found``."""
    added, norm, rows = bench.plan.kernel(bench.p.sum), bench.plan.kernel(bench.p.norm.name), np.arange(len(residual))
    count, x, y = bench.integer(len(rows)), bench.input(residual), bench.poisoned(bench.act, *residual.shape)
    summing = np.arange(residual.shape[1]) // 32 * bench.p.ranks // -(-residual.shape[1] // 32)
    totals = np.add.accumulate(parts, axis=0)[-1]
    direct = len(rows) <= cast(PeerSum, added.params).direct_rows
    inboxes = Inboxes(bench, bench.p.ranks, residual.shape[1], len(rows), bench.p.counters)
    inboxes.receive(np.where(direct | (summing == RANK), parts, totals))
    places = (bench.input(parts[RANK]), *inboxes.arguments())
    bench.launch(count, *places, *map(bench.input, extra), x, tokens=len(rows), kernel=added)
    bench.launch(count, x, bench.input(gain), y, tokens=len(rows), kernel=norm)
    bench.findings.same_bits(f"residual of {added.name}", found["residual"], bench.read(x))
    bench.findings.same_bits(f"y of {norm.name}", found["y"], bench.read(y))


@for_template(CHECKS, ["peer_argmax.cu.j2"])
def check_peer_argmax(bench: Bench) -> None:
    """Ties in a rank's part and between ranks, and rows of NaNs, of which this rank or every rank has some."""
    p, most, each = bench.p, max(bench.tokens), bench.p.part.vocab
    logits = bench.rng.integers(0, 3, (p.ranks, most, each)).astype(np.float32)  # many ties
    logits[0, 0], logits[1:, 0] = -0.0, 0.0
    for rank, row in ((RANK, 1), (RANK, 2), (0, 2), (slice(None), most - 1)):
        logits[rank, row] = np.nan
    odd = np.arange(3, most, 2)
    logits[odd // 2 % p.ranks, odd, bench.rng.integers(each)] = -np.inf
    none = np.asarray(np.isnan(logits).all(axis=2))
    best = np.where(none, 0, np.nanargmax(np.where(none[..., None], 0, logits), axis=2))
    values = np.where(none, -np.inf, np.take_along_axis(logits, best[..., None], axis=2)[..., 0]).astype(np.float32)
    ids = np.where(none, 2**31 - 1, best + each * np.arange(p.ranks)[:, None]).astype(np.int32)
    damaged = ~np.isfinite(logits).all(axis=2)
    choices = np.stack([values.view(np.int32), np.where(damaged, ~ids, ids)], axis=2)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        chosen, inboxes = bench.poisoned("i32", guard(count)), Inboxes(bench, p.ranks, 2, count, 1).receive(choices[:, rows])
        logits_rows, first = bench.input(logits[RANK, rows]), RANK * each
        bench.launch(bench.integer(count), logits_rows, first, *inboxes.arguments(), chosen, tokens=count)
        inboxes.check(choices[RANK, rows])
        return {"next_token": split_guard(bench, "next_token", bench.read(chosen), count)}

    whole = np.concatenate(list(np.where(np.isnan(logits), -np.inf, logits)), axis=1)
    chosen = whole.argmax(axis=1)
    check_rows(bench, run, {"next_token": (np.where(damaged.any(axis=0), ~chosen, chosen), np.zeros(1))})


@for_template(CHECKS, ["peer_gather.cu.j2"])
def check_peer_gather(bench: Bench) -> None:
    p, most = bench.p, max(bench.tokens)
    parts = bench.rng.integers(-(2**31), 2**31, (p.ranks, most, p.width)).astype(np.int32)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        bound, inboxes = count + 1, Inboxes(bench, p.ranks, p.width, count, bench.kernel.grid[1].times).receive(parts[:, rows])
        gathered = bench.poisoned("i32", p.ranks, bound, p.width)
        addresses, rank, inbox_rows, rounds = inboxes.arguments()
        places = bench.input(parts[RANK, rows]), addresses, rank, inbox_rows, bound, rounds
        bench.launch(bench.integer(count), *places, gathered, tokens=count)
        inboxes.check(parts[RANK, rows])
        got = bench.read(gathered)
        bench.findings.untouched("rows beyond the step's", got[:, count:])
        return {"gathered": np.ascontiguousarray(got[:, :count].swapaxes(0, 1))}

    check_rows(bench, run, {"gathered": (parts.swapaxes(0, 1), np.zeros(1))})
