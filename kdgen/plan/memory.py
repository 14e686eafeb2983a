"""Device memory other than weights: every buffer that ops may name, sized for the plan's limits."""

from __future__ import annotations

from kdgen.plan.attention import schedule_bytes, wgmma_blocks
from kdgen.plan.ir import MAX_CANDIDATES, MAX_NODES, MAX_PATH, PAGE_SLOTS, Buffer, DType
from kdgen.plan.ops.attention import attention_rows
from kdgen.plan.ops.attention_combine import max_splits
from kdgen.plan.ops.drafter import draft_splits
from kdgen.plan.ops.op import Context
from kdgen.plan.ops.tree import top_k_parts
from kdgen.plan.tuning import column_blocks


def _state(name: str, dtype: DType, *shape: int) -> Buffer:
    return Buffer(name, dtype, shape, "state")


def _work(name: str, dtype: DType, *shape: int) -> Buffer:
    return Buffer(name, dtype, shape, "workspace")


def buffers(c: Context, named: frozenset[str]) -> tuple[Buffer, ...]:
    """Those of the target and of its drafter that are among ``named``."""
    every = (*_sequences(c), *_steps(c), *_trees(c), *_attention(c), *_schedule(c), *_mlp(c), *_ranks(c), *_drafter(c))
    return tuple(each for each in every if each.name in named)


def _sequences(c: Context) -> tuple[Buffer, ...]:
    """What sequences keep between steps."""
    s, limits, sequences = c.spec, c.limits, c.limits.max_sequences
    half = s.qk_rope_head_dim // 2
    return (
        _state("cos_table", "f32", limits.capacity, half),
        _state("sin_table", "f32", limits.capacity, half),
        _state("kv_cache", _act(c), s.num_hidden_layers, limits.pool_pages, PAGE_SLOTS, s.cache_row_dim),
        _state("page_table", "i32", sequences, limits.sequence_pages),
        _state("sequence_length", "i32", sequences),
        _state("root_token", "i32", sequences),
        _state("temperature", "f32", sequences),
        _state("top_k", "i32", sequences),
        _state("top_p", "f32", sequences),
        _state("min_p", "f32", sequences),
        _state("seed", "i32", sequences, 2),
    )


def _steps(c: Context) -> tuple[Buffer, ...]:
    """What a step is told, its rows, and those of them that have logits."""
    sequences, rows, choices = c.limits.max_sequences, c.limits.max_rows, c.limits.max_logits
    return (
        _state("step_count", "i32", 1),
        _state("step_sequence", "i32", sequences),
        _state("step_begin", "i32", sequences + 1),
        _state("num_tokens", "i32", 1),
        _state("tokens", "i32", rows),
        _state("row_sequence", "i32", rows),
        _state("row_position", "i32", rows),
        _state("row_prefix", "i32", rows),
        _state("row_slot", "i32", rows),
        _state("row_path", "i32", rows, MAX_PATH),
        _state("next_token", "i32", choices),
        _state("logits", "f32", choices, c.spec.vocab_size),
        _state("logit_begin", "i32", sequences + 1),
        _state("num_logits", "i32", 1),
        _state("logit_row", "i32", choices),
        _state("logit_sequence", "i32", choices),
        _state("logit_position", "i32", choices),
    )


def _trees(c: Context) -> tuple[Buffer, ...]:
    """Draft logits, candidates, trees, and what was accepted of them."""
    sequences, vocab = c.limits.max_sequences, c.whole.vocab_size
    return (
        _state("draft_shape", "i32", sequences, 4),
        _state("draft_logits", "f32", sequences, MAX_PATH, vocab),
        _work("part_candidates", "i32", sequences, MAX_PATH, top_k_parts(vocab), MAX_CANDIDATES, 2),
        _work("part_sums", "f32", sequences, MAX_PATH, top_k_parts(vocab), 2),
        _state("candidate_tokens", "i32", sequences, MAX_PATH, MAX_CANDIDATES),
        _state("candidate_log_probs", "f32", sequences, MAX_PATH, MAX_CANDIDATES),
        _state("tree_size", "i32", sequences),
        _state("tree_token", "i32", sequences, MAX_NODES),
        _state("tree_parent", "i32", sequences, MAX_NODES),
        _state("tree_depth", "i32", sequences, MAX_NODES),
        _state("accepted_count", "i32", sequences),
        _state("accepted_nodes", "i32", sequences, MAX_PATH),
        _state("accepted_tokens", "i32", sequences, MAX_PATH),
    )


