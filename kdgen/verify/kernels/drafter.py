"""Checks of the drafter's kernels: captured features, context and block rows, heads, attention of blocks, the join of its splits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.reference import ops
from kdgen.verify.kernels import tolerances
from kdgen.verify.kernels.harness import Grid, Harness, Registry, check_rows, for_template, guard, poison, split_guard
from kdgen.verify.kernels.trees import CROWD, crowded_steps

Array = NDArray[Any]

CHECKS: Registry = {}
SEQUENCES = 3


def _steps(harness: Harness) -> list[NDArray[np.int32]]:
    """Which sequence stands at each place of a step: one, some, all, in any order."""
    return [harness.rng.permutation(SEQUENCES)[:places].astype(np.int32) for places in range(1, SEQUENCES + 1)]


@for_template(CHECKS, ["draft_capture.cu.j2"])
def check_capture(harness: Harness) -> None:
    """A layer's output lands in its place of the features, rounded, and nowhere else."""
    p, most = harness.p, max(harness.tokens)
    residual = harness.random("f32", most, p.hidden)
    for place in sorted({0, p.width // p.hidden - 1}):
        columns = np.arange(place * p.hidden, (place + 1) * p.hidden)

        def run(rows: NDArray[np.int64], place: int = place, columns: Array = columns) -> dict[str, Array]:
            count = len(rows)
            features = harness.poisoned(harness.act, guard(count), p.width)
            harness.launch(
                Grid(count), num_tokens=harness.integer(count), residual=harness.input(residual[rows]), features=features, place=place
            )
            got = split_guard(harness, "features", harness.read(features), count)
            harness.findings.untouched("features of other layers", np.delete(got, columns, axis=1))
            return {"features": got[:, columns]}

        expected = residual.astype(np.float64)
        check_rows(harness, run, {"features": (expected, tolerances.stored(expected, p.act))})


@for_template(CHECKS, ["draft_context.cu.j2"])
def check_context(harness: Harness) -> None:
    """Runs of tokens give all their rows, trees the accepted nodes' in path order, at the positions that they were committed to."""
    p = harness.p
    for step in _steps(harness):
        for from_tree in (0, 1):
            sizes = harness.rng.integers(1, 17, len(step)).astype(np.int32)
            counts = np.array([harness.rng.integers(1, min(size, p.max_path) + 1) for size in sizes], np.int32) if from_tree else sizes
            nodes = [np.sort(harness.rng.permutation(size)[:count]) for size, count in zip(sizes, counts, strict=True)]
            begins, lengths = np.cumsum([0, *sizes], dtype=np.int32), harness.rng.integers(20, 99, SEQUENCES).astype(np.int32)
            accepted = poison("i32", len(step), p.max_path)
            for place, chosen in enumerate(nodes if from_tree else []):
                accepted[place, : len(chosen)] = chosen
            features, total = harness.random(harness.act, int(begins[-1]), p.width), int(counts.sum())
            accepted_count = counts if from_tree else poison("i32", len(step))
            context, number = harness.poisoned(harness.act, guard(total), p.width), harness.poisoned("i32", 1)
            sequence, position = harness.poisoned("i32", guard(total)), harness.poisoned("i32", guard(total))
            residual = {"residual": harness.poisoned("f32", guard(total), p.hidden)} if p.sharded else {}
            harness.launch(
                Grid(int(begins[-1])),  # an upper bound of the committed rows, which the host knows
                step_count=harness.integer(len(step)),
                step_sequence=harness.input(step),
                step_begin=harness.input(begins),
                accepted_count=harness.input(accepted_count),
                accepted_nodes=harness.input(accepted),
                sequence_length=harness.input(lengths),
                features=harness.input(features),
                context_features=context,
                context_count=number,
                context_sequence=sequence,
                context_position=position,
                from_tree=from_tree,
                **residual,
            )
            wanted = np.concatenate([begin + chosen for begin, chosen in zip(begins[:-1], nodes, strict=True)])
            ordinal = np.concatenate([np.arange(count) for count in counts])
            of_row = np.repeat(step, counts)
            harness.findings.equal("context_count", harness.read(number), np.array([total]))
            harness.findings.equal("context_sequence", split_guard(harness, "context_sequence", harness.read(sequence), total), of_row)
            expected = lengths[of_row] - np.repeat(counts, counts) + ordinal
            harness.findings.equal("context_position", split_guard(harness, "context_position", harness.read(position), total), expected)
            got = split_guard(harness, "context_features", harness.read(context), total)
            harness.findings.same_bits("context_features", got, features[wanted])
            for array in residual.values():
                harness.findings.equal(
                    "residual", split_guard(harness, "residual", harness.read(array), total), np.zeros((total, p.hidden))
                )
            harness.release()


@for_template(CHECKS, ["draft_block.cu.j2"])
def check_block(harness: Harness) -> None:
    """Blocks of different sizes, and places without one."""
    for step in crowded_steps(harness):
        sizes = harness.rng.choice([0, 2, 3, 8, 16], len(step))
        sizes[-1] = 5
        lengths, roots = harness.rng.integers(0, 99, (2, CROWD)).astype(np.int32)
        begins, rows = np.cumsum([0, *sizes], dtype=np.int32), int(sizes.sum())
        number, names = harness.poisoned("i32", 1), ("tokens", "row_sequence", "row_position", "row_last")
        outputs = {name: harness.poisoned("i32", guard(rows)) for name in names}
        harness.launch(
            Grid(),
            step_count=harness.integer(len(step)),
            step_sequence=harness.input(step),
            draft_begin=harness.input(begins),
            sequence_length=harness.input(lengths),
            root_token=harness.input(roots),
            num_tokens=number,
            **outputs,
        )
        sequence, index = np.repeat(step, sizes), np.concatenate([np.arange(size) for size in sizes])
        expected = {
            "tokens": np.where(index == 0, roots[sequence], harness.p.mask_token),
            "row_sequence": sequence,
            "row_position": lengths[sequence] + index,
            "row_last": lengths[sequence] + np.repeat(sizes, sizes) - 1,
        }
        harness.findings.equal("num_tokens", harness.read(number), np.array([rows]))
        for name, values in expected.items():
            harness.findings.equal(name, split_guard(harness, name, harness.read(outputs[name]), rows), values)
        harness.release()


@for_template(CHECKS, ["draft_heads.cu.j2"])
def check_heads(harness: Harness) -> None:
    """Keys and values land at their row's position of their sequence and nowhere else; keys and queries are normed, then rotated."""
    p, most = harness.p, max(harness.tokens)
    half, key_width = p.head // 2, p.key_heads * p.head
    capacity = 2 * most + 3
    positions = harness.rng.permutation(capacity)[:most].astype(np.int32)
    sequence = harness.rng.integers(0, SEQUENCES, most).astype(np.int32)
    kv = harness.random("f32", most, 2 * key_width)
    kv *= np.exp2(harness.rng.integers(-8, 8, (most, 1))).astype(np.float32)  # the smallest rows are where eps counts
    q = harness.random("f32", most, p.query_heads, p.head)
    q_norm, k_norm = harness.random("f32", p.head), harness.random("f32", p.head)
    angles = np.arange(capacity)[:, None] * harness.rng.uniform(0.01, 1, half)
    cos, sin = (1.4 * np.cos(angles)).astype(np.float32), (1.4 * np.sin(angles)).astype(np.float32)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        unwritten = poison(harness.act, SEQUENCES, capacity, 2 * key_width)
        cache, numbers = harness.far_apart(unwritten)
        query = harness.poisoned(harness.act, guard(count), p.query_heads, p.head)
        queries = {"q": harness.input(q[rows]), "q_norm": harness.input(q_norm), "query": query} if p.queries else {}
        harness.launch(
            Grid(count),
            num_tokens=harness.integer(count),
            row_sequence=harness.input(numbers[sequence[rows]]),
            row_position=harness.input(positions[rows]),
            kv=harness.input(kv[rows]),
            k_norm=harness.input(k_norm),
            cos_table=harness.input(cos),
            sin_table=harness.input(sin),
            draft_cache=cache,
            context_capacity=capacity,
            **queries,
        )
        got = harness.read_parts(cache, numbers, unwritten)
        written = np.zeros((SEQUENCES, capacity), bool)
        written[sequence[rows], positions[rows]] = True
        harness.findings.untouched("draft_cache in other slots", got[~written])
        found = {"draft_cache": got[sequence[rows], positions[rows]]}
        return found | ({"query": split_guard(harness, "query", harness.read(query), count)} if p.queries else {})

    def rotated(x: Array, weight: Array) -> tuple[Array, Array]:
        """(values, tolerance) of heads x [M, heads, head]."""
        c, s = cos[positions], sin[positions]
        normed = ops.rmsnorm(x, weight, p.eps)
        turned = ops.rope(normed, c, s, interleave=False)
        size = ops.rope(np.abs(normed), np.abs(c), -np.abs(s), interleave=False)
        size = np.maximum(np.abs(size), np.abs(np.roll(size, half, axis=-1)))  # bounds both halves of each pair
        return turned, tolerances.normed(size, p.head) + 4 * tolerances.EPS32 * size + tolerances.stored(turned, p.act)

    keys, key_error = rotated(kv[:, :key_width].reshape(most, p.key_heads, p.head), k_norm)
    values = kv[:, key_width:].astype(np.float64)
    row = np.concatenate([keys.reshape(most, -1), values], axis=1)
    error = np.concatenate([key_error.reshape(most, -1), tolerances.stored(values, p.act)], axis=1)
    expected = {"draft_cache": (row, error)}
    check_rows(harness, run, expected | ({"query": rotated(q, q_norm)} if p.queries else {}))


# ---- attention ----------------------------------------------------------------------------------------------------------


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
    cache, numbers = harness.far_apart(blocks.cache)
    sequences = numbers[blocks.slabs]
    lengths = poison("i32", int(numbers.max()) + 1)
    lengths[sequences] = blocks.lengths
    harness.launch(
        Grid(context=context, sequences=places, replaced={1: key_heads}),
        step_count=harness.integer(places),
        step_sequence=harness.input(sequences),
        draft_begin=harness.input(blocks.begins),
        sequence_length=harness.input(lengths),
        query=harness.input(blocks.query),
        draft_cache=cache,
        context_capacity=blocks.cache.shape[1],
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
