"""Checks of the cache's rows and of attention over cache and tree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.plan.attention import WGMMA_TILE
from kdgen.plan.ir import MAX_NODES, MAX_PATH
from kdgen.reference import ops
from kdgen.verify.kernels import tolerances
from kdgen.verify.kernels.attention_schedule import drawn_schedules, grouped_rows
from kdgen.verify.kernels.harness import (
    Grid,
    Harness,
    Registry,
    check_rows,
    for_template,
    guard,
    poison,
    split_guard,
)
from kdgen.verify.kernels.paged import PagedCache

Array = NDArray[Any]
CHECKS: Registry = {}
#: Keys that a row sees: one, around the tiles of 32 keys and the splits of 64 and 128, and beyond them.
CONTEXTS = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130, 200)
FEW_CONTEXTS = (1, 33, 130)
LONG_CONTEXTS = (255, 256, 257, 320)  #: the same, where splits are longer and a block's stages are filled again and again


def drawn_angles(harness: Harness, positions: int, half: int) -> tuple[Array, Array]:
    """Tables [positions, half] of cos and sin, with an amplitude."""
    angles = np.arange(positions)[:, None] * harness.rng.uniform(0.01, 1, half)
    return (1.25 * np.cos(angles)).astype(np.float32), (1.25 * np.sin(angles)).astype(np.float32)


@for_template(CHECKS, ["rope_cache.cu.j2"])
def check_rope_cache(harness: Harness) -> None:
    """Cache rows land in their sequence's slot and nowhere else; queries' rotary parts are rotated, the rest left alone."""
    p, most = harness.p, max(harness.tokens)
    row, half, nope, sequences = p.kv_lora + p.rope, p.rope // 2, p.qk_head - p.rope, 3
    positions = harness.rng.permutation(np.arange(2 * most))[:most].astype(np.int32)
    capacity = 2 * most + 5
    slots = harness.rng.permutation(capacity)[:most].astype(np.int32)
    sequence = harness.rng.integers(0, sequences, most).astype(np.int32)
    kv_a = harness.random("f32", most, row)
    kv_a *= np.exp2(harness.rng.integers(-8, 8, (most, 1))).astype(np.float32)
    weight = harness.random("f32", p.kv_lora)
    q = harness.random(harness.act, most, p.heads, p.qk_head)
    cos, sin = drawn_angles(harness, 2 * most, half)

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        source = np.full((count, p.kv_a_stride), np.nan, np.float32)
        source[:, p.kv_a_offset : p.kv_a_offset + row] = kv_a[rows]
        q_rows = q[rows].copy()
        q_rows[..., :nope] = np.nan
        cache = PagedCache(harness, poison(harness.act, 1, sequences, capacity, row), p.tiled)
        query = harness.poisoned(harness.act, guard(count), p.heads, row)
        harness.launch(
            Grid(count),
            num_tokens=harness.integer(count),
            row_sequence=harness.input(cache.sequences[sequence[rows]]),
            row_position=harness.input(positions[rows]),
            row_slot=harness.input(slots[rows]),
            kv_a=harness.input(source.reshape(-1)),
            norm_weight=harness.input(weight),
            q=harness.input(q_rows),
            cos_table=harness.input(cos),
            sin_table=harness.input(sin),
            kv_cache=cache.device,
            query=query,
            **cache.arguments,
        )
        written = cache.written("kv_cache", sequence[rows], slots[rows])
        rotated = split_guard(harness, "query", harness.read(query), count)
        harness.findings.untouched("query's latent part", rotated[..., : p.kv_lora])
        return {"kv_cache": written, "query": rotated[..., p.kv_lora :]}

    c, s = cos[positions], sin[positions]
    latent = ops.rmsnorm(kv_a[:, : p.kv_lora], weight, p.eps)
    key = ops.rope(kv_a[:, p.kv_lora :], c, s, p.interleave)
    turned = ops.rope(q[..., nope:], c, s, p.interleave)
    key_size = ops.rope(np.abs(kv_a[:, p.kv_lora :]), np.abs(c), -np.abs(s), p.interleave)  # bounds one half of each pair
    q_size = np.abs(q[..., nope:].astype(np.float64)).max(axis=-1, keepdims=True)
    size = np.maximum(np.abs(kv_a[:, p.kv_lora :]).max(axis=-1, keepdims=True).astype(np.float64), np.abs(key_size))
    cache_rows = np.concatenate([latent, key], axis=1)
    error = np.concatenate([tolerances.normed(latent, p.kv_lora), 4 * tolerances.EPS32 * size], axis=1)
    check_rows(
        harness,
        run,
        {
            "kv_cache": (cache_rows, error + tolerances.stored(cache_rows, p.act)),
            "query": (turned, 4 * tolerances.EPS32 * q_size + tolerances.stored(turned, p.act)),
        },
    )


@dataclass(frozen=True)
class Rows:
    """Token rows over a cache [sequences, capacity, row]: each sees ``positions + 1`` keys, those from ``prefixes`` on by its path."""

    query: Array  # [M, heads, row]
    sequences: NDArray[np.int32]
    positions: NDArray[np.int32]
    prefixes: NDArray[np.int32]
    paths: NDArray[np.int32]  # [M, MAX_PATH]
    cache: Array

    def chosen(self, rows: NDArray[np.int64]) -> Rows:
        return replace(
            self, query=self.query[rows], sequences=self.sequences[rows], positions=self.positions[rows],
            prefixes=self.prefixes[rows], paths=self.paths[rows],
        )  # fmt: skip


#: Templates of attention over the cache, and of them the one whose blocks get their work from a schedule.
WGMMA_ATTENTION = "mla_attention_wgmma.cu.j2"
ATTENTION_TEMPLATES = ("mla_attention_f32.cu.j2", "mla_attention_mma.cu.j2", WGMMA_ATTENTION)


@for_template(CHECKS, ATTENTION_TEMPLATES)
def check_attention(harness: Harness) -> None:
    """Against float64, and bit for bit the same keys as a plain sequence, through tree paths, in other slabs and companies."""
    p = harness.p
    contexts: tuple[int, ...] = CONTEXTS if len(harness.tokens) > 2 else FEW_CONTEXTS
    if harness.kernel.template == WGMMA_ATTENTION:
        contexts += LONG_CONTEXTS if len(harness.tokens) > 2 else LONG_CONTEXTS[-1:]
    most = len(contexts)
    heads = harness.few(p.heads, max(2, _heads_a_block(harness)))
    keys = harness.random(harness.act, most, max(contexts), p.row)  # each row has its own sequence's
    positions = np.array(contexts, np.int32) - 1
    query = harness.random(harness.act, most, p.heads, p.row, scale=(p.row**0.5 * softmax_scale(p)[0]) ** -1)  # scores of order one
    if hasattr(p, "slack"):
        query[1::2] *= 32  # so that largest scores leave older ones far behind
    chain = _chain(query, positions, keys)
    values, maxima, sums = _attend(harness, chain, heads)
    _compare_attention(harness, (values, maxima, sums), chain, heads)

    others = {
        "as tree nodes": _tree(harness, chain, np.arange(most)),
        "as tree nodes in other slabs": _tree(harness, chain, harness.rng.permutation(most)),
    }
    for name, rows in others.items():
        got = _attend(harness, rows, heads)
        for output, ours, theirs in zip(("split_values", "split_max", "split_sum"), got, (values, maxima, sums), strict=True):
            harness.findings.same_bits(f"{output} {name}", ours, theirs)
    for count in sorted({1, most // 2}):
        some = harness.rng.permutation(most)[:count]
        got = _attend(harness, others["as tree nodes"].chosen(some), heads)
        for output, ours, theirs in zip(("split_values", "split_max", "split_sum"), got, (values, maxima, sums), strict=True):
            harness.findings.same_bits(f"{output} of {count} rows", ours, theirs[some])
    if harness.kernel.template == WGMMA_ATTENTION and p.group > 1:
        _check_groups(harness, heads)


def _check_groups(harness: Harness, heads: int) -> None:
    """Rows whose heads share tiles, as runs and trees of few sequences have them: against float64, and by bits as each row alone."""
    p, longest = harness.p, max(LONG_CONTEXTS)
    sequences, positions, prefixes, paths = grouped_rows(p, longest)
    most = len(positions)
    query = harness.random(harness.act, most, p.heads, p.row, scale=(p.row**0.5 * softmax_scale(p)[0]) ** -1)
    together = Rows(query, sequences, positions, prefixes, paths, harness.random(harness.act, 5, longest + MAX_NODES, p.row))
    got = _attend(harness, together, heads)
    keys = np.stack([_seen(together, row) for row in range(most)])
    _compare_attention(harness, got, replace(together, cache=keys), heads)
    for each in range(most):
        alone = _attend(harness, together.chosen(np.array([each])), heads)
        for output, ours, theirs in zip(("split_values", "split_max", "split_sum"), alone, got, strict=True):
            harness.findings.same_bits(f"{output} of row {each} alone", ours, theirs[each : each + 1])


def _seen(rows: Rows, row: int) -> Array:
    """A row's keys at their positions, and NaN behind them, as long as a slab of the cache."""
    position, prefix, cache = int(rows.positions[row]), int(rows.prefixes[row]), rows.cache[rows.sequences[row]]
    keys = np.full(cache.shape, np.nan, cache.dtype)
    keys[:prefix] = cache[:prefix]
    keys[prefix : position + 1] = cache[prefix + rows.paths[row, : position + 1 - prefix]]
    return keys


