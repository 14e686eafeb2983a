"""The mutants: where, what was right, what is wrong, what bug that is, and which part of ``kdgen verify`` should see it.

``right`` stands exactly once in its file. ``part`` is the part of the report (kdgen.verify.report.Check) that catches it first:
``kernel`` is one kernel against float64 and by bits in other companies, ``checker`` the race checker, ``together`` and ``decode``
whole models by bits, ``logits`` whole models against oracle or float64.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    right: str
    wrong: str
    bug: str
    part: str = "kernel"


def _in(template: str, *edits: tuple[str, str, str] | tuple[str, str, str, str]) -> list[Mutant]:
    """Mutants of one file from (bug, right, wrong, part)."""
    path = template if "/" in template else f"templates/kernels/{template}.cu.j2"
    stem = path.rpartition("/")[2].partition(".")[0]
    found = []
    for bug, right, wrong, *part in edits:
        found.append(Mutant(f"{stem}: {bug}", path, right, wrong, bug, *part))
    return found


TEMPLATES = [
    *_in(
        "advance",
        ("the root is the first row's choice", "next_token[step_begin[place + 1] - 1]", "next_token[step_begin[place]]"),
        ("grows by one token whatever the run", "+= step_begin[place + 1] - step_begin[place];", "+= 1;"),
    ),
    *_in(
        "argmax",
        ("ties to the higher id", "b.index < a.index", "b.index > a.index"),
        ("the last warp is left out", "w < WARPS; ++w) best", "w < WARPS - 1; ++w) best"),
        ("a rank's ids begin at 0", "first_token + best.index : best.index", "best.index : best.index"),
        (
            "no barrier before the warps are joined",
            "  __syncthreads();\n  if (threadIdx.x != 0) return;",
            "  if (threadIdx.x != 0) return;",
        ),
    ),
    *_in(
        "chain_rows",
        ("positions count the step's other rows", "sequence_length[sequence] + i - step_begin[place]", "sequence_length[sequence] + i"),
        ("a row's own key counts as a tree's", "row_prefix[i] = position + 1;", "row_prefix[i] = position;"),
        ("a run's first row goes to the sequence before", "step_begin[place + 1] <= i", "step_begin[place + 1] < i"),
    ),
    *_in(
        "draft_block",
        ("the root is masked", "index == 0 ? root_token[sequence] : MASK_TOKEN", "MASK_TOKEN"),
        (
            "a block's last row is not seen",
            "draft_begin[place + 1] - draft_begin[place] - 1;",
            "draft_begin[place + 1] - draft_begin[place] - 2;",
        ),
        ("a block's first row goes to the place before", "draft_begin[place + 1] <= row", "draft_begin[place + 1] < row"),
    ),
    *_in(
        "draft_capture",
        ("layers' features overlap", "place * HIDDEN + column", "place + column"),
        ("one token row too many", "token_row >= *num_tokens", "token_row > *num_tokens"),
    ),
    *_in(
        "draft_context",
        ("positions behind the committed", " - committed(place) + index", " + index"),
        ("ranks' parts go to what is there", "residual[(size_t)context_row * HIDDEN + i] = 0.0f;", "(void)residual;"),
        ("nodes taken as rows", "accepted_nodes[place * MAX_PATH + index]", "index"),
        ("runs of tokens lose their last", "step_begin[p + 1] - step_begin[p];", "step_begin[p + 1] - step_begin[p] - 1;"),
    ),
    *_in(
        "draft_heads",
        ("norm weight of the other half", "weight[i + HALF]", "weight[i]"),
        ("keys for values", "keys + KEY_HEADS * HEAD;", "keys;"),
        ("eps outside the root", "sqrtf(warp_sum(square_sum) / HEAD + EPS)", "(sqrtf(warp_sum(square_sum) / HEAD) + EPS)"),
        ("rotated the other way", "b * cos_row[i] + a * sin_row[i]", "b * cos_row[i] - a * sin_row[i]"),
    ),
    *_in(
        "gqa_attention",
        ("a window one too wide", "(ahead >= 0 && ahead < window)", "(ahead >= 0 && ahead <= window)"),
        ("a causal window sees ahead", "(ahead >= 0 && ahead < window)", "(ahead < window)"),
        ("a symmetric window sees everything ahead", "(ahead < window && -ahead < window)", "(ahead < window)"),
        ("a split too many before a window", "end_key <= oldest", "end_key < oldest"),
        ("the block's own keys are not seen", "end = start + block_rows;", "end = start;"),
        ("query heads of other groups", "key_head * GROUP + (first_row", "key_head + (first_row"),
        ("probabilities left at an older maximum", "values[v][r] *= shared->rescale[r]", "values[v][r] *= 1.0f"),
        ("no barrier before the scores", "    __syncthreads();\n    float dot", "    float dot"),
        (
            "no barrier before the values",
            "    __syncthreads();\n#pragma unroll\n    for (int v",
            "#pragma unroll\n    for (int v",
            "checker",
        ),
        ("values of the keys", "KEY_HEADS * HEAD + column;", "column;"),
    ),
    *_in(
        "gqa_combine",
        ("a split too many before a window", "max(start - window + 1, 0)", "max(start - window, 0)"),
        (
            "the last split is left out of the sum",
            "s <= last_split; ++s) {\n    const size_t i = row + (size_t)s * HEADS;\n    all_sum",
            "s < last_split; ++s) {\n    const size_t i = row + (size_t)s * HEADS;\n    all_sum",
        ),
        ("one token row too many", "token_row >= *num_tokens", "token_row > *num_tokens"),
    ),
    *_in(
        "embed",
        ("one token row too many", "if (token_row >= *num_tokens) return;", "if (token_row > *num_tokens) return;"),
        ("does not wait for the kernel before", "  wait_for_previous_kernel();\n", ""),
        (
            "lets the others read rows that are not there yet",
            "  wait_for_previous_kernel();\n  allow",
            "  begin_after_previous_kernel();\n  allow",
        ),
        ("a rank takes the token behind its last", "row < ROWS", "row <= ROWS"),
    ),
    *_in(
        "experts_f32",
        ("scale of the next group at a group's last input", "(k / GROUP) * ROWS", "((k + 1) / GROUP) * ROWS"),
        ("nibbles from the top", ">> (k % 8 * 4) & 15", ">> ((7 - k % 8) * 4) & 15"),
        ("zero point 7", "stored - 8", "stored - 7"),
        ("gate and up exchanged", "const float gate = (float)total;", "const float gate = (float)total_up;"),
        ("token rows by list place", "(assignments[begin + t] / ASSIGNMENTS_PER_X_ROW)", "((begin + t) / ASSIGNMENTS_PER_X_ROW)"),
        (
            "only the first tile of tokens",
            "begin < active_end[active]; begin += TOKENS",
            "begin < active_begin[active] + 1; begin += TOKENS",
        ),
        ("accumulators not cleared", "      sum[t] = 0.0f;\n", ""),
        (
            "no barrier before the next tokens",
            "    __syncthreads();  // before the next tokens overwrite the partial sums\n",
            "",
        ),
    ),
    *_in(
        "experts_mma",
        ("the next step's inputs are this one's", "step + 1 == WARP_STEPS ? 0 : step + 1, inputs[0]);  //", "step, inputs[0]);  //"),
        ("the offsets are all made from the first inputs", "inputs[i / PARTS].of[i % PARTS][0]);", "inputs[0].of[i % PARTS][0]);"),
        ("held inputs are all the first step's", "load_inputs(x, s, inputs[s]);", "load_inputs(x, 0, inputs[s]);"),
        ("reads inputs beyond an odd half", "      if (ODD_COLS && k >= COLS) break;\n", ""),
        ("wrong token column", "assignments[m] / ASSIGNMENTS_PER_X_ROW", "assignments[m % 4] / ASSIGNMENTS_PER_X_ROW"),
        ("every warp has the first one's inputs", "(threadIdx.x / 32 % WARPS * WARP_STEPS + step)", "step"),
        ("rows 8 to 15 get those of 0 to 7", "value += partial[t][s][i][lane];", "value += partial[t][s][i % 2][lane];"),
        ("gate and up exchanged", "value = gate / (1.0f + expf(-gate)) * up;", "value = up / (1.0f + expf(-up)) * gate;"),
        (
            "warps joined in another order for several tokens",
            "for (int s = 0; s < WARPS; ++s) value += partial[t][s][i][lane];",
            "for (int s = 0; s < WARPS; ++s) value += partial[t][count > 1 ? WARPS - 1 - s : s][i][lane];",
        ),
        (
            "second tiles of tokens read the first's",
            "multiply<1>(shared, weights, lists, x, assignments + first,",
            "multiply<1>(shared, weights, lists, x, assignments + begin,",
        ),
        (
            "no barrier before the warps are joined",
            "    barrier_of_warps(1 + group, GROUP);\n    store_tile",
            "    store_tile",
            "checker",
        ),
        (
            "sums come to where others are read",
            "if (BUFFERS == 1 || row_tile + GROUPS >= end_tile) barrier",
            "if (BUFFERS == 1) barrier",
            "checker",
        ),
        (
            "accumulators of rows 8 to 15 not cleared",
            "i < TILES * 4; ++i) sum[i / 4][i % 4] = 0.0f;",
            "i < TILES * 4; ++i) sum[i / 4][i % 2] = 0.0f;",
        ),
        (
            "units of the last block left out",
            "(int)(units * (blockIdx.x + 1) / gridDim.x)",
            "(int)(units * min(blockIdx.x + 1, gridDim.x - 1) / gridDim.x)",
        ),
        (
            "a group leaves an expert out",
            "tile >= row_tiles; tile -= row_tiles) ++active;",
            "tile >= row_tiles; tile -= row_tiles) active += 2;",
        ),
    ),
    *_in(
        "templates/lib/int4_tile.cuh.j2",
        ("scale of the neighbouring group", "part ? bf16x2_hi(step.scales.x) : bf16x2_lo(step.scales.x)", "bf16x2_lo(step.scales.x)"),
        (
            "scale of the row 8 above",
            "part ? bf16x2_hi(step.scales.y) : bf16x2_lo(step.scales.y)",
            "part ? bf16x2_hi(step.scales.x) : bf16x2_lo(step.scales.x)",
        ),
        ("zero point 7", "0xc308c308u", "0xc307c307u"),
        ("offset of half the inputs", "  mma_m16n8k16_bf16(offset, minus_136, b1);\n", ""),
        ("words of a part exchanged", "part ? step.nibbles.w : step.nibbles.y", "part ? step.nibbles.y : step.nibbles.w"),
        ("offset of the first two tokens", "kept[threadIdx.x % 4];", "kept[0];"),
    ),
    *_in(
        "templates/lib/expert_stream.cuh.j2",
        ("waits for one stage too few", "cp_async_wait<SLOTS - 2>();", "cp_async_wait<SLOTS - 1>();", "checker"),
        (
            "no wait between copying lanes and reading ones",
            "cp_async_wait<SLOTS - 2>();\n    __syncwarp();",
            "cp_async_wait<SLOTS - 2>();",
            "checker",
        ),
        ("reads the slot that is filled", "return ring[slot];", "return ring[(slot + SLOTS - 1) % SLOTS];"),
        ("a tile is read once for any number of tokens", "if (++reading == readings)", "if (true)"),
        ("streams the first expert's tiles", "(size_t)lists.active_expert[active]", "(size_t)lists.active_expert[0]"),
        (
            "the next tile is the neighbouring group's",
            "tile += GROUPS, source += GROUPS * TILE_BYTES;",
            "tile += GROUPS, source += TILE_BYTES;",
        ),
    ),
    *_in(
        "kv_compact",
        ("the last accepted row stays behind", "j < accepted_count[place]; ++j", "j < accepted_count[place] - 1; ++j"),
        ("from the end of the path", "int j = 1; j < accepted_count[place]; ++j", "int j = accepted_count[place] - 1; j > 0; --j"),
        ("slab by place in the step", "row_sequence[root];", "place;"),
        ("rows of the first layer alone", "(size_t)layer * max_sequences", "(size_t)0 * max_sequences"),
        ("the root's prefix of the step's first tree", "row_prefix[root]) * ROW", "row_prefix[0]) * ROW"),
    ),
    *_in(
        "linear_f32",
        ("no barrier before the slices are joined", "  __syncthreads();\n  if (n >= OUTPUTS) return;", "  if (n >= OUTPUTS) return;"),
        (
            "sums rounded between slices for several tokens",
            "total += partial[s][t][lane];",
            "total = count > 1 ? (float)(total + partial[s][t][lane]) : total + partial[s][t][lane];",
        ),
        ("bias by lane", "total += bias[n];", "total += bias[lane];"),
        ("residual overwritten", "*out += (float)total;", "*out = (float)total;"),
        ("inputs that SLICES does not divide are lost", "k < (slice + 1) * COLS / SLICES", "k < slice * COLS / SLICES + COLS / SLICES"),
        ("every head takes the first one's weights", "weight + (size_t)batch * COLS * ROWS", "weight + (size_t)batch * 0 * ROWS"),
        ("gate and up exchanged", "const float gate = (float)total;", "const float gate = (float)total_up;"),
        ("one token row too many", "t < count; t += SLICES", "t <= count; t += SLICES"),
    ),
    *_in(
        "linear_and_choice",
        ("a warp chooses for one row alone", "row += linear::WARPS", "row += rows"),
        ("warps share their scores", "mine->scores[warp]", "mine->scores[0]", "checker"),
        ("no barrier before the lists", "  __syncthreads();\n  lists::", "  lists::"),
        ("every tile of tokens chooses for all", "  if (blockIdx.y > 0) return;\n", "", "checker"),
        ("the last block's row tiles are left out", "gridDim.x - 1)", "gridDim.x)"),
    ),
    *_in(
        "linear_mma",
        (
            "reads the row count before the kernel that writes it has ended",
            "{% if p.rows_are_old %}",
            "{% if true %}",
        ),
        ("blocks take their neighbours' tiles", "row_tiles, blockIdx.x, gridDim.x)", "row_tiles, blockIdx.x, 1)"),
    ),
    *_in(
        "templates/lib/linear_mma.cuh.j2",
        ("wrong token column", "const int m = t * 8 + lane / 4;", "const int m = t * 8 + lane % 8;"),
        (
            "warps joined in another order for several tokens",
            "total += partial[t][s][i][lane];",
            "total += partial[t][count > 8 ? WARPS - 1 - s : s][i][lane];",
        ),
        (
            "no barrier before the next tile's sums come",
            "    if (BUFFERS == 1) __syncthreads();  // the next tile's sums come to where these are\n",
            "",
        ),
        ("no barrier before the warps are joined", "= sum[i / 4][i % 4];\n    __syncthreads();\n", "= sum[i / 4][i % 4];\n"),
        ("one buffer of sums for every tile", "shared->partial + buffer * TILES", "shared->partial"),
        ("waits for one stage too few", "cp_async_wait<SLOTS - 2>();", "cp_async_wait<SLOTS - 1>();", "checker"),
        ("leaves with copies under way", "    cp_async_wait<0>();\n    return;", "    return;", "checker"),
        (
            "reads the slot that is filled",
            "return ring + slot * STAGE_STEPS * 32;",
            "return ring + (slot + SLOTS - 1) % SLOTS * STAGE_STEPS * 32;",
        ),
        ("streams the next tile of one block", "tile += stride;\n", "tile += 1;\n"),
        ("a short row's stream goes on in the next", "STEPS - WARP_STEPS) * 32", "STEPS) * 32"),
        ("the last stage's inputs for the next tile", "stage + 1 == WARP_STAGES ? 0 : stage + 1", "min(stage + 1, WARP_STAGES - 1)"),
        ("gate and up exchanged", "(gate / (1.0f + expf(-gate)) * up)", "(up / (1.0f + expf(-up)) * gate)"),
        (
            "accumulators of odd tokens not cleared",
            "for (int i = 0; i < TILES * 4; ++i) sum[i / 4][i % 4] = 0.0f;",
            "for (int i = 0; i < TILES * 4; i += 2) sum[i / 4][i % 4] = 0.0f;",
        ),
        ("16 tokens computed as 8", "else if (count <= 16)\n    multiply<2>", "else if (count <= 16)\n    multiply<1>"),
        ("bias of the next row", "total += bias[n];", "total += bias[min(n + 1, ROWS - 1)];"),
    ),
    *_in(
        "templates/lib/expert_items.cuh.j2",
        ("only an expert's first tile of tokens", "if (++tile == tiles) {", "{"),
        ("an expert's second row group is the first", "++row_group == lists.row_groups) row_group = 0, ++active", "true) ++active"),
    ),
    *_in("templates/lib/ranges.cuh.j2", ("a range's sum is lost", "if (range > 0) before = *mine;", "if (range > 1) before = *mine;")),
    *_in(
        "experts_wgmma",
        ("rows with each other's scales", "group.scale_8 : group.scale,", "group.scale : group.scale_8,"),
        ("136 is taken off a step twice", "minus_136, second, true", "minus_136, first, true"),
        (
            "a group's steps in another order than at decode",
            "group.a0, first, true);\n        wgmma<0>(group_sum, group.a1, second, true);",
            "group.a1, second, true);\n        wgmma<0>(group_sum, group.a0, first, true);",
        ),
        ("inputs of a step in another order than weights", "+ w) + piece % 4 * 4) = word[w]", "+ piece % 4) + w * 4) = word[w]"),
        ("bf16 inputs in another order than weights", "make_uint2(words.x, words.z)", "make_uint2(words.x, words.y)"),
        ("a chain goes on from the last range's", "for (int i = 0; i < WIDTH / 2; ++i) sum[i] = 0.0f;", "if (range == 0) sum[0] = 0.0f;"),
        ("goes on with a stage that has not come", "cp_async_wait<SLOTS - 3>();", "cp_async_wait<SLOTS - 2>();", "checker"),
        ("one slot too few", "constexpr int X_SLOTS = 4;", "constexpr int X_SLOTS = 3;"),
        ("inputs not made visible to tensor cores", "    fence_for_wgmma();\n", "", "checker"),
        ("up before gate", "gate = total[i], up = total[i + 2]", "gate = total[i + 2], up = total[i]"),
    ),
    *_in(
        "linear_wgmma",
        ("one chain over all ranges", "range_stage + s > 0", "stage + s > 0"),
        ("inputs of a step in another order than weights", "make_uint2(held[i].x, held[i].z)", "make_uint2(held[i].x, held[i].y)"),
        ("waits for the slot's first stage alone", "(stage / SLOTS) & 1", "0"),
        ("one slot too few", "constexpr int SLOTS = 4;", "constexpr int SLOTS = 3;"),
        ("inputs not made visible to tensor cores", "    fence_for_wgmma();\n", "", "checker"),
        ("every tile of tokens has the first's inputs", "x + (size_t)first_token * X_STRIDE + ", "x + "),
        ("tokens beyond the last are written", "if (m >= count || n >= ROWS) continue;", "if (n >= ROWS) continue;"),
        ("up before gate", "gate = total[i], up = total[i + 2]", "gate = total[i + 2], up = total[i]"),
    ),
    *_in(
        "mla_attention_f32",
        ("a tree's first key taken for a committed one", "position < prefix ?", "position <= prefix ?"),
        ("tree keys in slot order", "prefix + path[position - prefix]", "prefix + (position - prefix)"),
        ("no softmax scale", "(float)dot * SCALE", "(float)dot"),
        ("one key too many", "min(first_key + SPLIT, last_key + 1)", "min(first_key + SPLIT, last_key + 2)"),
        (
            "tile bounds depend on the token count",
            "tile_key += TILE) {\n    const int keys = min(TILE, end_key - tile_key);",
            "tile_key += *num_tokens > 8 ? 24 : TILE) {\n    const int keys = min(*num_tokens > 8 ? 24 : TILE, end_key - tile_key);",
        ),
        ("no barrier between scores and maximum", "(float)dot * SCALE;\n    }\n    __syncthreads();", "(float)dot * SCALE;\n    }"),
        ("values not rescaled", "float sum = values[v] * rescale;", "float sum = values[v];"),
        ("every sequence reads the first slab", "(size_t)row_sequence[token_row] * context_capacity", "(size_t)0 * context_capacity"),
        ("no barrier before the tile is overwritten", "    __syncthreads();  // the query row, or the last tile's reads\n", ""),
    ),
    *_in(
        "mla_attention_mma",
        ("mask one key late", "tile_key + key < end_key ?", "tile_key + key <= end_key ?"),
        ("no barrier before a stage is loaded again", "    __syncthreads();  // before this stage is loaded again\n", ""),
        ("does not wait for its copies", "cp_async_wait<1>();", "cp_async_wait<2>();", "checker"),
        ("heads 8 to 15 rescaled as 0 to 7", "shared->rescale[lane / 4 + 8]", "shared->rescale[lane / 4]"),
        ("tree keys in slot order", "prefix + path[position - prefix]", "prefix + (position - prefix)"),
        ("writes heads that do not exist", "if (first_head + row < HEADS) split_values", "split_values"),
        ("next tile into the stage that is read", "load_keys(tile_key + TILE, stage ^ 1)", "load_keys(tile_key + TILE, stage)"),
        ("sums not rescaled", "fmaf(running_sum, rescale, sum)", "running_sum + sum"),
        (
            "scores' chains added in another order for several tokens",
            "dot += chain[c][i];",
            "dot += chain[*num_tokens > 8 ? CHAINS - c : c][i];",
        ),
        ("a chain is left out", "for (int c = 1; c < CHAINS; ++c) dot", "for (int c = 1; c < CHAINS - 1; ++c) dot"),
    ),
    *_in(
        "mla_attention_wgmma",
        ("mask one key late", "lane % 4 * 2 + i % 2 >= end_key", "lane % 4 * 2 + i % 2 > end_key"),
        ("tree keys in slot order", "position < prefix ? position : prefix + path[position - prefix]", "position"),
        ("a key too many at a split's end", "const bool visible = position < end_key;", "const bool visible = position <= end_key;"),
        (
            "copies without the swizzle",
            "swizzled(row, piece) / sizeof(bf16), source",
            "row * TILE + piece * 8, source",
        ),
        ("probabilities without the swizzle", "shared_probability + swizzled(head, j)", "shared_probability + head * 128 + j * 16"),
        (
            "values of 64 columns from the tile after next",
            "columns = wgmma_tile(latent, sizeof",
            "columns = wgmma_tile(latent, 2 * sizeof",
            "checker",
        ),
        ("values' keys taken for columns", "wgmma<1>(values", "wgmma<0>(values"),
        ("the right half takes the left one's latents", "shared->key[stage][HALF / TILE]", "shared->key[stage][0]"),
        ("values left at an older maximum", "values[i] *= rescale[i / 2 % 2]", "values[i] *= 1.0f"),
        ("one rescale factor for both rows", "values[i] *= rescale[i / 2 % 2]", "values[i] *= rescale[0]"),
        ("sums left at an older maximum", "        running_sum[half] *= rescale[half];\n", ""),
        ("rows 8 to 15 stored as 0 to 7", "group * 16 + i * 2;", "group * 16;"),
        ("heads of a group's rows stored for its first", "split_values + row * row_pieces + eight", "split_values + eight"),
        ("heads of rows that are not there are stored", "    if (row >= rows) continue;\n", ""),
        ("sums of rows that are not there are stored", "lane % 4 != 0 || head >= rows * TILE_HEADS", "lane % 4 != 0"),
        ("queries of rows that are not there are read", "row, piece, row < rows * TILE_HEADS);", "row, piece, true);"),
        ("does not wait for its copies", "cp_async_wait<LATER>();", "cp_async_wait<LATER + 1>();", "checker"),
        ("copies not made known to wgmma", "  fence_for_wgmma();\n  arrive_as_warp(filled", "  arrive_as_warp(filled", "checker"),
        (
            "probabilities not made known to wgmma",
            "      fence_for_wgmma();\n      arrive_as_warp(&shared->weighed[stage]);",
            "      arrive_as_warp(&shared->weighed[stage]);",
            "checker",
        ),
        (
            "the right half does not wait for probabilities",
            "        mbarrier_wait(&shared->weighed[stage], (tile / STAGES) & 1);\n",
            "",
        ),
        (
            "scores begin before their keys are there",
            "mbarrier_wait(&shared->filled[stage][chunk / PART], (tile",
            "if (chunk > 0) mbarrier_wait(&shared->filled[stage][chunk / PART], (tile",
        ),
        ("no barrier before the rotary chunk is overwritten", "      barrier_of_warps(1, 128);", "     "),
        (
            "a stage is filled again before it is read",
            "        if (tile >= STAGES) mbarrier_wait(&shared->read[stage], (tile / STAGES - 1) & 1);\n",
            "",
        ),
        ("waits for the other reading of a stage", "(tile / STAGES - 1) & 1", "(tile / STAGES) & 1"),
        ("a query is overwritten before it is read", "if (tile > 0) mbarrier_wait(", "if (false) mbarrier_wait("),
        ("scores begin before the query is there", "if (key == first_key) mbarrier_wait(", "if (key != first_key) mbarrier_wait("),
        ("the last row's query counts as this one's", "(queries - 1) & 1", "queries & 1"),
        (
            "a stage counts as read before its values are",
            "      add_values(values, rescale, fragments, shared->key[stage][0]);\n      arrive_as_warp(&shared->read[stage]);",
            "      arrive_as_warp(&shared->read[stage]);\n      add_values(values, rescale, fragments, shared->key[stage][0]);",
            "checker",
        ),
        ("registers touched without a fence", "  wgmma_fence(values);\n", ""),
        ("values' MMAs not committed", "  wgmma_commit();\n  wgmma_wait(values);", "  wgmma_wait(values);"),
        ("values' MMAs not waited for", "  wgmma_commit();\n  wgmma_wait(values);", "  wgmma_commit();"),
        ("scores not waited for", "      wgmma_wait(score);\n", "", "checker"),
    ),
    *_in(
        "templates/lib/splits.cuh.j2",
        ("splits as long as the row", "min(split_begin(split + 1), keys)", "keys"),
        ("rows of another sequence see the first one's keys", "row_sequence[row] == row_sequence[first] ?", "true ?"),
        ("a group sees what its first row does", "min(shared_keys, row_prefix[row])", "shared_keys"),
        ("a split that not all see whole is shared", "= split_of(shared_keys);", "= split_of(shared_keys + 1);"),
        ("the last split of a part is left out", "return split_of(keys - 1) + 1;", "return split_of(keys - 1);"),
        ("a row's splits begin anew", "from = together ? 0 : shared_splits", "from = 0"),
        ("shared splits are the first row's alone", "together ? rows : 1, split", "1, split"),
        ("a part's place is not moved on from row to row", "      begin -= own;\n", ""),
    ),
    *_in(
        "mla_combine_wgmma",
        ("a class takes another's splits", "chunk + i * CLASSES + split_class;", "chunk + i * CLASSES + (split_class & 2);"),
        ("weights of the first 32 splits for all", "split_max[first + chunk + lane]", "split_max[first + lane]"),
        ("sums of the last 32 splits alone", "all_sum += warp_sum(weighted_sum);", "all_sum = warp_sum(weighted_sum);"),
        ("eights of heads exchanged", "head % TILE / 8) * 32", "(head % TILE / 8 ^ 1)) * 32"),
        ("no barrier before the classes are joined", "  __syncthreads();\n", ""),
        ("one token row too many", "token_row < *num_tokens ?", "token_row <= *num_tokens ?"),
    ),
    *_in(
        "mla_combine",
        ("a split too few at its bounds", "row_position[token_row] / SPLIT + 1", "(row_position[token_row] + SPLIT - 1) / SPLIT"),
        (
            "sums not rescaled",
            "weighted_sum[threadIdx.x] = weight[threadIdx.x] * split_sum[i];",
            "weighted_sum[threadIdx.x] = split_sum[i];",
        ),
        (
            "splits joined in another order for several tokens",
            "all_sum += weighted_sum[j];",
            "all_sum += weighted_sum[*num_tokens > 8 ? count - 1 - j : j];",
        ),
        ("no barrier after the weights", "      __syncthreads();\n      const int count", "      const int count"),
        ("no barrier after the warps' maxima", "= largest;\n  __syncthreads();", "= largest;", "checker"),
    ),
    *_in(
        "moe_combine",
        ("residual overwritten", "+ i] += sum;", "+ i] = sum;"),
        (
            "experts summed in another order for several tokens",
            "token_row * TOP_K + k;",
            "token_row * TOP_K + (*num_tokens > 1 ? TOP_K - 1 - k : k);",
        ),
    ),
    *_in(
        "moe_sort",
        ("a token's last expert is not grouped", "*num_tokens * TOP_K,", "*num_tokens * (TOP_K - 1),"),
    ),
    *_in(
        "templates/lib/moe_sort.cuh.j2",
        ("the last warp's experts are not counted", "    all += warp_total[w];\n", "    if (w < WARPS - 1) all += warp_total[w];\n"),
        ("no barrier before the next prefix", "  __syncthreads();  // before the next call writes\n", ""),
        ("no barrier before the warps are joined", "= sum;\n  __syncthreads();\n", "= sum;\n"),
        ("lists one assignment late", "if (four.y == e) assignments[next[r]++]", "if (four.y == e) assignments[++next[r]]"),
        ("the tile is read before it is there", " : -1;\n    __syncthreads();\n    for", " : -1;\n    for"),
        ("warps' prefixes of one lane too few", "if (lane >= distance) sum", "if (lane > distance) sum"),
    ),
    *_in(
        "peer_gather",
        ("a rank's own rows are left out", "target[(size_t)my_rank * rows * WIDTH] = mine;", "(void)mine;"),
        (
            "rows as far apart as in the inbox",
            "target[(size_t)my_rank * rows * WIDTH]",
            "target[(size_t)my_rank * inbox_rows * WIDTH]",
        ),
    ),
    *_in(
        "peer_sum",
        ("the round is not kept", "*my_rounds = (int)round;", "(void)my_rounds;"),
        ("sums are not sent on", "if (!direct) send_to_others(sum);", "if (direct) send_to_others(0.0f);"),
        ("parts go to the turn before", "reinterpret_cast<u64*>(inboxes[rank]) + turn", "reinterpret_cast<u64*>(inboxes[rank])"),
    ),
    *_in(
        "peer_sum_norm",
        ("the round is kept for the first columns alone", "threadIdx.x < COUNTERS) my_rounds", "threadIdx.x < 1) my_rounds"),
        ("parts go to the turn before", "[(my_rank + other) % RANKS]) + turn", "[(my_rank + other) % RANKS])"),
        ("the last vectors as far apart as the others", "min(BLOCK, WIDTH / VECTOR - r * BLOCK)", "BLOCK"),
        ("the norm of what was there before", "  normalise(warp_square_sum, gain, row,", "  normalise(warp_square_sum, gain, parts[0],"),
        ("one part for all of it", "(my_rank + other) % RANKS == rank", "(my_rank + other) % RANKS != rank"),
        ("the bias once a rank", "      sum += added[r].values[v];", "      sum += RANKS * added[r].values[v];"),
    ),
    *_in(
        "rank_choice",
        ("ties between ranks to the higher id", "theirs[1] < token", "theirs[1] > token"),
        ("ranks' rows as many as there are tokens", "rank * rows + token_row", "rank * *num_tokens + token_row"),
    ),
    *_in(
        "rank_logits",
        ("ranks' rows as many as there are tokens", "rank * rows + token_row", "rank * *num_tokens + token_row"),
        ("ranks in the opposite order", "RANKS + rank) * VOCAB", "RANKS + RANKS - 1 - rank) * VOCAB"),
    ),
    *_in(
        "rank_sum",
        ("the last rank is left out", "rank < RANKS; ++rank", "rank < RANKS - 1; ++rank"),
        ("ranks' rows as many as there are tokens", "rank * rows * WIDTH", "rank * *num_tokens * WIDTH"),
        ("the bias once a rank", "  sum += bias[i];", "  sum += RANKS * bias[i];"),
    ),
    *_in(
        "rmsnorm",
        ("one token row too many", "token_row >= tokens", "token_row > tokens"),
    ),
    *_in(
        "templates/lib/rmsnorm.cuh.j2",
        ("eps outside the root", "1.0f / sqrtf(square_sum / WIDTH + EPS)", "1.0f / (sqrtf(square_sum / WIDTH) + EPS)"),
        ("no barrier before the warps are joined", "  __syncthreads();\n", ""),
        ("mean over the stride", "square_sum / WIDTH + EPS", "square_sum / X_STRIDE + EPS"),
        ("the first warp is left out", "int w = 0; w < WARPS", "int w = WARPS > 1; w < WARPS"),
        ("a vector's first gain for all of it", "* gain[r].values[v]", "* gain[r].values[0]"),
    ),
    *_in(
        "rope_cache",
        ("rotated by slot instead of position", "cos_table + (size_t)row_position[token_row]", "cos_table + (size_t)row_slot[token_row]"),
        ("nodes of one depth share a slot", "context_capacity + row_slot[token_row]", "context_capacity + row_position[token_row]"),
    ),
    *_in(
        "templates/lib/rotary.cuh.j2",
        ("pairings exchanged", "{% if p.interleave %}", "{% if not p.interleave %}"),
        ("turned the other way", "a * cos_row[i] - b * sin_row[i]", "a * cos_row[i] + b * sin_row[i]"),
    ),
    *_in(
        "templates/lib/cache_row.cuh.j2",
        ("eps left out", "sqrtf(square_sum / KV_LORA + EPS)", "sqrtf(square_sum / KV_LORA)"),
        ("no barrier before the warps are joined", "  __syncthreads();\n", ""),
        ("the latent's own key part is not turned", "rotate(latent + KV_LORA,", "rotate(latent,"),
    ),
    *_in(
        "norm_and_cache",
        ("nodes of one depth share a slot", "context_capacity + row_slot[token_row]", "context_capacity + row_position[token_row]"),
        ("the query's columns for the latent", " + cache::KV_A_OFFSET;", ";"),
        ("rows as far apart as they are wide", "token_row * norm::X_STRIDE", "token_row * norm::WIDTH"),
    ),
    *_in(
        "linear_heads",
        ("every head takes the first one's weights", "((size_t)head * ROW_TILES + tile)", "((size_t)0 * ROW_TILES + tile)"),
        (
            "the last split is left out",
            "for (int s = 0; s < SPLITS; ++s) total",
            "for (int s = 0; s < SPLITS - 1; ++s) total",
        ),
        ("no barrier before the splits are joined", "    __syncthreads();\n    // element", "    // element"),
        ("no barrier before the next tokens", "    __syncthreads();  // the next tokens' sums come to where these are\n", ""),
        ("queries turned by the first row's position", "row_position[first_token + m]", "row_position[first_token]"),
        ("the first eight tokens' outputs again", "(size_t)(first + t) * Y_STRIDE", "(size_t)t * Y_STRIDE"),
        ("rows behind the last", "      if (row >= ROWS) continue;\n", ""),
    ),
    *_in(
        "row_groups",
        ("groups behind the last have rows below 0", "max(0, rows - g * ROWS)", "rows - g * ROWS"),
        ("every group has all the rows", "rows - g * ROWS)", "rows)"),
        ("only a warp's number of groups", "g < groups; g += 32", "g < min(groups, 32); g += 32"),
    ),
    *_in(
        "router_logits",
        ("every token of a full tile reads the first", "load(x, h + (size_t)t * HIDDEN + k);", "load(x, h + k);"),
        (
            "warps joined in another order in full tiles",
            "total += partial[w][e][t];",
            "total += partial[count == TOKENS ? WARPS - 1 - w : w][e][t];",
        ),
        ("no barrier before the warps are joined", "  __syncthreads();\n", ""),
        ("experts beyond the last", "if (first_expert + e < EXPERTS) logits", "logits"),
    ),
    *_in(
        "router_logits_mma",
        ("experts beyond the last", "min(first_expert + GROUP, EXPERTS)", "first_expert + GROUP"),
        ("tokens of the first tile", "logits + (size_t)first_token * EXPERTS", "logits"),
    ),
    *_in(
        "templates/lib/router_logits.cuh.j2",
        (
            "warps joined in another order for several tokens",
            "total += partial.sums[m / 8][w]",
            "total += partial.sums[m / 8][count > 1 ? WARPS - 1 - w : w]",
        ),
        ("no barrier before the sums are joined", "  }\n  __syncthreads();\n  for (int o", "  }\n  for (int o"),
        ("tokens that are not there end a row", "(m < count ? m : 0) * HIDDEN", "m * HIDDEN"),
        ("a group's first expert for all", "expert = min(first_expert + lane / 4, last_expert - 1)", "expert = first_expert"),
    ),
    *_in(
        "linear_and_router",
        (
            "groups of experts go on with the first one's weights",
            "    if (expert > first_expert) router::load_experts(held, router_weight, expert, last_expert, 0);\n",
            "",
        ),
        ("a share rounded down", "(router::EXPERTS + gridDim.x - 1) / gridDim.x", "max(router::EXPERTS / (int)gridDim.x, 1)"),
        ("tokens of the first tile", "router_logits + (size_t)first_token * router::EXPERTS", "router_logits"),
    ),
    *_in(
        "router_topk",
        ("one token row too many", "token_row >= *num_tokens", "token_row > *num_tokens"),
    ),
    *_in(
        "templates/lib/router_topk.cuh.j2",
        ("ties to the higher expert of a lane", "if (left[i] > best) best", "if (left[i] >= best) best"),
        (
            "ties to the higher lane",
            "expert = warp_min(best == highest ? (u32)expert : (u32)EXPERTS);",
            "expert = (int)warp_max(best == highest ? (u32)expert : 0u);",
        ),
        ("negative scores in the wrong order", "? ~bits :", "? bits & 0x7fffffffu :"),
        ("experts beyond the last take part", "i * 32 + lane < EXPERTS ? ordered", "i * 32 + lane < EXPERTS + 31 ? ordered"),
        ("weights from biased scores", "scores.chosen[place] = scores.score[expert];", "scores.chosen[place] = choice[expert];"),
        ("a group's best counted twice", "best + second", "best + best"),
        ("one group too many", "place >= TOPK_GROUP", "place > TOPK_GROUP"),
        ("ties to the higher group", "(group_score[o] == group_score[g] && o < g)", "(group_score[o] == group_score[g] && o > g)"),
        ("no scaling factor after normalising", "/ (sum + 1e-20f) * ROUTED_SCALING", "/ (sum + 1e-20f)"),
        (
            "no barrier before the weights",
            "  __syncwarp();\n  for (int i = lane; i < TOP_K",
            "  for (int i = lane; i < TOP_K",
        ),
        (
            "softmax over all but the last expert",
            "for (int e = 0; e < EXPERTS; ++e) sum +=",
            "for (int e = 0; e < EXPERTS - 1; ++e) sum +=",
        ),
    ),
    *_in(
        "sample",
        ("noise keyed by row instead of position", "row_position[token_row] + 1;", "token_row + 1;"),
        ("seed's low word twice", "(u32)seed[2 * sequence + 1]", "(u32)seed[2 * sequence]"),
        ("the same noise for four tokens", "const u32 word = token % 4;", "const u32 word = position % 4;"),
        ("temperature left out", "(row[i] - largest) * inverse + gumbel", "(row[i] - largest) + gumbel"),
        ("top-p of all that top-k left out, too", "if (kept(ordered(row[i]), i)) sum", "sum"),
        ("one of the tied too many", "token < equal_below", "token <= equal_below", "checker"),
        ("parameters of the step's first row", "const int sequence = row_sequence[token_row];", "const int sequence = row_sequence[0];"),
        ("-0 below 0", "__float_as_uint(x + 0.0f)", "__float_as_uint(x)"),
        (
            "scratch overwritten while it is read",
            "  __syncthreads();\n  if (threadIdx.x % 32 == 0) scratch",
            "  if (threadIdx.x % 32 == 0) scratch",
        ),
    ),
    *_in(
        "top_k",
        ("log-probabilities not normalised", "- largest) - log_sum", "- largest)"),
        ("parts' sums at their own maxima", "expf(sum.x - largest)", "expf(0.0f)"),
        ("no barrier before the lists are merged", "  __syncthreads();\n  if (threadIdx.x >= 32)", "  if (threadIdx.x >= 32)"),
    ),
    *_in(
        "top_k_parts",
        ("logits of the place's first row", "draft_shape[place * 4 + 3] + blockIdx.x", "draft_shape[place * 4 + 3]"),
        ("tokens behind the last take part", "key[i] = token < VOCAB ? ordered(value[i]) : 0;", "key[i] = ordered(value[i]);"),
        ("a token is taken again", "== best.token) key[i] = 0;", "== best.token && i > 0) key[i] = 0;"),
        ("no barrier before the sums come to where the maxima are", "  __syncthreads();  // the maxima have been read\n", ""),
        (
            "no barrier before the warps' lists are merged",
            "  __syncthreads();\n  if (warp > 0) return;",
            "  if (warp > 0) return;",
        ),
    ),
    *_in(
        "templates/lib/best_first.cuh.j2",
        (
            "ties to the higher id",
            "(int)warp_min(key == highest ? (u32)token : (u32)NOBODY)",
            "(int)warp_max(key == highest ? (u32)token : 0u)",
        ),
        (
            "a list's second is left out",
            "lists[(j * 32 + lane) * stride + at[j]]",
            "lists[(j * 32 + lane) * stride + min(at[j] + 1, length - 1)]",
        ),
        ("-0 below 0", "__float_as_uint(x + 0.0f)", "__float_as_uint(x)"),
        ("negative logits in the wrong order", "? ~bits :", "? bits & 0x7fffffffu :"),
    ),
    *_in(
        "tree_accept",
        ("the next root is the root's choice", "root_token[sequence] = chosen[node];", "root_token[sequence] = chosen[0];"),
        ("commits one token too few", "sequence_length[sequence] += count;", "sequence_length[sequence] += count - 1;"),
        ("any node with the token is a child", "parent[i] == node && token[i] == wanted", "token[i] == wanted && i > node"),
        ("choices of the step's first tree", "next_token + step_begin[place]", "next_token"),
        ("the last child of a full warp is not looked at", "i < size; i += 32", "i < size - 1; i += 32"),
    ),
    *_in(
        "tree_build",
        ("ties to the larger ranks", "return high < than_high", "return high > than_high"),
        ("a sibling keeps its elder's probability", "best.score - (double)row[best.rank] +", "best.score +"),
        ("children hang on their grandparent", "child.parent = size;", "child.parent = best.parent;"),
        ("scores summed in float32", "  double score;  // path", "  float score;  // path"),
        ("one depth too many", "best.depth < depths &&", "best.depth <= depths &&"),
        ("no barrier before the search", "    __syncthreads();  // lane 0 has opened and taken\n", ""),
    ),
    *_in(
        "tree_rows",
        ("the root counts as committed", "row_prefix[row] = length;", "row_prefix[row] = length + 1;"),
        ("a node does not see itself", "int node = i;", "int node = parent[i] < 0 ? 0 : parent[i];"),
        ("positions by node", "length + node_depth;", "length + i;"),
        ("trees at a fixed distance", "begin += tree_size[p];", "begin += MAX_NODES;"),
    ),
]

PLAN = [
    *_in(
        "kdgen/plan/kernels.py",
        (
            "half as many splits launched",
            "splits = Extent(per_context=split)",
            "splits = Extent(per_context=2 * split)",
        ),
        (
            "YaRN's part of the softmax scale left out, float32",
            "scale=s.softmax_scale, block",
            "scale=s.qk_head_dim**-0.5, block",
            "together",
        ),
        (
            "YaRN's part of the softmax scale left out, bf16",
            "scale=s.softmax_scale, smem_comment",
            "scale=s.qk_head_dim**-0.5, smem_comment",
            "together",
        ),
        (
            "YaRN's part of the softmax scale left out, wgmma",
            "scale_log2=s.softmax_scale * ",
            "scale_log2=s.qk_head_dim**-0.5 * ",
            "together",
        ),
        ("the query norm takes rms_norm_eps", "x_stride=self.kv_a_stride, eps=LORA_NORM_EPS)", "x_stride=self.kv_a_stride)", "together"),
        ("the latent norm takes rms_norm_eps", "eps=LORA_NORM_EPS, interleave", "eps=s.rms_norm_eps, interleave", "together"),
        ("RoPE of the wrong columns", "kv_a_offset=s.q_lora_rank or 0", "kv_a_offset=0", "together"),
        ("heads' q_nope one after another", "x_batch_stride=s.qk_head_dim", "x_batch_stride=s.qk_nope_head_dim", "together"),
        ("the experts' down reads token rows", "hidden, width, 1, False", "hidden, width, s.num_experts_per_tok, False", "together"),
        ("fewer experts launched than can be active", "cap=s.n_routed_experts or 0)", "cap=s.num_experts_per_tok)", "kernel"),
        ("warps that leave steps over", "if warps <= most and steps % warps == 0)", "if warps <= most)", "refused"),
    ),
    *_in(
        "kdgen/plan/programs.py",
        (
            "shared experts left out",
            "            routed = *routed, gate_up, down\n",
            "            pass\n",
            "together",
        ),
        (
            "the second norm takes the first's weights",
            '_norm(layer_weight("post_attention_layernorm"))',
            '_norm(layer_weight("input_layernorm"))',
            "together",
        ),
        ("a layer's own norm behind it", 'layer_weight("input_layernorm"), value=1)', 'layer_weight("input_layernorm"))', "ranks"),
        (
            "rotated before they are made",
            "queries = *queries, rope, absorb",
            "queries = queries[0], rope, *queries[1:], absorb",
            "together",
        ),
        (
            "the low-rank query is used before its norm",
            "queries = queries[0], cache, queries[2], launch(",
            "queries = queries[0], queries[2], cache, launch(",
            "together",
        ),
        (
            "compaction before the walk is known",
            'launch("kv_compact", *_buffers(compact), integer(limits.capacity)',
            'launch("kv_compact", *_buffers(compact), integer(limits.max_context)',
            "together",
        ),
        (
            "trees drawn from greedy choices",
            "Stage((*choose, *_commit_launches(limits)))",
            "Stage((choose[0], *_commit_launches(limits)))",
            "together",
        ),
    ),
    *_in(
        "kdgen/plan/weights.py",
        (
            "experts' gate and up exchanged",
            "(experts, 2 * width, hidden), gate, up, layers=moe",
            "(experts, 2 * width, hidden), up, gate, layers=moe",
            "together",
        ),
        ("tied embeddings forgotten", "embed if spec.tie_word_embeddings else", "embed if not spec.tie_word_embeddings else", "refused"),
    ),
]

HOST = [
    *_in(
        "kdgen/engine.py",
        (
            "reset leaves the length on the device",
            'self.backend.write(self._buffers["sequence_length"], np.zeros(1, np.int32), sequence)\n        if',
            "if",
            "together",
        ),
        ("reset keeps the old sampling", "if self._sampling[sequence] != sampling:", "if self._sampling[sequence] is None:", "together"),
        (
            "grids sized for the first sequence",
            "max(self._lengths[sequence] for sequence in sequences)",
            "self._lengths[sequences[0]]",
            "decode",
        ),
        ("accepted rows counted from the step's begin", "int(begins[place]) + int(node)", "int(node)", "together"),
        (
            "the second half of seeds is lost",
            "np.array([s.seed for s in chosen], np.uint64)",
            "np.array([s.seed % 2**32 for s in chosen], np.uint64)",
            "together",
        ),
        (
            "top-p never written",
            'self._write("top_p", np.array([s.top_p for s in chosen]',
            'self._write("top_p", np.array([1.0 for s in chosen]',
            "together",
        ),
    ),
    *_in(
        "kdgen/rounds.py",
        (
            "what was decoded ahead stays",
            "self._running.clear()\n        self.engine.cut(length, root)",
            "self._running.clear()",
            "decode",
        ),
    ),
    *_in(
        "kdgen/decode.py",
        (
            "a tree deeper than what is left",
            "depths = min(block_size - 1, limit - len(tokens) - 1)",
            "depths = min(block_size - 1, limit - len(tokens))",
            "decode",
        ),
        (
            "tokens behind a stop are kept",
            "through_stop((*step.accepted[1:], step.next_token), stops)",
            "(*step.accepted[1:], step.next_token)",
            "decode",
        ),
        (
            "the accepted root is given out again",
            "(*step.accepted[1:], step.next_token), stops)",
            "(*step.accepted, step.next_token), stops)",
            "decode",
        ),
        (
            "a prompt's last chunk is cut",
            "engine.prefill(prompt[start : start + chunk])",
            "engine.prefill(prompt[start : start + chunk][: max(chunk - 1, 1)])",
            "decode",
        ),
    ),
    *_in(
        "kdgen/batch.py",
        (
            "a slab taken over with its last owner's sampling",
            "self._engine.reset(sequence, self._running[sequence].request.sampling)",
            "self._engine.reset(sequence)",
            "together",
        ),
        ("tokens behind a stop are kept", "tuple(self.tokens[:end])", "tuple(self.tokens)", "together"),
        (
            "a draft for the wrong place",
            "draft(sequence) for each, sequence in zip(running, sequences, strict=True)",
            "draft(sequence) for each, sequence in zip(running, sequences[::-1], strict=True)",
            "together",
        ),
    ),
    *_in(
        "kdgen/rope.py",
        ("YaRN's ramp the other way", "extrapolated = np.float32(1) - ramp", "extrapolated = ramp", "tables"),
        ("YaRN's amplitude left out of sines", "np.sin(angles) * amplitude", "np.sin(angles)", "tables"),
    ),
    *_in(
        "kdgen/weights/pack.py",
        ("W_UV from the wrong rows", "return per_head[:, per_head.shape[1] - rows :]", "return per_head[:, :rows]", "together"),
        (
            "scales of 64 laid out for 32",
            "bits = np.repeat(bits, group_size // 32, axis=1)",
            "bits = np.tile(bits, group_size // 32)",
            "kernel",
        ),
    ),
]

MUTANTS: tuple[Mutant, ...] = (*TEMPLATES, *PLAN, *HOST)

#: One of each kind, for CI.
QUICK = (
    "mla_attention_mma: tree keys in slot order",
    "linear_mma: warps joined in another order for several tokens",
    "int4_tile: scale of the neighbouring group",
    "argmax: ties to the higher id",
    "rmsnorm: eps outside the root",
    "sample: noise keyed by row instead of position",
    "experts_f32: no barrier before the next tokens",
    "kernels: the latent norm takes rms_norm_eps",
)
