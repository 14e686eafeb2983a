"""Checks of the drafter's attention of blocks, and of the join of its splits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.verify.kernels import tolerances
from kdgen.verify.kernels.harness import Grid, Harness, Registry, for_template, guard, poison, split_guard
from kdgen.verify.kernels.paged import PagedCache

Array = NDArray[Any]
CHECKS: Registry = {}


@dataclass(frozen=True)
class Blocks:
    """Draft blocks of ``sizes`` rows behind ``lengths`` committed tokens of sequences in slabs ``slabs`` of the cache, a place each."""

    query: Array  # [rows of all blocks, heads, head]
    cache: Array  # [slabs, capacity, 2 * key heads * head]
    slabs: NDArray[np.int32]
    lengths: NDArray[np.int32]
    sizes: NDArray[np.int32]
    window: int

    @property
    def begins(self) -> NDArray[np.int32]:
        return np.cumsum([0, *self.sizes], dtype=np.int32)

    @property
    def ends(self) -> NDArray[np.int32]:
        """Keys that each place has."""
        return self.lengths + self.sizes

    def rows(self, place: int) -> slice:
        return slice(self.begins[place], self.begins[place + 1])

    def live(self, place: int, split: int) -> range:
        """The splits that any row of a place sees."""
        oldest = max(0, int(self.lengths[place]) - self.window + 1) if self.window else 0
        return range(oldest // split, (int(self.ends[place]) - 1) // split + 1) if self.sizes[place] else range(0)


def _situations(harness: Harness) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """(committed tokens of each place, block rows of each, window): around tiles, splits and windows; a place may draft nothing."""
    p = harness.p
    most, split = p.row_tiles * p.rows // p.group, p.split
    found: list[tuple[tuple[int, ...], tuple[int, ...], int]] = [
        ((0, 31, split - 2), (most, 0, most), 0),
        ((split, 3, 2 * split - 1), (2, 1, 2), 7),
        ((split + 40, 1, 70), (most, 2, 1), split),
    ]
    if len(harness.tokens) <= 2:
        return found[::2]
    more: list[tuple[tuple[int, ...], tuple[int, ...], int]] = [
        ((5,), (1,), 0),
        ((2 * split + 33, 12), (most, most), 40),
        ((100, 30), (most, most), 1),
        ((split + 39, 40, split + 38), (most, 2, 2), 40),  # the first of them sees the second split from its first key on
        ((split - 1, split + 1), (0, most), 2 * split),
    ]
    return found + more


def _drawn(harness: Harness, lengths: tuple[int, ...], sizes: tuple[int, ...], window: int) -> Blocks:
    p = harness.p
    places, capacity = len(lengths), max(lengths) + max(sizes) + 2
    cache = np.full((places, capacity, 2 * p.key_heads * p.head), np.nan, np.float32)
    for place, end in enumerate(np.add(lengths, sizes)):
        cache[place, :end] = harness.rng.standard_normal((end, cache.shape[2]))
    query = harness.random(harness.act, sum(sizes), p.heads, p.head, scale=(p.head**0.5 * p.scale) ** -1)  # scores of order one
    slabs = np.arange(places, dtype=np.int32)
    return Blocks(query, cache.astype(query.dtype), slabs, np.array(lengths, np.int32), np.array(sizes, np.int32), window)


def _elsewhere(harness: Harness, blocks: Blocks, chosen: NDArray[np.int64]) -> Blocks:
    """Some of the places in another order, their sequences in other slabs of a cache of another size, one slab of which is nobody's."""
    slabs = harness.rng.permutation(len(chosen) + 1)[: len(chosen)].astype(np.int32)
    cache = np.full((len(chosen) + 1, blocks.cache.shape[1] + 5, blocks.cache.shape[2]), np.nan, blocks.cache.dtype)
    cache[slabs, : blocks.cache.shape[1]] = blocks.cache[blocks.slabs[chosen]]
    query = np.concatenate([blocks.query[blocks.rows(place)] for place in chosen])
    return Blocks(query, cache, slabs, blocks.lengths[chosen], blocks.sizes[chosen], blocks.window)


