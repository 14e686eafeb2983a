"""Checks of what attention's blocks are told to do: attention_shares, and shares drawn at random for attention itself."""

from __future__ import annotations

import itertools
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.plan.attention import ATTENTION_ROWS
from kdgen.plan.ir import MAX_PATH
from kdgen.verify.kernels.harness import SURPLUS_ROWS, Bench, Registry, for_template, poison

Array = NDArray[Any]

CHECKS: Registry = {}
LONGEST = 320  #: keys, for small models: several splits of each length
LEFT_OVER = 4  #: blocks of which one can be left over for three rows; models of many heads may have fewer


@dataclass(frozen=True)
class Visit:
    """What attention_shares tells a block, in its order: rows that see all keys of some splits."""

    row: int
    rows: int
    begin_split: int
    end_split: int
    sequence: int
    prefix: int
    keys: int
    old_keys: int


def drawn_shares(bench: Bench, sequences: Array, positions: Array, prefixes: Array) -> Array:
    """Some way to share rows' splits out among the blocks of attention, which none of a row's bits may follow from; for its kernel."""
    p, rng = bench.p, bench.rng
    blocks = bench.kernel.grid[0].value(len(positions) + SURPLUS_ROWS, int(positions.max()) + 1, 1, bench.backend.processors)
    whole: list[Visit] = []
    for first in range(0, len(positions), p.group):
        members = range(first, min(first + p.group, len(positions)))
        same = p.group > 1 and len(set(sequences[members])) == 1
        shared = p.splits.of(int(prefixes[members].min())) if same else 0
        places = [(first, len(members), 0, shared), *((row, 1, shared, p.splits.of(int(positions[row])) + 1) for row in members)]
        for row, count, begin, end in places:
            sequence, prefix, keys = int(sequences[row]), int(prefixes[row]), int(positions[row]) + 1
            if begin < end:
                whole.append(Visit(row, count, begin, end, sequence, prefix, keys, int(rng.integers(-1, min(prefix, keys)))))
    parts = []
    for visit in whole:  # some in two pieces, as long as there is room for them
        cut = int(rng.integers(visit.begin_split, visit.end_split)) if 2 * len(whole) <= blocks * p.visits else visit.begin_split
        parts += [replace(visit, begin_split=cut)] + ([replace(visit, end_split=cut)] if cut > visit.begin_split else [])
    block_of = rng.permutation(blocks * p.visits)[: len(parts)] % blocks
    found = poison("i32", blocks, 1 + 2 * p.visits, 4)
    for block in range(blocks):
        mine = [parts[i] for i in rng.permutation(np.flatnonzero(block_of == block))] or [Visit(0, 0, 0, 0, 0, 0, 0, 0)]
        found[block, 0] = len(mine)
        found[block, 1 : 1 + 2 * len(mine)] = np.array([astuple(visit) for visit in mine]).reshape(-1, 4)
    return found


@for_template(CHECKS, ["attention_shares.cu.j2"])
def check_attention_shares(bench: Bench) -> None:
    """Each split of each row is some block's once, and of none more than its share is, up to a split."""
    p = bench.p
    sequences, positions, prefixes, _ = grouped_rows(p, LONGEST)
    _check_shares(bench, sequences, positions, prefixes)
    edges = [p.splits.begin(split) + over for split in (1, 2, 5) for over in (-1, 0, 1)]
    for count in (*bench.tokens, ATTENTION_ROWS[bench.spec.kv_lora_rank]):
        alone = np.resize(np.array([*edges, 0, 20 * LONGEST]), count)
        _check_shares(bench, np.arange(count), alone, alone + 1)
        run, tree = LONGEST + np.arange(count), LONGEST + (np.arange(count) + 1) // 2
        _check_shares(bench, np.zeros(count, int), run, run + 1)
        _check_shares(bench, np.zeros(count, int), tree, np.full(count, LONGEST))
    for rows in range(1, 3):  # which have several blocks each
        for position in (5 * LONGEST, 20 * LONGEST, 20 * LONGEST + 70, 1 << 15, (1 << 15) + 70, (1 << 16) + 5000):
            _check_shares(bench, np.arange(rows), np.full(rows, position), np.full(rows, position + 1))
    blocks = bench.kernel.grid[0].cap or 0
    if p.group == 1 and blocks >= LEFT_OVER:
        _check_left_over_blocks(bench, blocks)
        # one block is left over, which cannot visit all rows
        most = np.full(blocks - 1, p.splits.begin(p.splits.of(1 << 15)) + 1)
        _check_shares(bench, np.arange(len(most)), most, most + 1)
        _check_full_visits(bench, blocks)


