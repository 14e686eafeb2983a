"""Mutants of loops that small models run once or never, of ranks, and of what a GPU alone runs."""

from __future__ import annotations

from tests.mutants.mutant import seen_by, tested_by

SIZES = [
    *seen_by(
        "sizes",
        "templates/lib/argmax.cuh.j2",
        ("tiny f32, requests together",),
        ("a pass leaves a vector out", "first += VECTORS_IN_FLIGHT * BLOCK * VECTOR", "first += (VECTORS_IN_FLIGHT + 1) * BLOCK * VECTOR"),
    ),
    *seen_by(
        "sizes",
        "templates/kernels/top_k_parts.cu.j2",
        ("tiny f32, requests together",),
        ("the last warp's sum is left out", "w < WARPS; ++w) total += warp_value[w];", "w < WARPS - 1; ++w) total += warp_value[w];"),
    ),
    *seen_by(
        "sizes",
        "templates/kernels/sample.cu.j2",
        ("tiny f32, requests together",),
        (
            "draws of the upper warps are not looked at",
            "  for (int w = 0; w < WARPS; ++w)\n    if (float_scratch[w] > best",
            "  for (int w = 0; w < WARPS / 2; ++w)\n    if (float_scratch[w] > best",
        ),
        (
            "tied tokens are counted in the first pass alone",
            "for (int i = threadIdx.x; i < middle; i += BLOCK) count +=",
            "for (int i = threadIdx.x; i < min(middle, BLOCK); i += BLOCK) count +=",
        ),
    ),
    *seen_by(
        "sizes",
        "templates/lib/rmsnorm.cuh.j2",
        ("tiny f32, requests together",),
        (
            "later rounds have the first one's weights",
            "    const int i = (r * BLOCK + {{ thread }}) * VECTOR;\n    if (i >= WIDTH) continue;\n{% if p.vector == 4 %}",
            "    const int i = {{ thread }} * VECTOR;\n    if (i >= WIDTH) continue;\n{% if p.vector == 4 %}",
        ),
    ),
    *seen_by(
        "sizes",
        "templates/lib/router_topk.cuh.j2",
        ("tiny f32, requests together",),
        ("experts beyond the 256th have its logit", "min(i * 32 + lane, EXPERTS - 1)", "min(i * 32 + lane, min(EXPERTS, 256) - 1)"),
    ),
    *seen_by(
        "sizes",
        "templates/kernels/attention_schedule.cu.j2",
        ("tiny f32, requests together",),
        ("a block that is left over takes one row", "row += blocks - dealt)", "row += blocks)"),
    ),
    *seen_by(
        "sizes",
        "templates/kernels/moe_sort.cu.j2",
        ("tiny f32, requests together",),
        ("the last assignments are no warp's", "((total + WARPS - 1) / WARPS + 31) / 32 * 32", "(total / WARPS + 31) / 32 * 32"),
    ),
    *seen_by(
        "sizes",
        "templates/lib/moe_sort.cuh.j2",
        ("tiny f32, requests together",),
        ("the second tile is listed twice", "    if (total > TILE) {  // else", "    if (total > 2 * TILE) {  // else"),
    ),
    *seen_by(
        "sizes",
        "templates/kernels/mla_combine.cu.j2",
        ("tiny f32, requests together",),
        ("a second chunk goes on behind the last split", "min(CHUNK, splits - chunk)", "min(CHUNK, splits)"),
    ),
    *seen_by(
        "sizes",
        "templates/kernels/mla_combine_wgmma.cu.j2",
        ("tiny f32, requests together",),
        ("later chunks begin with the values there are", "if (batch > 0) load_parts(batch);", "if (batch > chunk) load_parts(batch);"),
    ),
    *seen_by(
        "sizes",
        "templates/kernels/tree_build.cu.j2",
        ("tiny f32, kernels under the checker",),
        ("room for one open candidate a node", "MAX_OPEN = 2 * MAX_NODES;", "MAX_OPEN = MAX_NODES;"),
    ),
    *seen_by(
        "sizes",
        "kdgen/weights/formats.py",
        ("tiny-int4 bf16, requests together", "tiny bf16, requests together", "tiny f32, requests together"),
        ("a part behind the first array begins anew", "offset += len(array)", "offset += len(part)"),
    ),
    *tested_by(
        "sizes",
        "kdgen/weights/formats.py",
        "tests/unit/test_pack.py",
        ("high scales of later tiles are the first ones'", "= high_scales[at : at + count]", "= high_scales[:count]"),
    ),
]