def softmax_scale(p: Any) -> tuple[float, float]:
    """The factor of scores, and what a step of 1 in the kernel's maxima stands for: where exponentials are powers of 2, log 2."""
    return (p.scale_log2 * float(np.log(2)), float(np.log(2))) if hasattr(p, "scale_log2") else (p.scale, 1.0)


def _heads_a_block(harness: Harness) -> int:
    return {"mla_attention_mma.cu.j2": 16, WGMMA_ATTENTION: WGMMA_TILE}.get(harness.kernel.template, 1)


def _chain(query: Array, positions: NDArray[np.int32], keys: Array) -> Rows:
    """Every key at its own position: a run of tokens."""
    count, longest, row = keys.shape
    cache = np.full((count, longest + MAX_NODES, row), np.nan, keys.dtype)
    for i, position in enumerate(positions):
        cache[i, : position + 1] = keys[i, : position + 1]  # what lies beyond is NaN: nobody may look at it
    unused = np.full((count, MAX_PATH), 1 << 20, np.int32)
    return Rows(query, np.arange(count, dtype=np.int32), positions, positions + 1, unused, cache)


def _tree(harness: Harness, chain: Rows, slabs: NDArray[np.int64]) -> Rows:
    """The same keys, the last 1 to MAX_PATH of each row in scattered slots behind its prefix, every row in slab ``slabs[row]``."""
    count, paths = len(chain.positions), chain.paths.copy()
    cache = np.full((count, chain.cache.shape[1] + 3, chain.cache.shape[2]), np.nan, chain.cache.dtype)  # another stride too
    prefixes = np.empty_like(chain.prefixes)
    for i, position in enumerate(chain.positions):
        depth = int(harness.rng.integers(1, min(MAX_PATH, position + 1) + 1))
        prefix = int(position) + 1 - depth
        nodes = np.sort(harness.rng.permutation(MAX_NODES)[:depth])
        prefixes[i], paths[i, :depth] = prefix, nodes
        cache[slabs[i], :prefix] = chain.cache[i, :prefix]
        cache[slabs[i], prefix + nodes] = chain.cache[i, prefix : position + 1]
    return replace(chain, sequences=slabs.astype(np.int32), prefixes=prefixes, paths=paths, cache=cache)


