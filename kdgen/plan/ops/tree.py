"""Draft trees: candidates of each depth, the best-first tree, its rows, the walk through it and the compaction of what was accepted."""

from __future__ import annotations

from dataclasses import dataclass

from kdgen.plan.ir import MAX_CANDIDATES, MAX_NODES, MAX_PATH, ONE, Cost, Extent, Kernel
from kdgen.plan.ops.op import (
    ROW_EXTENT,
    SEQUENCE_EXTENT,
    Argument,
    Op,
    buffer,
    number,
    page_table,
    reads,
    reads_floats,
    reads_ints,
    writes,
    writes_ints,
)
from kdgen.plan.tuning import CType, block_for


@dataclass(frozen=True)
class TopKParts:
    """Context of top_k_parts.cu.j2."""

    name: str
    vocab: int
    max_path: int
    max_candidates: int
    lane_tokens: int
    block: int


@dataclass(frozen=True)
class TopK:
    """Context of top_k.cu.j2."""

    name: str
    vocab: int
    max_path: int
    max_candidates: int
    parts: int
    block: int


@dataclass(frozen=True)
class TreeBuild:
    """Context of tree_build.cu.j2."""

    name: str
    max_nodes: int
    max_path: int
    max_candidates: int


@dataclass(frozen=True)
class TreeRows:
    """Context of tree_rows.cu.j2."""

    name: str
    max_nodes: int
    max_path: int
    block: int


@dataclass(frozen=True)
class TreeAccept:
    """Context of tree_accept.cu.j2."""

    name: str
    max_nodes: int
    max_path: int


@dataclass(frozen=True)
class KvCompact:
    """Context of kv_compact.cu.j2."""

    name: str
    row: int
    max_path: int
    act: CType
    tiled: bool
    block: int


