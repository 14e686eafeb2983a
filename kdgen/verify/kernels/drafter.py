"""Checks of the drafter's rows: captured features, rows of context and of blocks, keys, values and queries."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.reference import ops
from kdgen.verify.kernels import tolerances
from kdgen.verify.kernels.harness import Grid, Harness, Registry, check_rows, for_template, guard, poison, split_guard
from kdgen.verify.kernels.paged import PagedCache
from kdgen.verify.kernels.step_rows import CROWD, SEQUENCES, crowded_steps, small_steps

Array = NDArray[Any]
CHECKS: Registry = {}


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
    for step in small_steps(harness):
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
        cache = PagedCache(harness, poison(harness.act, 1, SEQUENCES, capacity, 2 * key_width), tiled=False)
        query = harness.poisoned(harness.act, guard(count), p.query_heads, p.head)
        queries = {"q": harness.input(q[rows]), "q_norm": harness.input(q_norm), "query": query} if p.queries else {}
        harness.launch(
            Grid(count),
            num_tokens=harness.integer(count),
            row_sequence=harness.input(cache.sequences[sequence[rows]]),
            row_position=harness.input(positions[rows]),
            kv=harness.input(kv[rows]),
            k_norm=harness.input(k_norm),
            cos_table=harness.input(cos),
            sin_table=harness.input(sin),
            draft_cache=cache.device,
            **cache.arguments,
            **queries,
        )
        found = {"draft_cache": cache.written("draft_cache", sequence[rows], positions[rows])}
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
