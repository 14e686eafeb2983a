"""Checks of the schedule that says what each block of attention works on, and schedules drawn at random for attention itself."""

from __future__ import annotations

import itertools
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.plan.attention import ATTENTION_ROWS
from kdgen.plan.ir import MAX_PATH
from kdgen.verify.kernels.harness import SURPLUS_ROWS, Grid, Harness, Registry, for_template, poison

Array = NDArray[Any]

CHECKS: Registry = {}
LONGEST = 320  #: keys, for small models: several splits of each length
LEFT_OVER = 4  #: blocks of which one can be left over for three rows; models of many heads may have fewer


@dataclass(frozen=True)
class WorkItem:
    """``struct WorkItem`` of schedule_format.cuh.j2, field by field: token rows, and splits of the keys that these rows see."""

    row: int
    rows: int
    begin_split: int
    end_split: int
    sequence: int
    prefix: int
    keys: int
    old_keys: int


def drawn_schedules(harness: Harness, sequences: Array, positions: Array, prefixes: Array) -> Array:
    """The splits of rows dealt out at random to the blocks of attention, for its kernel: no bit of a row may depend on who has which."""
    p, rng = harness.p, harness.rng
    blocks = harness.kernel.grid[0].value(len(positions) + SURPLUS_ROWS, int(positions.max()) + 1, 1, harness.backend.processors)
    whole: list[WorkItem] = []
    for first in range(0, len(positions), p.group):
        members = range(first, min(first + p.group, len(positions)))
        same = p.group > 1 and len(set(sequences[members])) == 1
        shared = p.splits.of(int(prefixes[members].min())) if same else 0
        places = [(first, len(members), 0, shared), *((row, 1, shared, p.splits.of(int(positions[row])) + 1) for row in members)]
        for row, count, begin, end in places:
            sequence, prefix, keys = int(sequences[row]), int(prefixes[row]), int(positions[row]) + 1
            if begin < end:
                whole.append(WorkItem(row, count, begin, end, sequence, prefix, keys, int(rng.integers(-1, min(prefix, keys)))))
    pieces = []
    for item in whole:  # some in two pieces, as long as there is room for them
        cut = int(rng.integers(item.begin_split, item.end_split)) if 2 * len(whole) <= blocks * p.max_items else item.begin_split
        pieces += [replace(item, begin_split=cut)] + ([replace(item, end_split=cut)] if cut > item.begin_split else [])
    block_of = rng.permutation(blocks * p.max_items)[: len(pieces)] % blocks
    found = poison("i32", blocks, 1 + 2 * p.max_items, 4)
    for block in range(blocks):
        mine = [pieces[i] for i in rng.permutation(np.flatnonzero(block_of == block))] or [WorkItem(0, 0, 0, 0, 0, 0, 0, 0)]
        found[block, 0] = len(mine)
        found[block, 1 : 1 + 2 * len(mine)] = np.array([astuple(item) for item in mine]).reshape(-1, 4)
    return found


@for_template(CHECKS, ["attention_schedule.cu.j2", "attention_schedule_of_groups.cu.j2"])
def check_attention_schedule(harness: Harness) -> None:
    """Each split of each row is one block's, and no block has more work than an equal part of it, up to a split."""
    p = harness.p
    sequences, positions, prefixes, _ = grouped_rows(p, LONGEST)
    _check_schedule(harness, sequences, positions, prefixes)
    edges = [p.splits.begin(split) + over for split in (1, 2, 5) for over in (-1, 0, 1)]
    for count in (*harness.tokens, ATTENTION_ROWS[harness.spec.kv_lora_rank]):
        alone = np.resize(np.array([*edges, 0, 20 * LONGEST]), count)
        _check_schedule(harness, np.arange(count), alone, alone + 1)
        run, tree = LONGEST + np.arange(count), LONGEST + (np.arange(count) + 1) // 2
        _check_schedule(harness, np.zeros(count, int), run, run + 1)
        _check_schedule(harness, np.zeros(count, int), tree, np.full(count, LONGEST))
    for rows in range(1, 3):  # which have several blocks each
        for position in (5 * LONGEST, 20 * LONGEST, 20 * LONGEST + 70, 1 << 15, (1 << 15) + 70, (1 << 16) + 5000):
            _check_schedule(harness, np.arange(rows), np.full(rows, position), np.full(rows, position + 1))
    blocks = harness.kernel.grid[0].cap or 0
    if p.group == 1 and blocks >= LEFT_OVER:
        _check_left_over_blocks(harness, blocks)
        # one block is left over, which cannot visit all rows
        most = np.full(blocks - 1, p.splits.begin(p.splits.of(1 << 15)) + 1)
        _check_schedule(harness, np.arange(len(most)), most, most + 1)
        _check_most_items(harness, blocks)