RANKS = [
    *seen_by(
        "ranks",
        "templates/kernels/rank_sum.cu.j2",
        ("2 ranks", "3 ranks", "4 ranks"),
        ("ranks are summed from the last on", "sum += gathered[(size_t)rank * rows", "sum += gathered[(size_t)(RANKS - rank) * rows"),
    ),
    *seen_by(
        "ranks",
        "templates/kernels/peer_sum.cu.j2",
        ("2 ranks", "3 ranks", "4 ranks"),
        (
            "a sum begins with the rank's own part",
            "    sum = parts[0][0];\n#pragma unroll\n    for (int rank = 1; rank < RANKS; ++rank) sum += parts[rank][0];",
            "    sum = mine;\n#pragma unroll\n    for (int rank = 1; rank < RANKS; ++rank) sum += parts[(my_rank + rank) % RANKS][0];",
        ),
    ),
    *seen_by(
        "ranks",
        "templates/kernels/peer_sum_norm.cu.j2",
        ("2 ranks", "3 ranks", "4 ranks"),
        (
            "ranks are summed from the last on",
            "for (int rank = 1; rank < RANKS; ++rank) sum += parts[rank][r]",
            "for (int rank = RANKS - 1; rank > 0; --rank) sum += parts[rank][r]",
        ),
    ),
    *seen_by(
        "ranks",
        "templates/kernels/peer_gather.cu.j2",
        ("2 ranks", "3 ranks", "4 ranks"),
        ("blocks of a row share its round", "rounds + token_row * gridDim.y + blockIdx.y;", "rounds + token_row * gridDim.y;"),
    ),
    *seen_by(
        "ranks",
        "templates/lib/inbox.cuh.j2",
        ("2 ranks", "3 ranks", "4 ranks"),
        ("turns overlap", "place(number % 2 * RANKS * from_rank", "place(number % 2 * from_rank"),
    ),
    *seen_by(
        "ranks",
        "kdgen/plan/passes.py",
        ("2 ranks", "3 ranks", "4 ranks"),
        ("several ranks have no bias of the output", "op.bias if isinstance(op, LinearOp) else None", "None"),
    ),
    *seen_by(
        "ranks",
        "kdgen/plan/ops/logits.py",
        ("2 ranks", "3 ranks", "4 ranks"),
        (
            "ids of a rank's part begin where another's do",
            'number("first_token", self.c.shard.rank * self.c.spec.vocab_size), writes("int", "choice")',
            'number("first_token", (self.c.shard.ranks - 1 - self.c.shard.rank) * self.c.spec.vocab_size), writes("int", "choice")',
        ),
    ),
    *tested_by(
        "ranks",
        "kdgen/plan/ops/ranks.py",
        "tests/unit/test_plan.py",
        (
            "an inbox of logits lies by the step's rows",
            '"inbox_logits", "inbox_rows", self.most)',
            '"inbox_logits", "inbox_rows", self.c.limits.max_rows)',
        ),
    ),
    *seen_by(
        "ranks",
        "kdgen/plan/weights.py",
        ("2 ranks", "3 ranks", "4 ranks"),
        ("every rank has the first columns", "Part(1, shard.rank, shard.ranks)", "Part(1, 0, shard.ranks)"),
    ),
    *seen_by(
        "ranks",
        "kdgen/plan/shard.py",
        ("2 ranks", "3 ranks", "4 ranks"),
        ("a drafter's key heads need not divide", "draft.num_key_value_heads % ranks:", "draft.num_attention_heads % ranks:"),
    ),
    *seen_by(
        "ranks",
        "kdgen/runtime/rounds.py",
        ("rounds of every kind",),
        ("each rank goes by its own costs", "return self.engine.backend.agreed(self._costs)", "return self._costs"),
    ),
]

PRIMITIVES = [
    *seen_by(
        "gpu",
        "templates/lib/gpu/primitives.cuh",
        ("primitives",),
        (
            "bf16x2_lo: bits not shifted",
            "float bf16x2_lo(u32 w) { return __uint_as_float(w << 16); }",
            "float bf16x2_lo(u32 w) { return __uint_as_float(w & 0xffffu); }",
        ),
        ("mma from zero: b swapped", '"r"(b[0]), "r"(b[1]), "f"(0.0f)', '"r"(b[1]), "r"(b[0]), "f"(0.0f)'),
        (
            "ld_global_nc_8: words swapped",
            'asm("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}',
            'asm("ld.global.nc.L1::no_allocate.v2.u32 {%1,%0}',
        ),
        (
            "cp_async_wait_group: one group too many may be under way",
            '"cp.async.wait_group %0;" ::"n"(N)',
            '"cp.async.wait_group %0;" ::"n"(N + 1)',
        ),
        (
            "warp_sum: from neighbours on",
            "float warp_sum(float v) {\n#pragma unroll\n  for (int offset = 16; offset > 0; offset >>= 1)",
            "float warp_sum(float v) {\n#pragma unroll\n  for (int offset = 1; offset < 32; offset <<= 1)",
        ),
        (
            "send_each: the first block gets nothing",
            "for (u32 block = 0; block < blocks; ++block)",
            "for (u32 block = 1; block < blocks; ++block)",
        ),
        ("swizzled: four rows alike", "(piece ^ (row & 7))", "(piece ^ (row & 3))"),
        ("evict_first_policy: kept longest", "0x12f0000000000000", "0x14f0000000000000"),
    ),
    *tested_by(
        "gpu",
        "kdgen/backends/cuda_launch.py",
        "tests/unit/test_cuda_calls.py",
        ("recorded contexts are rounded down", "return -(-context // step) * step", "return max(step, context // step * step)"),
        ("a cluster's every block has all threads", "launch.block // blocks, launch.smem", "launch.block, launch.smem"),
        ("a kernel behind a collective starts early", " and not after_collective", ""),
        (
            "a slot is posted to before it was taken",
            "self._posted - self._taken == self._slots",
            "self._posted - self._taken > self._slots",
        ),
        ("shared memory a percent short", "-(-100 * needed // of_processor)", "100 * needed // of_processor"),
    ),
]