def _attention(c: Context) -> tuple[Buffer, ...]:
    """The residual, and what an attention block makes of it."""
    s, rows, heads, group, splits = c.spec, c.limits.max_rows, c.spec.num_attention_heads, attention_rows(c), max_splits(c)
    sums = (heads, splits) if c.mode.wgmma else (splits, heads)
    return (
        _work("residual", "f32", rows, s.hidden_size),
        _work("hidden", _act(c), rows, s.hidden_size),
        _work("kv_a", "f32", rows, (s.q_lora_rank or 0) + s.cache_row_dim),
        _work("q_a", _act(c), rows, s.q_lora_rank or 0),
        _work("q", _act(c), rows, heads, s.qk_head_dim),
        _work("query", _act(c), rows, heads, s.cache_row_dim),
        _work("split_values", "bf16" if c.mode.wgmma else "f32", group, splits, heads, s.kv_lora_rank),
        _work("split_max", "f32", group, *sums),
        _work("split_sum", "f32", group, *sums),
        _work("latent", _act(c), rows, heads, s.kv_lora_rank),
        _work("attention", _act(c), rows, heads, s.v_head_dim),
        _work("group_rows", "i32", -(-rows // group)),
    )


def _schedule(c: Context) -> tuple[Buffer, ...]:
    """What each launch of attention on wgmma works on."""
    if not c.mode.wgmma:
        return ()
    launches = -(-c.limits.max_rows // attention_rows(c))
    return (_work("attention_schedule", "i32", launches, wgmma_blocks(c.spec) * schedule_bytes(c.spec) // 4),)


def _mlp(c: Context) -> tuple[Buffer, ...]:
    """What dense MLPs, routers and experts make of the residual."""
    s, rows, experts, top_k = c.spec, c.limits.max_rows, c.spec.n_routed_experts or 0, c.spec.num_experts_per_tok
    return (
        _work("mlp", _act(c), rows, s.intermediate_size),
        _work("router_logits", "f32", rows, experts),
        _work("topk_experts", "i32", rows, top_k),
        _work("topk_weights", "f32", rows, top_k),
        _work("num_active", "i32", 1),
        _work("active_expert", "i32", experts),
        _work("active_begin", "i32", experts),
        _work("active_end", "i32", experts),
        _work("assignments", "i32", rows, top_k),
        _work("expert_mlp", _act(c), rows, top_k, s.moe_intermediate_size),
        _work("expert_output", "f32", rows, top_k, s.hidden_size),
        _work("shared_mlp", _act(c), rows, s.shared_intermediate_size),
    )


def _ranks(c: Context) -> tuple[Buffer, ...]:
    """What ranks put together, and their inboxes."""
    ranks, rows, choices, hidden, vocab = c.shard.ranks, c.limits.max_rows, c.limits.max_logits, c.spec.hidden_size, c.spec.vocab_size
    found = [
        _work("attention_part", "f32", rows, hidden),
        _work("mlp_part", "f32", rows, hidden),
        _work("logits_parts", "f32", ranks, choices, vocab),
        _work("whole_logits", "f32", choices, c.whole.vocab_size),
        _work("parts", "f32", ranks, rows, hidden),
        _work("choice", "i32", choices, 2),
        _work("choices", "i32", ranks, choices, 2),
    ]
    for name, most, width in (("sum", rows, hidden), ("choice", choices, 2), ("logits", choices, vocab)):
        found += [  # a word and its round, for each of two turns
            Buffer(f"inbox_{name}", "i32", (2, ranks, most, width, 2), "inbox"),
            Buffer(rounds_of(f"inbox_{name}"), "i32", (most, column_blocks(width)), "counter"),
        ]
    return tuple(found)


def rounds_of(inbox: str) -> str:
    """The buffer that counts the rounds of the words in ``inbox``."""
    return inbox.replace("inbox_", "rounds_")


def _drafter(c: Context) -> tuple[Buffer, ...]:
    """What the drafter adds. Its passes use the target's residual and hidden buffers, which are dead by then."""
    d, limits, rows, sequences = c.spec.draft, c.limits, c.limits.max_rows, c.limits.max_sequences
    if d is None:
        return ()
    block_rows, splits = sequences * d.block_size, draft_splits(d, limits)
    return (
        _state("draft_begin", "i32", sequences + 1),
        _state("context_count", "i32", 1),
        _state("context_sequence", "i32", rows),
        _state("context_position", "i32", rows),
        _state("row_last", "i32", block_rows),
        _state("draft_cos_table", "f32", limits.capacity, d.head_dim // 2),
        _state("draft_sin_table", "f32", limits.capacity, d.head_dim // 2),
        _state("draft_cache", _act(c), d.num_hidden_layers, limits.pool_pages, PAGE_SLOTS, 2 * d.key_width),
        _work("features", _act(c), rows, d.feature_width),
        _work("context_features", _act(c), rows, d.feature_width),
        _work("draft_kv", "f32", rows, 2 * d.key_width),
        _work("draft_q", "f32", block_rows, d.query_width),
        _work("draft_query", _act(c), block_rows, d.query_width),
        _work("draft_values", "f32", block_rows, splits, d.num_attention_heads, d.head_dim),
        _work("draft_max", "f32", block_rows, splits, d.num_attention_heads),
        _work("draft_sum", "f32", block_rows, splits, d.num_attention_heads),
        _work("draft_attended", _act(c), block_rows, d.query_width),
        _work("draft_mlp", _act(c), block_rows, d.intermediate_size),
    )


def _act(c: Context) -> DType:
    return "bf16" if c.mode.compute == "bf16" else "f32"