def _check_left_over_blocks(harness: Harness, blocks: int) -> None:
    """Blocks that are left over, when every row has equally many, take three rows' last splits: short ones, and no long ones."""
    p = harness.p
    short = p.splits.of(3 * (64 + 64) - 1) + 1
    last = np.array([p.splits.begin(short) + 1, p.splits.begin(3) - 1, p.splits.begin(short + 2) + 1])
    long = blocks // LEFT_OVER
    positions = last.repeat(long)
    found = _check_schedule(harness, np.arange(len(positions)), positions, positions + 1)
    for block, items in enumerate(found[len(positions) :]):
        rows = range(block, len(positions), blocks - len(positions))
        expected = [(row, p.splits.of(int(positions[row]))) for row in rows if row // long != 1]
        if [(item.row, item.begin_split) for item in items] != expected:
            harness.findings.problem(f"a remaining block has {items} instead of the last splits (row, split) {expected}")


def _check_most_items(harness: Harness, blocks: int) -> None:
    """As many rows as a block that is left over has items for, and one row more. Their last splits are short enough to be taken."""
    p = harness.p
    position = p.splits.begin(p.splits.of((p.max_items + 1) * (64 + 64) - 1) + 1)
    for room in (True, False):
        fitting = [count for count in range(blocks // 2 + 1, blocks) if (-(-count // (blocks - count)) <= p.max_items) == room]
        if not fitting:
            continue  # so few blocks that none can take so many rows
        count = max(fitting) if room else min(fitting)
        positions = np.full(count, position)
        found = _check_schedule(harness, np.arange(count), positions, positions + 1)
        if any(map(bool, found[count:])) != room:
            harness.findings.problem(f"blocks that {count} rows leave over have {found[count:]}; there are enough items: {room}")


def _check_schedule(harness: Harness, sequences: Array, positions: Array, prefixes: Array) -> list[list[WorkItem]]:
    """The work items of each block, after these have been checked."""
    p, count, before = harness.p, len(positions), 3
    meta = {"row_sequence": sequences, "row_position": positions, "row_prefix": prefixes}
    context = int(positions.max()) + 1
    blocks = harness.kernel.grid[0].value(count + SURPLUS_ROWS, context, 1, harness.backend.processors)
    table = harness.poisoned("i32", blocks + 1, 1 + 2 * p.max_items, 4)
    harness.launch(
        Grid(count, context), num_tokens=harness.integer(count), schedules=table, first_row=before,
        **harness.inputs({name: values.astype(np.int32) for name, values in meta.items()}),
    )  # fmt: skip
    got = harness.read(table)
    harness.release()
    harness.findings.untouched("schedules of blocks that are not there", got[blocks:])
    seen = [np.zeros(p.splits.of(int(position)) + 1, int) for position in positions]
    found: list[list[WorkItem]] = []
    for block in range(blocks):
        items = int(got[block, 0, 0])
        if not 1 <= items <= p.max_items:
            harness.findings.problem(f"block {block} has {items} work items, not 1 to {p.max_items}")
            return found
        mine = [WorkItem(*map(int, each)) for each in got[block, 1 : 1 + 2 * items].reshape(-1, 8)]
        harness.findings.untouched(f"work items of block {block} behind its last", got[block, 1 + 2 * items :])
        if mine == [WorkItem(0, 0, 0, 0, 0, 0, 0, 0)]:
            mine = []
        found.append(mine)
        for item in found[-1]:
            rows = list(range(item.row, item.row + item.rows))
            where = f"of row {item.row} in block {block}"
            if not 0 <= item.begin_split < item.end_split or not 0 <= item.row < item.row + item.rows <= count:
                harness.findings.problem(f"block {block} has an item without work: {item}")
                return found
            harness.findings.equal(f"sequence {where}", np.full(item.rows, item.sequence), sequences[rows])
            harness.findings.equal(f"prefix {where}", np.array(item.prefix), prefixes[item.row])
            harness.findings.equal(f"old keys {where}", np.array(item.old_keys), positions[item.row] - before - item.row)
            end = p.splits.begin(item.end_split)
            if item.rows == 1:
                harness.findings.equal(f"end of keys {where}", np.array(min(item.keys, end)), min(positions[item.row] + 1, end))
            elif item.keys < end or prefixes[rows].min() < end:
                harness.findings.problem(f"not all rows see whole what they share: {item}")
            for row in rows:
                seen[row][item.begin_split : item.end_split] += 1
    for row, times in enumerate(seen):
        harness.findings.equal(f"how often splits of row {row} are some block's", times, np.ones_like(times))
    _check_balance(harness, found, positions)
    return found


def _check_balance(harness: Harness, found: list[list[WorkItem]], positions: Array) -> None:
    """No block has more work than an equal part of that of its rows, and a split. Where a row has tiles of heads to itself, no block has
    so much that another block of the row should have got its lowest split, which is dealt out last.
    """
    p, blocks = harness.p, len(found)
    groups = -(-len(positions) // p.group)
    workers, together = max(1, blocks // groups), -(-groups // blocks)  # blocks of a group, groups of a block
    work = [sum(_work(harness, position + 1, 0, p.splits.of(int(position)) + 1)) for position in positions]
    splits = [
        [
            tiles
            for item in sorted(items, key=lambda each: each.begin_split)
            for tiles in _work(harness, item.keys, item.begin_split, item.end_split)
        ]
        for items in found
    ]
    longest = max((tiles for each in splits for tiles in each), default=0) if workers > 1 else 0
    # each worker may start with what a group's rows share and with each of the rows, and once more for the split that it takes last
    starts = p.start_tiles * (p.group + 2) if workers > 1 else 0
    most = sum(sorted(work)[-p.group * together :]) // workers + longest + starts
    for block, each in enumerate(splits):
        if sum(each) > most:
            harness.findings.problem(f"block {block} has {sum(each)} tiles' work, where {most} would be enough")
    if p.group > 1 or workers == 1:
        return
    for row in range(groups):
        least = min(map(sum, splits[row * workers : (row + 1) * workers]))
        for worker, each in enumerate(splits[row * workers : (row + 1) * workers]):
            if each and sum(each[1:]) > least:
                harness.findings.problem(
                    f"worker {worker} of row {row} has splits of {each} tiles, where another has {least} tiles of work in all"
                )


def _work(harness: Harness, keys: int, begin_split: int, end_split: int) -> list[int]:
    """What a row's splits take, of ``keys`` keys in all, in tiles."""
    begins = [harness.p.splits.begin(split) for split in range(begin_split, end_split + 1)]
    return [-(-(min(end, keys) - begin) // 64) + harness.p.split_tiles for begin, end in itertools.pairwise(begins)]


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