def _check_left_over_blocks(bench: Bench, blocks: int) -> None:
    """Blocks beyond those that each row has one of visit three rows' last splits: where they are short, and not where they are long."""
    p = bench.p
    short = p.splits.of(3 * (64 + 64) - 1) + 1
    last = np.array([p.splits.begin(short) + 1, p.splits.begin(3) - 1, p.splits.begin(short + 2) + 1])
    long = blocks // LEFT_OVER
    positions = last.repeat(long)
    found = _check_shares(bench, np.arange(len(positions)), positions, positions + 1)
    for block, visits in enumerate(found[len(positions) :]):
        rows = range(block, len(positions), blocks - len(positions))
        expected = [(row, p.splits.of(int(positions[row]))) for row in rows if row // long != 1]
        if [(visit.row, visit.begin_split) for visit in visits] != expected:
            bench.findings.problem(f"a block that is left over visits {visits}, not the last splits {expected}")


def _check_full_visits(bench: Bench, blocks: int) -> None:
    """The most rows whose last splits blocks that are left over have room to visit, and one row more; those splits are short enough."""
    p = bench.p
    position = p.splits.begin(p.splits.of((p.visits + 1) * (64 + 64) - 1) + 1)
    for room in (True, False):
        fitting = [count for count in range(blocks // 2 + 1, blocks) if (-(-count // (blocks - count)) <= p.visits) == room]
        if not fitting:
            continue  # so few blocks that none visits so many rows
        count = max(fitting) if room else min(fitting)
        positions = np.full(count, position)
        found = _check_shares(bench, np.arange(count), positions, positions + 1)
        if any(map(bool, found[count:])) != room:
            bench.findings.problem(f"blocks that {count} rows leave over visit {found[count:]}; room for so many: {room}")


def _check_shares(bench: Bench, sequences: Array, positions: Array, prefixes: Array) -> list[list[Visit]]:
    """The visits of each block, once they are seen to be right."""
    p, count, before = bench.p, len(positions), 3
    meta = [bench.input(values.astype(np.int32)) for values in (sequences, positions, prefixes)]
    context = int(positions.max()) + 1
    blocks = bench.kernel.grid[0].value(count + SURPLUS_ROWS, context, 1, bench.backend.processors)
    table = bench.poisoned("i32", blocks + 1, 1 + 2 * p.visits, 4)
    bench.launch(bench.integer(count), *meta, table, before, tokens=count, context=context)
    got = bench.read(table)
    bench.release()
    bench.findings.untouched("shares of blocks that are not there", got[blocks:])
    seen = [np.zeros(p.splits.of(int(position)) + 1, int) for position in positions]
    found: list[list[Visit]] = []
    for block in range(blocks):
        visits = int(got[block, 0, 0])
        if not 1 <= visits <= p.visits:
            bench.findings.problem(f"block {block} has {visits} visits")
            return found
        mine = [Visit(*map(int, each)) for each in got[block, 1 : 1 + 2 * visits].reshape(-1, 8)]
        bench.findings.untouched(f"visits of block {block} beyond its last", got[block, 1 + 2 * visits :])
        if mine == [Visit(0, 0, 0, 0, 0, 0, 0, 0)]:
            mine = []
        found.append(mine)
        for visit in found[-1]:
            rows = list(range(visit.row, visit.row + visit.rows))
            where = f"of row {visit.row} in block {block}"
            if not 0 <= visit.begin_split < visit.end_split or not 0 <= visit.row < visit.row + visit.rows <= count:
                bench.findings.problem(f"block {block} visits nothing: {visit}")
                return found
            bench.findings.equal(f"sequence {where}", np.full(visit.rows, visit.sequence), sequences[rows])
            bench.findings.equal(f"prefix {where}", np.array(visit.prefix), prefixes[visit.row])
            bench.findings.equal(f"old keys {where}", np.array(visit.old_keys), positions[visit.row] - before - visit.row)
            end = p.splits.begin(visit.end_split)
            if visit.rows == 1:
                bench.findings.equal(f"end of keys {where}", np.array(min(visit.keys, end)), min(positions[visit.row] + 1, end))
            elif visit.keys < end or prefixes[rows].min() < end:
                bench.findings.problem(f"not all rows see whole what they share: {visit}")
            for row in rows:
                seen[row][visit.begin_split : visit.end_split] += 1
    for row, times in enumerate(seen):
        bench.findings.equal(f"how often splits of row {row} are some block's", times, np.ones_like(times))
    _check_balance(bench, found, positions)
    return found


def _check_balance(bench: Bench, found: list[list[Visit]], positions: Array) -> None:
    """No block has more work than its share of that of its rows and a split. Where a row has tiles of heads to itself, none has so much
    that it should have left what it was dealt last, its lowest split, to another block of the row.
    """
    p, blocks = bench.p, len(found)
    groups = -(-len(positions) // p.group)
    parts, together = max(1, blocks // groups), -(-groups // blocks)  # blocks of a group, groups of a block
    work = [sum(_work(bench, position + 1, 0, p.splits.of(int(position)) + 1)) for position in positions]
    splits = [
        [
            tiles
            for visit in sorted(visits, key=lambda v: v.begin_split)
            for tiles in _work(bench, visit.keys, visit.begin_split, visit.end_split)
        ]
        for visits in found
    ]
    longest = max((tiles for each in splits for tiles in each), default=0) if parts > 1 else 0
    # each part may start each list of a group's, what its rows share and what each sees beyond, and the split that it takes last one more
    starts = p.start_tiles * (p.group + 2) if parts > 1 else 0
    share = sum(sorted(work)[-p.group * together :]) // parts + longest + starts
    for block, each in enumerate(splits):
        if sum(each) > share:
            bench.findings.problem(f"block {block} has {sum(each)} tiles' work, where {share} would be enough")
    if p.group > 1 or parts == 1:
        return
    for row in range(groups):
        least = min(map(sum, splits[row * parts : (row + 1) * parts]))
        for part, each in enumerate(splits[row * parts : (row + 1) * parts]):
            if each and sum(each[1:]) > least:
                bench.findings.problem(f"part {part} of row {row} has splits of {each}, where another has {least} tiles' work in all")


def _work(bench: Bench, keys: int, begin_split: int, end_split: int) -> list[int]:
    """What a row's splits take, of ``keys`` keys in all, in tiles."""
    begins = [bench.p.splits.begin(split) for split in range(begin_split, end_split + 1)]
    return [-(-(min(end, keys) - begin) // 64) + bench.p.split_tiles for begin, end in itertools.pairwise(begins)]


def grouped_rows(p: Any, longest: int) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Sequences, positions, prefixes and paths of runs and trees of few sequences, whose rows share tiles."""
    group, bound = np.arange(p.group), p.splits.begin(p.splits.of(longest - 1))
    nodes = np.arange(2 * p.group - 1)  # so many rows fill a group wherever they begin
    # runs that fill a group, whose first rows see whole splits and nothing else, or a key less; rows in falling order; a tree of two
    # branches; a run that fills none
    length = bound + 3
    falling = np.linspace(longest - 1, 0, p.group)
    places = [bound - 1 + group, bound - 2 + group, falling, length + (nodes + 1) // 2, longest - 3 + np.arange(3)]
    sequences = np.repeat(np.arange(5, dtype=np.int32), [len(each) for each in places])
    positions = np.concatenate(places).astype(np.int32)
    most = len(positions)
    prefixes, paths = positions + 1, np.full((most, MAX_PATH), 1 << 20, np.int32)
    for node, row in enumerate(np.flatnonzero(sequences == 3)):  # node n is behind n - 2, nodes 1 and 2 behind the root
        depth = int(positions[row]) - length
        prefixes[row], paths[row, : depth + 1] = length, [0, *range(node - 2 * depth + 2, node + 1, 2)]
    return sequences, positions, prefixes, paths