def _attend(harness: Harness, rows: Rows, heads: int) -> tuple[Array, Array, Array]:
    """The kernel's (values [M, S, heads, latent], max [M, S, heads], sum): poison, seen to be whole, where a row has no such split."""
    p, count, longest = harness.p, len(rows.positions), int(rows.positions.max()) + 1
    splits = p.splits.count(longest) + 1  # one more than needed, which must stay untouched
    wgmma = harness.kernel.template == WGMMA_ATTENTION
    shape = (guard(count), p.heads, splits) if wgmma else (guard(count), splits, p.heads)
    values = harness.poisoned("bf16" if wgmma else "f32", guard(count), splits, p.heads, p.kv_lora)
    outputs = {"split_values": values, "split_max": harness.poisoned("f32", *shape), "split_sum": harness.poisoned("f32", *shape)}
    cache = PagedCache(harness, rows.cache[None], harness.plan.key_tiles)
    sequences = cache.sequences[rows.sequences]
    if wgmma:
        seen = {"schedules": drawn_schedules(harness, sequences, rows.positions, rows.prefixes)}
    else:
        meta = {"row_sequence": sequences, "row_position": rows.positions, "row_prefix": rows.prefixes}
        seen = {"num_tokens": np.array([count], np.int32), **meta}
    harness.launch(
        Grid(count, longest, replaced={1: -(-heads // _heads_a_block(harness))}),
        row_path=harness.input(rows.paths),
        query=harness.input(rows.query),
        kv_cache=cache.device,
        max_splits=splits,
        **cache.arguments,
        **harness.inputs(seen),
        **outputs,
    )
    live = np.zeros((guard(count), splits), bool)
    for i, position in enumerate(rows.positions):
        live[i, : p.splits.of(position) + 1] = True
    results = []
    for name, array in outputs.items():
        got = harness.read(array)
        if wgmma:
            got = in_pieces(got) if array is values else got.transpose(0, 2, 1)
        harness.findings.untouched(f"{name} of splits that a row does not have", got[~live])
        harness.findings.untouched(f"{name} of other heads", got[:, :, heads:])
        # the number of splits follows from the longest row; what every launch may have
        full = poison(array.dtype, count, p.splits.count(max(*CONTEXTS, *LONG_CONTEXTS, longest)) + 1, *got.shape[2:])
        full[:, :splits] = got[:count]
        results.append(full[:, :, :heads])
    harness.release()
    return results[0], results[1], results[2]


def in_pieces(values: Array) -> Array:
    """[…, latent] as mla_attention_wgmma stores it, or back: of each 32 columns, the 4 pieces of 16 bytes have a pair of every 8 each."""
    pieces = values.reshape(*values.shape[:-1], -1, 4, 4, 2)
    return pieces.swapaxes(-3, -2).reshape(values.shape)


def _compare_attention(harness: Harness, got: tuple[Array, Array, Array], rows: Rows, heads: int) -> None:
    """Each split of each row against float64, relative to the kernel's own maximum, which any value near the true one may be."""
    p = harness.p
    values, maxima, sums = got
    scale, unit = softmax_scale(p)
    for i, position in enumerate(rows.positions):
        keys = rows.cache[i, : position + 1].astype(np.float64)
        query = rows.query[i, :heads].astype(np.float64)
        scores = query @ keys.T * scale
        score_error = tolerances.dot(tolerances.terms_norm(query, keys), p.row) * scale + 2 * tolerances.EPS32 * np.abs(scores)
        for split in range(p.splits.of(int(position)) + 1):
            at = slice(p.splits.begin(split), min(p.splits.begin(split + 1), int(position) + 1))
            s, error, latent = scores[:, at], score_error[:, at], keys[at, : p.kv_lora]
            where = f"row {i} (position {position}) split {split}"
            largest = maxima[i, split].astype(np.float64) * unit
            expected_largest, either = largest_scores(s, error, p.slack * unit) if hasattr(p, "slack") else (s.max(axis=1), 0.0)
            harness.findings.close(f"split_max of {where}", largest, expected_largest, error.max(axis=1) + either)
            top = largest[:, None]
            e = np.exp(s - top)
            relative = tolerances.probabilities(error, top - s, s.shape[1])
            harness.findings.close(f"split_sum of {where}", sums[i, split], e.sum(axis=1), (e * relative).sum(axis=1))
            off = (e * relative) @ np.abs(latent) + tolerances.dot(tolerances.terms_norm(e, latent.T), s.shape[1])
            if harness.act == "bf16":
                off = off + tolerances.bf16_average(tolerances.terms_norm(e, latent.T), e @ np.abs(latent))
            expected = e @ latent
            stored = tolerances.stored(expected, "bf16" if values.dtype != np.float32 else "float")
            harness.findings.close(f"split_values of {where}", values[i, split], expected, off + stored)


def largest_scores(scores: Array, error: Array, slack: float) -> tuple[Array, Array]:
    """What probabilities of scores [heads, keys] are relative to, tile by tile of keys: a largest score, left alone until one is above it
    by more than ``slack``; and by how much it may be another, where that one is as near to ``slack`` as ``error`` [heads, keys].
    """
    largest, either = np.full(len(scores), -np.inf), np.zeros(len(scores))
    for first in range(0, scores.shape[1], WGMMA_TILE):
        now, off = (each[:, first : first + WGMMA_TILE].max(axis=1) for each in (scores, error))
        either = np.where(np.abs(now - largest - slack) <= 2 * off, slack, either)
        largest = np.where(now > largest + slack, now, largest)
    return largest, either


@for_template(CHECKS, ["row_groups.cu.j2"])
def check_row_groups(harness: Harness) -> None:
    """Full groups, then what is left, then none; more groups than a warp has lanes."""
    groups, most = 40, harness.p.rows
    for count in (*harness.tokens, most - 1, most, most + 1, 35 * most + 2, groups * most):
        rows = harness.poisoned("i32", groups + 1)
        harness.launch(Grid(), num_tokens=harness.integer(count), group_rows=rows, groups=groups)
        got = harness.read(rows)
        harness.findings.equal(f"group_rows of {count}", got[:groups], np.clip(count - np.arange(groups) * most, 0, most))
        harness.findings.untouched("group_rows beyond the last", got[groups:])
        harness.release()
