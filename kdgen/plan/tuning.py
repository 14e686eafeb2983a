"""How work is tiled, whatever it is: the compute dtype, warps that split inputs, rings of weights, blocks. By shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kdgen.plan.ir import Compute
from kdgen.spec.drafter import DraftSpec
from kdgen.spec.model import Spec

CType = Literal["float", "bf16"]  #: the C++ type of activations, cache rows, weights or outputs
SMS = 132  #: multiprocessors of an H200, which plans are tuned for

TOKEN_TILES = 4  # of 8 tokens: 32 tokens share one reading of the weights; more accumulators gain nothing at decode
#: Row tiles of a block that a reading of 9 to 32 tokens' inputs is for, which of 32 are twice a tile's weights. H200, µs of K2.6's o_proj
#: and lm_head, 1 or 4 tiles (2026-11-30): 16 rows 40 or 33, 679 or 553; 32 rows 68 or 37, 1,189 or 604; for 8 rows and fewer 1 to 3 % more.
ROW_TILES_AT_ONCE = 4
#: Tokens from which on a dense layer's inputs are loaded by lines. H200, a step of K2.6 cut to 5 layers, µs, by fragments or lines
#: (2026-11-30): 1 row 1,444 or 1,459, 5 rows 2,059 or 2,044, 8 rows 2,568 or 2,527.
MIN_TOKENS_FOR_LINES = 4
CHUNK_STEPS = 4  # of 8 tokens' inputs that are loaded together: whole lines of 128 bytes
CHUNKS_AHEAD = 3  # of them, on their way; with 2 or 4, or the loop over them unrolled, a step takes the same or 10 µs more
ROUTER_CHUNKS_AHEAD = 4  # beside weights in registers; with 2 the layer takes the same, with 7 registers spill
GENERIC_TOKENS = 8
HEAD_WARPS = 8  # of a block that holds row tiles of a head's weights
WEIGHT_STEPS_IN_REGISTERS = 16  # of a warp's weights, 4 registers each


@dataclass(frozen=True)
class Mode:
    """The compute dtype and what follows from it, and whether attention uses wgmma."""

    compute: Compute
    act: CType
    act_bytes: int
    weight: CType
    weight_bytes: int
    wgmma: bool = False


def mode_of(spec: Spec | DraftSpec, compute: Compute) -> Mode:
    """Tensor cores read bf16 weights; the generic path keeps the checkpoint's own type and widens in registers."""
    wide = compute == "f32" and spec.dtype == "float32"
    weight: tuple[CType, int] = ("float", 4) if wide else ("bf16", 2)
    return Mode(compute, "bf16", 2, *weight) if compute == "bf16" else Mode(compute, "float", 4, *weight)


def block_for(width: int, most: int = 256) -> int:
    """Threads for an elementwise pass over ``width``: whole warps, no more than it has work for."""
    return max(32, min(most, -(-width // 32) * 32))


CLUSTER = 8  #: most blocks of a cluster, which every GPU that has them runs


def cluster_of(block: int) -> int:
    """Blocks that ``block`` threads are divided among, whole warps each."""
    return next(blocks for blocks in (CLUSTER, 4, 2, 1) if block % (32 * blocks) == 0)


def column_blocks(width: int) -> int:
    """Blocks of an elementwise pass over a row of ``width``."""
    return -(-width // block_for(width))


def input_slices(cols: int) -> int:
    """Warps that split ``cols`` inputs in the generic kernels."""
    return 4 if cols >= 32 else 1


def mma_warps(cols: int) -> int:
    """Warps that split ``cols`` inputs evenly: at least 2 MMA steps each, 16 where they fill an SM by themselves, 8 below that, so that
    two blocks share an SM and rows are dealt out more evenly (H200, 2048 inputs, 8 rows: 9.8 µs instead of 10.8; 1 row the same).
    """
    steps = cols // 16
    most = 16 if steps >= 384 else 8 if steps >= 64 else 4 if steps >= 16 else 2 if steps >= 4 else 1
    return next(warps for warps in (16, 8, 4, 2, 1) if warps <= most and steps % warps == 0)


@dataclass(frozen=True)
class Ring:
    """How a warp streams its weights: ``slots`` stages of ``stage_steps`` MMA steps, all but one of them on their way."""

    stage_steps: int
    slots: int
    bytes: int  #: of one warp

    @property
    def comment(self) -> str:
        return f"{self.bytes} bytes a warp"


def dense_ring(steps: int) -> Ring:
    """4 KiB a warp: with 16 warps an SM, three quarters of that on their way are more than the latency of memory times its bandwidth.
    The ring goes on from one row tile to the next, so short rows do not shorten it. (On sm_90a 8 KiB would save 1 % of a decode step.)
    """
    stage_steps = next(n for n in (2, 1) if steps % n == 0)
    return Ring(stage_steps, 8 // stage_steps, 4096)


def blocks_per_sm(warps: int) -> int:
    """16 warps on an SM may have 128 registers a thread: the sums of 32 tokens and ROW_TILES_AT_ONCE, and what they are made of."""
    return min(12, 16 // warps)  # some targets hold 16 blocks


def register_steps(steps: int, most: int) -> int:
    """Whole rounds of a warp's ``steps`` of router weights, at most ``most`` of them in registers, 2 each."""
    return next(held for held in range(min(steps, most), 0, -1) if steps % held == 0)