@for_template(CHECKS, ["gqa_attention.cu.j2"])
def check_attention(harness: Harness) -> None:
    """Against float64, and the same bits in other places, slabs and companies."""
    for lengths, sizes, window in _situations(harness):
        blocks = _drawn(harness, lengths, sizes, window)
        got = _attend(harness, blocks)
        _compare(harness, got, blocks)
        chosen = harness.rng.permutation(len(lengths))[: max(1, len(lengths) - 1)]
        again = _attend(harness, _elsewhere(harness, blocks, chosen))
        for name, ours, theirs in zip(OUTPUTS, again, got, strict=True):
            splits = min(ours.shape[1], theirs.shape[1])
            expected = np.concatenate([theirs[blocks.rows(place)] for place in chosen])
            harness.findings.same_bits(f"{name} in other places", ours[:, :splits], expected[:, :splits])


OUTPUTS = ("split_values", "split_max", "split_sum")


def _attend(harness: Harness, blocks: Blocks) -> tuple[Array, Array, Array]:
    """(values [rows, S, heads, head], max [rows, S, heads], sum), poison where a row's block has no such split."""
    p, places, rows = harness.p, len(blocks.slabs), int(blocks.sizes.sum())
    key_heads = harness.few(p.key_heads)
    heads = key_heads * p.group
    context = int(blocks.ends.max())
    splits = -(-context // p.split) + 1  # one more than needed, which must stay untouched
    shape = (guard(rows), splits, p.heads)
    outputs = {name: harness.poisoned("f32", *shape, *extra) for name, extra in zip(OUTPUTS, ([p.head], [], []), strict=True)}
    cache = PagedCache(harness, blocks.cache[None], tiled=False)
    sequences = cache.sequences[blocks.slabs]
    lengths = poison("i32", int(sequences.max()) + 1)
    lengths[sequences] = blocks.lengths
    harness.launch(
        Grid(context=context, sequences=places, replaced={1: key_heads}),
        step_count=harness.integer(places),
        step_sequence=harness.input(sequences),
        draft_begin=harness.input(blocks.begins),
        sequence_length=harness.input(lengths),
        query=harness.input(blocks.query),
        draft_cache=cache.device,
        **cache.arguments,
        max_splits=splits,
        window=blocks.window,
        **outputs,
    )
    live = np.zeros((rows, splits), bool)
    for place in range(places):
        seen = blocks.live(place, p.split)
        live[blocks.rows(place), seen.start : seen.stop] = True
    results = []
    for name, array in outputs.items():
        got = split_guard(harness, name, harness.read(array), rows)
        harness.findings.untouched(f"{name} of splits that no row sees", got[~live])
        harness.findings.untouched(f"{name} of other heads", got[:, :, heads:])
        results.append(got[:, :, :heads])
    harness.release()
    return results[0], results[1], results[2]


def _sees(harness: Harness, blocks: Blocks, place: int) -> NDArray[np.bool_]:
    """[size, keys]: which keys each row of a place's block sees."""
    end = int(blocks.ends[place])
    apart = np.arange(int(blocks.lengths[place]), end)[:, None] - np.arange(end)
    if not blocks.window:
        return np.ones(apart.shape, bool)
    near: NDArray[np.bool_] = np.abs(apart) < blocks.window
    return near & (apart >= 0) if harness.p.causal else near


def _compare(harness: Harness, got: tuple[Array, Array, Array], blocks: Blocks) -> None:
    """Each split of each head against float64, relative to the kernel's own maximum, which any value near the true one may be."""
    p = harness.p
    for place, end in enumerate(blocks.ends):
        at_rows, seen = blocks.rows(place), _sees(harness, blocks, place)
        rows = blocks.cache[blocks.slabs[place], :end].astype(np.float64).reshape(end, 2, p.key_heads, p.head)
        for head in range(got[1].shape[2]):
            keys, values = rows[:, 0, head // p.group], rows[:, 1, head // p.group]
            query = blocks.query[at_rows, head].astype(np.float64)
            scores = query @ keys.T * p.scale
            error = tolerances.dot(tolerances.terms_norm(query, keys), p.head) * p.scale + 2 * tolerances.EPS32 * np.abs(scores)
            for split in blocks.live(place, p.split):
                at = slice(split * p.split, min((split + 1) * p.split, end))
                ours = [array[at_rows, split, head] for array in got]
                where = f"place {place} split {split} head {head}"
                with np.errstate(invalid="ignore"):  # a wrong kernel's NaN is a finding, not a warning
                    _compare_split(harness, where, ours, scores[:, at], error[:, at], values[at], seen[:, at])


def _compare_split(
    harness: Harness, where: str, got: list[Array], scores: Array, error: Array, values: Array, seen: NDArray[np.bool_]
) -> None:
    """One head's rows over one split: ``got`` is (values [size, head], max [size], sum [size])."""
    weighted, maxima, sums = got
    blind = ~seen.any(axis=1)
    harness.findings.equal(f"split_max of {where}, where nothing is seen", maxima[blind], np.full(int(blind.sum()), -np.inf))
    harness.findings.equal(f"split_sum of {where}, where nothing is seen", sums[blind], np.zeros(int(blind.sum())))
    harness.findings.equal(f"split_values of {where}, where nothing is seen", weighted[blind], np.zeros_like(weighted[blind]))
    weighted, maxima, sums, scores, error, seen = (array[~blind] for array in (weighted, maxima, sums, scores, error, seen))
    if not len(maxima):
        return
    s = np.where(seen, scores, -np.inf)
    harness.findings.close(f"split_max of {where}", maxima, s.max(axis=1), error.max(axis=1))
    top = maxima.astype(np.float64)[:, None]
    e = np.exp(s - top)
    relative = tolerances.probabilities(error, np.where(seen, top - scores, 0), s.shape[1])
    harness.findings.close(f"split_sum of {where}", sums, e.sum(axis=1), (e * relative).sum(axis=1))
    off = (e * relative) @ np.abs(values) + tolerances.dot(tolerances.terms_norm(e, values.T), s.shape[1])
    harness.findings.close(f"split_values of {where}", weighted, e @ values, off)


@for_template(CHECKS, ["gqa_combine.cu.j2"])
def check_combine(harness: Harness) -> None:
    """Split results with maxima far apart, some of nothing, joined over the splits that the block sees, and over no others."""
    p = harness.p
    heads, splits = harness.few(p.heads), 4
    for window in (0, 5, p.split + 1):
        # the second's block ends where a split does, the last's window begins there
        lengths = np.array([2 * p.split + 1, p.split - 3, 0, p.split + window - 1], np.int32)
        sizes = np.array([3, 3, 5, 2])
        sequence = np.repeat(np.arange(len(lengths)), sizes).astype(np.int32)
        start, end = lengths[sequence], (lengths + sizes)[sequence].astype(np.int32)
        first = np.maximum(start - window + 1, 0) // p.split if window else np.zeros_like(start)
        last = (end - 1) // p.split
        number = np.arange(splits)
        live = (number >= first[:, None]) & (number <= last[:, None])
        maxima = harness.random("f32", len(start), splits, p.heads, scale=8.0)
        sums = (1 + np.abs(harness.random("f32", len(start), splits, p.heads, scale=16.0))).astype(np.float32)
        values = harness.random("f32", len(start), splits, p.heads, p.head) * sums[..., None]
        blind = live & (number < last[:, None]) & (np.arange(len(start))[:, None] % 2 == 0)
        maxima[blind], sums[blind], values[blind] = -np.inf, 0, 0
        for array in (maxima, sums, values):
            array[~live] = np.nan
        m = np.where(live[..., None], maxima, -np.inf)[:, :, :heads].astype(np.float64)
        scale = np.exp(m - m.max(axis=1, keepdims=True))
        parts = scale[..., None] * np.where(live[..., None, None], values, 0)[:, :, :heads]
        total = (scale * np.where(live[..., None], sums, 0)[:, :, :heads]).sum(axis=1)[..., None]
        expected = parts.sum(axis=1) / total
        spread = np.where(np.isfinite(m), m.max(axis=1, keepdims=True) - m, 0)[..., None]
        relative = tolerances.probabilities(np.zeros(1), spread, splits)
        error = (
            (np.abs(parts) * relative).sum(axis=1) / total + np.abs(expected) * relative.max(axis=1) + tolerances.stored(expected, p.act)
        )
        for rows in (np.arange(len(start)), harness.rng.permutation(len(start))[:5]):
            count = len(rows)
            output = harness.poisoned(harness.act, guard(count), p.heads, p.head)
            harness.launch(
                Grid(count, replaced={1: heads}),
                num_tokens=harness.integer(count),
                row_sequence=harness.input(sequence[rows]),
                row_last=harness.input(end[rows] - 1),
                sequence_length=harness.input(lengths),
                split_values=harness.input(values[rows]),
                split_max=harness.input(maxima[rows]),
                split_sum=harness.input(sums[rows]),
                output=output,
                max_splits=splits,
                window=window,
            )
            got = split_guard(harness, "output", harness.read(output), count)
            harness.findings.untouched("output of other heads", got[:, heads:])
            harness.findings.close(f"output with window {window}", got[:, :heads], expected[rows], error[rows])
            harness.release()
