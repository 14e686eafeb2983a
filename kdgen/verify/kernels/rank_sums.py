"""Checks of the kernels that put the ranks' parts together, and of those that send them there, too."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kdgen.plan.ops.ranks import PeerSum
from kdgen.reference import ops
from kdgen.verify.kernels import tolerances
from kdgen.verify.kernels.harness import Grid, Harness, Registry, check_rows, for_template, guard, poison, split_guard
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


def _ordered_parts(harness: Harness, most: int) -> Array:
    """Parts [ranks, most, width] whose sums depend on their order; in every third column nothing but the order decides the sum."""
    parts = harness.random("f32", harness.p.ranks, most, harness.p.width)
    for rank, value in enumerate(np.resize([1e8, 1, -1e8, 1], harness.p.ranks)):
        parts[rank, :, ::3] = value
    return parts


@for_template(CHECKS, ["rank_sum.cu.j2"])
def check_rank_sum(harness: Harness) -> None:
    p, most = harness.p, max(harness.tokens)
    parts = _ordered_parts(harness, most)
    residual = harness.random("f32", most, p.width)
    bias = harness.random("f32", p.width) if p.bias else None

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        start = poison("f32", guard(count), p.width)
        start[:count] = residual[rows]
        y = harness.input(start)
        gathered, bound = _parts(parts, rows)
        extra = {} if bias is None else {"bias": harness.input(bias)}
        harness.launch(Grid(count), num_tokens=harness.integer(count), gathered=harness.input(gathered), rows=bound, residual=y, **extra)
        return {"residual": split_guard(harness, "residual", harness.read(y), count)}

    check_rows(harness, run, {"residual": (_in_rank_order(parts, residual, bias), np.zeros(1))})


@for_template(CHECKS, ["rank_choice.cu.j2"])
def check_rank_choice(harness: Harness) -> None:
    """Ties between ranks, rows that only one rank has a token for, rows of NaNs, and rows of which a rank says that they are not finite."""
    p, most = harness.p, max(harness.tokens)
    values = harness.rng.integers(0, 3, (p.ranks, most)).astype(np.float32)  # many ties
    values[0, 0], values[-1, 0] = -0.0, 0.0
    each = p.vocab // p.ranks
    ids = harness.rng.integers(0, each, (p.ranks, most)).astype(np.int32) + each * np.arange(p.ranks, dtype=np.int32)[:, None]
    nothing = harness.rng.random((p.ranks, most)) < 0.2
    nothing[:, -1] = True
    values[nothing], ids[nothing] = -np.inf, 2**31 - 1
    damaged = nothing & (harness.rng.random((p.ranks, most)) < 0.5)
    odd = np.arange(1, most, 2)
    damaged[odd // 2 % p.ranks, odd] = True  # whichever rank it is
    parts = np.stack([values.view(np.int32), np.where(damaged, ~ids, ids)], axis=2)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        chosen = harness.poisoned("i32", guard(count))
        gathered, bound = _parts(parts, rows)
        harness.launch(Grid(count), num_tokens=harness.integer(count), gathered=harness.input(gathered), rows=bound, next_token=chosen)
        return {"next_token": split_guard(harness, "next_token", harness.read(chosen), count)}

    expected = ids[values.argmax(axis=0), np.arange(most)]  # the first rank of the best has the lowest ids
    chosen = np.where(expected < p.vocab, expected, 0)
    check_rows(harness, run, {"next_token": (np.where(damaged.any(axis=0), ~chosen, chosen), np.zeros(1))})


@for_template(CHECKS, ["rank_logits.cu.j2"])
def check_rank_logits(harness: Harness) -> None:
    p, most = harness.p, max(harness.tokens)
    parts = harness.random("f32", p.ranks, most, p.vocab)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        joined = harness.poisoned("f32", guard(count), p.ranks * p.vocab)
        gathered, bound = _parts(parts, rows)
        harness.launch(Grid(count), num_tokens=harness.integer(count), gathered=harness.input(gathered), rows=bound, joined=joined)
        return {"joined": split_guard(harness, "joined", harness.read(joined), count)}

    expected = parts.swapaxes(0, 1).reshape(most, -1).astype(np.float64)
    check_rows(harness, run, {"joined": (expected, np.zeros(1))})


# ---- through the ranks' memory ------------------------------------------------------------------------------------------


@for_template(CHECKS, ["peer_sum.cu.j2"])
def check_peer_sum(harness: Harness) -> None:
    p, most = harness.p, max(harness.tokens)
    parts, residual = _ordered_parts(harness, most), harness.random("f32", most, p.width)
    bias = harness.random("f32", p.width) if p.bias else None
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
        y, inboxes = harness.input(start), Inboxes(harness, p.ranks, p.width, count, harness.kernel.grid[1].times).receive(to_me[:, rows])
        extra = {} if bias is None else {"bias": harness.input(bias)}
        harness.launch(
            Grid(count),
            num_tokens=harness.integer(count),
            part=harness.input(parts[RANK, rows]),
            residual=y,
            **inboxes.arguments(),
            **extra,
        )
        if direct:
            inboxes.check(parts[RANK, rows])
        else:
            to = np.stack([mine | (summing == rank) for rank in range(p.ranks)])
            inboxes.check(np.where(mine, totals, parts[RANK])[rows], to)
        return {"residual": split_guard(harness, "residual", harness.read(y), count)}

    check_rows(harness, run, {"residual": (_in_rank_order(parts, residual, bias), np.zeros(1))})


@for_template(CHECKS, ["peer_sum_norm.cu.j2"])
def check_peer_sum_norm(harness: Harness) -> None:
    """The residual and its norm, with the bits of the two kernels that do one each."""
    p, norm, most = harness.p, harness.p.norm, max(harness.tokens)
    parts, residual = harness.random("f32", p.ranks, most, norm.width), harness.random("f32", most, norm.width)
    parts *= np.exp2(harness.rng.integers(-8, 8, (most, 1))).astype(np.float32)  # the smallest rows are where eps counts
    residual *= np.float32(0.01)
    bias, gain = harness.random("f32", norm.width) * np.float32(0.01) if p.bias else None, harness.random("f32", norm.width)
    extra = {} if bias is None else {"bias": bias}

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        start = poison("f32", guard(count), norm.width)
        start[:count] = residual[rows]
        x, y = harness.input(start), harness.poisoned(harness.act, guard(count), norm.width)
        inboxes = Inboxes(harness, p.ranks, norm.width, count, p.counters).receive(parts[:, rows], mine=True)
        harness.launch(
            Grid(count), num_tokens=harness.integer(count), residual=x, weight=harness.input(gain), y=y, **inboxes.arguments(),
            **harness.inputs(extra),
        )  # fmt: skip
        inboxes.check(None)
        return {
            "residual": split_guard(harness, "residual", harness.read(x), count),
            "y": split_guard(harness, "y", harness.read(y), count),
        }

    terms = [*parts.astype(np.float64), residual, *(np.broadcast_to(each, residual.shape) for each in extra.values())]
    whole, error = np.sum(terms, axis=0), tolerances.EPS32 * (len(terms) + 1) * np.abs(terms).sum(axis=0)
    expected = ops.rmsnorm(whole, gain, norm.eps)
    root = np.sqrt(np.square(whole).mean(axis=1, keepdims=True) + norm.eps)  # an element's own error, and that of the root
    off = np.abs(gain) * error / root + np.abs(expected) * error.max(axis=1, keepdims=True) / root
    off = off + tolerances.normed(expected, norm.width) + tolerances.stored(expected, norm.act)
    check_rows(harness, run, {"residual": (_in_rank_order(parts, residual, bias), np.zeros(1)), "y": (expected, off)})
    _same_apart(harness, run(np.arange(most)), parts, residual, extra, gain)


def _same_apart(harness: Harness, found: dict[str, Array], parts: Array, residual: Array, extra: dict[str, Array], gain: Array) -> None:
    """What the sum and the norm leave as a launch each has the bits ``found``."""
    added, norm, rows = harness.plan.kernel(harness.p.sum), harness.plan.kernel(harness.p.norm.name), np.arange(len(residual))
    count, x, y = harness.integer(len(rows)), harness.input(residual), harness.poisoned(harness.act, *residual.shape)
    summing = np.arange(residual.shape[1]) // 32 * harness.p.ranks // -(-residual.shape[1] // 32)
    totals = np.add.accumulate(parts, axis=0)[-1]
    direct = len(rows) <= cast(PeerSum, added.params).direct_rows
    inboxes = Inboxes(harness, harness.p.ranks, residual.shape[1], len(rows), harness.p.counters)
    inboxes.receive(np.where(direct | (summing == RANK), parts, totals))
    part, places = harness.input(parts[RANK]), inboxes.arguments()
    harness.launch(Grid(len(rows), kernel=added), num_tokens=count, part=part, residual=x, **places, **harness.inputs(extra))
    harness.launch(Grid(len(rows), kernel=norm), num_tokens=count, x=x, weight=harness.input(gain), y=y)
    harness.findings.same_bits(f"residual of {added.name}", found["residual"], harness.read(x))
    harness.findings.same_bits(f"y of {norm.name}", found["y"], harness.read(y))


@for_template(CHECKS, ["peer_argmax.cu.j2"])
def check_peer_argmax(harness: Harness) -> None:
    """Ties in a rank's part and between ranks, and rows in which this rank or every rank has NaNs."""
    p, most, each = harness.p, max(harness.tokens), harness.p.part.vocab
    logits = harness.rng.integers(0, 3, (p.ranks, most, each)).astype(np.float32)  # many ties
    logits[0, 0], logits[1:, 0] = -0.0, 0.0
    for rank, row in ((RANK, 1), (RANK, 2), (0, 2), (slice(None), most - 1)):
        logits[rank, row] = np.nan
    odd = np.arange(3, most, 2)
    logits[odd // 2 % p.ranks, odd, harness.rng.integers(each)] = -np.inf
    none = np.asarray(np.isnan(logits).all(axis=2))
    best = np.where(none, 0, np.nanargmax(np.where(none[..., None], 0, logits), axis=2))
    values = np.where(none, -np.inf, np.take_along_axis(logits, best[..., None], axis=2)[..., 0]).astype(np.float32)
    ids = np.where(none, 2**31 - 1, best + each * np.arange(p.ranks)[:, None]).astype(np.int32)
    damaged = ~np.isfinite(logits).all(axis=2)
    choices = np.stack([values.view(np.int32), np.where(damaged, ~ids, ids)], axis=2)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        chosen, inboxes = harness.poisoned("i32", guard(count)), Inboxes(harness, p.ranks, 2, count, 1).receive(choices[:, rows])
        harness.launch(
            Grid(count), num_tokens=harness.integer(count), logits=harness.input(logits[RANK, rows]), first_token=RANK * each,
            next_token=chosen, **inboxes.arguments(),
        )  # fmt: skip
        inboxes.check(choices[RANK, rows])
        return {"next_token": split_guard(harness, "next_token", harness.read(chosen), count)}

    whole = np.concatenate(list(np.where(np.isnan(logits), -np.inf, logits)), axis=1)
    chosen = whole.argmax(axis=1)
    check_rows(harness, run, {"next_token": (np.where(damaged.any(axis=0), ~chosen, chosen), np.zeros(1))})


@for_template(CHECKS, ["peer_gather.cu.j2"])
def check_peer_gather(harness: Harness) -> None:
    p, most = harness.p, max(harness.tokens)
    parts = harness.rng.integers(-(2**31), 2**31, (p.ranks, most, p.width)).astype(np.int32)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        bound, inboxes = count + 1, Inboxes(harness, p.ranks, p.width, count, harness.kernel.grid[1].times).receive(parts[:, rows])
        gathered = harness.poisoned("i32", p.ranks, bound, p.width)
        arguments = inboxes.arguments() | {"inbox_rows": inboxes.rows, "rows": bound}
        harness.launch(
            Grid(count), num_tokens=harness.integer(count), part=harness.input(parts[RANK, rows]), gathered=gathered, **arguments
        )
        inboxes.check(parts[RANK, rows])
        got = harness.read(gathered)
        harness.findings.untouched("rows beyond the step's", got[:, count:])
        return {"gathered": np.ascontiguousarray(got[:, :count].swapaxes(0, 1))}

    check_rows(harness, run, {"gathered": (parts.swapaxes(0, 1), np.zeros(1))})