def top_k_part(vocab: int) -> tuple[int, int]:
    """Threads of a block of top_k_parts, and tokens of each. Small vocabularies have small parts, so that their tests see several; the
    largest have 128, whose candidates fit a block's shared memory."""
    return (256, max(10, -(-vocab // (256 * 128)))) if vocab >= 8192 else (64, 2)


def top_k_part_size(vocab: int) -> int:
    block, lane_tokens = top_k_part(vocab)
    return block * lane_tokens


def top_k_parts(vocab: int) -> int:
    return -(-vocab // top_k_part_size(vocab))


#: For each place of the step, ``struct DraftShape``.
_DRAFT_SHAPE = reads("DraftShape", "draft_shape")


@dataclass(frozen=True)
class TopKPartsOp(Op):
    """The candidates of each part of the vocabulary, for every draft row, and what the row's softmax needs of the part."""

    def kernel(self) -> Kernel:
        vocab, (block, lane_tokens) = self.c.whole.vocab_size, top_k_part(self.c.whole.vocab_size)
        p = TopKParts("top_k_parts", vocab, MAX_PATH, MAX_CANDIDATES, lane_tokens, block)
        grid = (ROW_EXTENT, Extent(top_k_parts(vocab)), SEQUENCE_EXTENT)
        return Kernel(
            p.name, "top_k_parts.cu.j2", p, block, grid, 0, Cost(bytes_per_row=4 * vocab, operations_per_row=2 * vocab),
            "candidates of each part",
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        logits = reads("float", "logits", buffer("draft_logits"))
        return *reads_ints("step_count"), _DRAFT_SHAPE, logits, writes("int2", "part_candidates"), writes("float2", "part_sums")


@dataclass(frozen=True)
class TopKOp(Op):
    """The candidates of each draft row, best first, and their log probabilities."""

    def kernel(self) -> Kernel:
        vocab, parts = self.c.whole.vocab_size, top_k_parts(self.c.whole.vocab_size)
        smem = (parts * (MAX_CANDIDATES + 1) + MAX_CANDIDATES) * 8
        p = TopK("top_k", vocab, MAX_PATH, MAX_CANDIDATES, parts, 256)
        grid, cost = (ROW_EXTENT, SEQUENCE_EXTENT, ONE), Cost(bytes_per_row=parts * (8 * MAX_CANDIDATES + 8))
        return Kernel("top_k", "top_k.cu.j2", p, 256, grid, smem, cost, "candidates of each draft row")

    def arguments(self) -> tuple[Argument, ...]:
        return (
            *reads_ints("step_count"),
            _DRAFT_SHAPE,
            reads("int2", "part_candidates"),
            reads("float2", "part_sums"),
            writes("int", "candidate_tokens"),
            writes("float", "candidate_log_probs"),
        )


@dataclass(frozen=True)
class TreeBuildOp(Op):
    """The best-first draft tree of each sequence, from its candidates."""

    def kernel(self) -> Kernel:
        p, grid = TreeBuild("tree_build", MAX_NODES, MAX_PATH, MAX_CANDIDATES), (SEQUENCE_EXTENT, ONE, ONE)
        return Kernel(
            "tree_build", "tree_build.cu.j2", p, 32, grid, 0, Cost(bytes_per_row=20), "best-first draft tree", group="tree",
            timing="in steps",
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        return (
            *reads_ints("step_count step_sequence"),
            _DRAFT_SHAPE,
            *reads_ints("candidate_tokens"),
            *reads_floats("candidate_log_probs"),
            *reads_ints("root_token"),
            *writes_ints("tree_size tree_token tree_parent tree_depth"),
        )


@dataclass(frozen=True)
class TreeRowsOp(Op):
    """Where each node of the step's trees stands, and its path."""

    def kernel(self) -> Kernel:
        p, cost = TreeRows("tree_rows", MAX_NODES, MAX_PATH, 64), Cost(bytes_per_row=20 + MAX_PATH * 4)
        return Kernel(
            "tree_rows", "tree_rows.cu.j2", p, 64, (SEQUENCE_EXTENT, ONE, ONE), 0, cost, "row metadata of trees", group="tree",
            timing="in steps",
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        return (
            *reads_ints("step_count step_sequence"),
            *writes_ints("step_begin"),
            *reads_ints("tree_size tree_token tree_parent tree_depth sequence_length"),
            *writes_ints("num_tokens tokens row_sequence row_position row_prefix row_slot row_path"),
        )


@dataclass(frozen=True)
class TreeAcceptOp(Op):
    """The walk from each root along the tokens that the target chose; the path and the token behind it are committed."""

    def kernel(self) -> Kernel:
        p, grid = TreeAccept("tree_accept", MAX_NODES, MAX_PATH), (SEQUENCE_EXTENT, ONE, ONE)
        return Kernel(
            "tree_accept", "tree_accept.cu.j2", p, 32, grid, 0, Cost(bytes_per_row=12), "greedy walk through each tree", group="accept",
            timing="in steps",
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        tree = reads_ints("step_count step_sequence step_begin tree_size tree_token tree_parent next_token")
        return *tree, *writes_ints("accepted_count accepted_nodes accepted_tokens sequence_length root_token")


@dataclass(frozen=True)
class KvCompactOp(Op):
    """Cache rows of the accepted nodes, in every layer, moved to the positions of their tokens."""

    def kernel(self) -> Kernel:
        s, mode = self.c.spec, self.c.mode
        block = block_for(s.cache_row_dim, 128)
        p = KvCompact("kv_compact", s.cache_row_dim, MAX_PATH, mode.act, mode.wgmma, block)
        grid = (Extent(s.num_hidden_layers), Extent(-(-s.cache_row_dim // block)), SEQUENCE_EXTENT)
        cost = Cost(bytes_per_row=2 * s.num_hidden_layers * s.cache_row_dim * mode.act_bytes)
        return Kernel(
            "kv_compact", "kv_compact.cu.j2", p, block, grid, 0, cost, "accepted cache rows to their positions", group="accept",
            timing="in steps",
        )  # fmt: skip

    def arguments(self) -> tuple[Argument, ...]:
        return (
            *reads_ints("step_count step_begin accepted_count accepted_nodes row_sequence row_prefix"),
            writes(self.c.mode.act, "kv_cache"),
            *page_table(self.c.limits),
            number("layer_pages", self.c.limits.pool_pages),
        )
