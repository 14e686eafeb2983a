"""Checks of the kernels that put the ranks' parts together."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.verify import tolerances
from kdgen.verify.bench import Bench, Registry, check_rows, for_template, guard, poison, split_guard

Array = NDArray[Any]

CHECKS: Registry = {}
_SPARE_ROWS = 3  #: rows of a step beyond those that it has, as a host's bound may have


def _parts(values: Array, rows: NDArray[np.int64]) -> tuple[Array, int]:
    """What a gather leaves of ``values`` [ranks, M, ...] for a step of ``rows``: NaN behind each rank's rows. And the rows a rank."""
    bound = len(rows) + _SPARE_ROWS
    gathered = np.full((values.shape[0], bound, *values.shape[2:]), -1, values.dtype)
    if values.dtype == np.float32:
        gathered[...] = np.nan
    gathered[:, : len(rows)] = values[:, rows]
    return gathered, bound


@for_template(CHECKS, ["rank_sum.cu.j2"])
def check_rank_sum(bench: Bench) -> None:
    p, most = bench.p, max(bench.tokens)
    parts = bench.random("f32", p.ranks, most, p.width)
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

    terms = [*parts.astype(np.float64), residual, *([] if bias is None else [np.broadcast_to(bias, residual.shape)])]
    error = tolerances.EPS32 * (len(terms) + 1) * np.abs(terms).sum(axis=0)
    check_rows(bench, run, {"residual": (np.sum(terms, axis=0), error)})


@for_template(CHECKS, ["rank_choice.cu.j2"])
def check_rank_choice(bench: Bench) -> None:
    """Ties between ranks, rows that only one rank has a token for, and rows of NaNs."""
    p, most = bench.p, max(bench.tokens)
    values = bench.rng.integers(0, 3, (p.ranks, most)).astype(np.float32)  # many ties
    values[0, 0], values[-1, 0] = -0.0, 0.0
    each = p.vocab // p.ranks
    ids = bench.rng.integers(0, each, (p.ranks, most)).astype(np.int32) + each * np.arange(p.ranks, dtype=np.int32)[:, None]
    nothing = bench.rng.random((p.ranks, most)) < 0.2
    nothing[:, -1] = True
    values[nothing], ids[nothing] = -np.inf, 2**31 - 1
    parts = np.stack([values.view(np.int32), ids], axis=2)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        chosen = bench.poisoned("i32", guard(count))
        gathered, bound = _parts(parts, rows)
        bench.launch(bench.integer(count), bench.input(gathered), bound, chosen, tokens=count)
        return {"next_token": split_guard(bench, "next_token", bench.read(chosen), count)}

    expected = ids[values.argmax(axis=0), np.arange(most)]  # the first rank of the best has the lowest ids
    check_rows(bench, run, {"next_token": (np.where(expected < p.vocab, expected, 0), np.zeros(1))})


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
