"""What the blocks of attention on wgmma do: groups of rows, and a schedule of work items for each block, written once a step."""

from __future__ import annotations

from dataclasses import dataclass

from kdgen.plan.attention import (
    ATTENTION_ROWS,
    WGMMA_SPLIT_TILES,
    WGMMA_START_TILES,
    attention_splits,
    max_work_items,
    schedule_bytes,
    wgmma_blocks,
    wgmma_group,
)
from kdgen.plan.ir import ONE, Arg, Cost, Extent, Kernel
from kdgen.plan.key_splits import Splits
from kdgen.plan.ops.op import (
    Argument,
    Context,
    Op,
    buffer,
    number,
    reads,
    reads_ints,
    writes,
)
from kdgen.spec.model import Spec


@dataclass(frozen=True)
class AttentionSchedule:
    """Context of attention_schedule.cu.j2. Its tiles of heads hold one token row each, whose start costs nothing beside."""

    name: str
    splits: Splits
    split_tiles: int
    max_workers: int
    max_items: int
    schedule_bytes: int

    @property
    def group(self) -> int:
        return 1

    @property
    def start_tiles(self) -> int:
        return 0


@dataclass(frozen=True)
class AttentionScheduleOfGroups:
    """Context of attention_schedule_of_groups.cu.j2."""

    name: str
    splits: Splits
    group: int
    start_tiles: int
    split_tiles: int
    max_workers: int
    max_items: int
    schedule_bytes: int


@dataclass(frozen=True)
class RowGroups:
    """Context of row_groups.cu.j2."""

    name: str
    rows: int


@dataclass(frozen=True)
class RowGroup:
    """The rows of one attention launch: all of a step's, or the ``index``-th of ``groups`` groups of ``rows``."""

    index: int | None = None
    rows: int = 0
    groups: int = 1

    @property
    def first(self) -> int:
        return (self.index or 0) * self.rows

    def count(self) -> Argument:
        return reads("int", "num_tokens", buffer("num_tokens") if self.index is None else buffer("group_rows", 4 * self.index))

    def at(self, name: str, row_bytes: int = 4) -> Arg:
        """The buffer ``name`` from this group's first row on."""
        return buffer(name, self.first * row_bytes)

    def schedule(self, spec: Spec) -> Arg:
        return buffer("attention_schedule", (self.index or 0) * wgmma_blocks(spec) * schedule_bytes(spec))


EVERY_ROW = RowGroup()


@dataclass(frozen=True)
class RowGroupsOp(Op):
    """How many token rows each attention launch has."""

    groups: int

    def kernel(self) -> Kernel:
        p = RowGroups("row_groups", ATTENTION_ROWS[self.c.spec.kv_lora_rank])
        return Kernel("row_groups", "row_groups.cu.j2", p, 32, (ONE, ONE, ONE), 0, Cost(), "token rows of each attention launch")

    def arguments(self) -> tuple[Argument, ...]:
        return *reads_ints("num_tokens"), writes("int", "group_rows"), number("groups", self.groups)


def attention_blocks(c: Context) -> Extent:
    """Blocks of a launch on wgmma: no more than there are splits."""
    return Extent(per_tokens=1, per_context=attention_splits(c.spec, c.mode).shortest, cap=wgmma_blocks(c.spec))


@dataclass(frozen=True)
class AttentionScheduleOp(Op):
    """Which rows and splits each block of attention on wgmma works on."""

    group: RowGroup = EVERY_ROW

    def kernel(self) -> Kernel:
        s = self.c.spec
        name, splits, group, workers = "attention_schedule", attention_splits(s, self.c.mode), wgmma_group(s), wgmma_blocks(s)
        grid, summary = (attention_blocks(self.c), ONE, ONE), "rows and splits of each attention block"
        if group > 1:
            of_groups = AttentionScheduleOfGroups(
                name, splits, group, WGMMA_START_TILES, WGMMA_SPLIT_TILES, workers, max_work_items(s), schedule_bytes(s)
            )
            return Kernel(name, "attention_schedule_of_groups.cu.j2", of_groups, 32, grid, 0, Cost(), summary)
        p = AttentionSchedule(name, splits, WGMMA_SPLIT_TILES, workers, max_work_items(s), schedule_bytes(s))
        return Kernel(name, "attention_schedule.cu.j2", p, 32, grid, 0, Cost(), summary)

    def arguments(self) -> tuple[Argument, ...]:
        group = self.group
        return (
            group.count(),
            *(reads("int", name, group.at(name)) for name in ("row_sequence", "row_position", "row_prefix")),
            writes("Schedule", "schedules", group.schedule(self.c.spec)),
            number("first_row", group.first),
        )
