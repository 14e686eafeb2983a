"""Buffers, and the programs that run over them: ordered launches for prefill, decode, verify and the draft's top-k.

With several ranks, what a rank cannot know alone goes through a gather and a kernel that joins the ranks' parts in their order: the
embedding, each layer's attention and MLP outputs, and the best token. Whole rows of logits are gathered only by the programs for
sampling, which are named ``<program>_sampled``.

Prefills compute logits of the rows alone that the host asks for, in the order that ``logit_rows`` gives them.
"""

from __future__ import annotations

from dataclasses import replace

from kdgen.plan.attention import (
    ATTENTION_ROWS,
    CACHE_BESIDE,
    COMBINE_BESIDE,
    WGMMA_TILE,
    attention_splits,
    caches_beside,
    combines_beside,
    holds_heads,
    share_bytes,
)
from kdgen.plan.expert_tiling import CHOICE_BESIDE, ROUTER_BESIDE, has_bf16_router, routes_beside
from kdgen.plan.ir import MAX_CANDIDATES, MAX_NODES, MAX_PATH, Arg, Buffer, DType, Gather, Launch, Limits, Program, Stage
from kdgen.plan.kernels import FEW, NORMED, SENT, norms_sums, top_k_parts
from kdgen.plan.shard import Shard, part_of
from kdgen.plan.tuning import Mode, column_blocks
from kdgen.spec.model import Spec


def buffers(whole: Spec, mode: Mode, limits: Limits, shard: Shard) -> tuple[Buffer, ...]:
    """Device memory other than weights, sized for ``limits``."""
    spec = part_of(whole, shard.ranks)
    rows, heads, sequences, choices = limits.max_rows, spec.num_attention_heads, limits.max_sequences, limits.max_logits
    group = attention_rows(spec, mode, limits)
    act: DType = "bf16" if mode.compute == "bf16" else "f32"
    splits = max_splits(spec, mode, limits)
    sums = (heads, splits) if mode.wgmma else (splits, heads)
    half = spec.qk_rope_head_dim // 2

    def state(name: str, dtype: DType, *shape: int) -> Buffer:
        return Buffer(name, dtype, shape, "state")

    def work(name: str, dtype: DType, *shape: int) -> Buffer:
        return Buffer(name, dtype, shape, "workspace")

    found = [
        state("cos_table", "f32", limits.capacity, half),
        state("sin_table", "f32", limits.capacity, half),
        state("kv_cache", act, spec.num_hidden_layers, limits.max_sequences, cache_slots(mode, limits), spec.cache_row_dim),
        state("sequence_length", "i32", sequences),
        state("root_token", "i32", sequences),
        state("temperature", "f32", sequences),
        state("top_k", "i32", sequences),
        state("top_p", "f32", sequences),
        state("min_p", "f32", sequences),
        state("seed", "i32", sequences, 2),
        state("step_count", "i32", 1),
        state("step_sequence", "i32", sequences),
        state("step_begin", "i32", sequences + 1),
        state("draft_shape", "i32", sequences, 4),
        state("draft_logits", "f32", sequences, MAX_PATH, whole.vocab_size),
        work("part_candidates", "i32", sequences, MAX_PATH, top_k_parts(whole.vocab_size), MAX_CANDIDATES, 2),
        work("part_sums", "f32", sequences, MAX_PATH, top_k_parts(whole.vocab_size), 2),
        state("candidate_tokens", "i32", sequences, MAX_PATH, MAX_CANDIDATES),
        state("candidate_log_probs", "f32", sequences, MAX_PATH, MAX_CANDIDATES),
        state("tree_size", "i32", sequences),
        state("tree_token", "i32", sequences, MAX_NODES),
        state("tree_parent", "i32", sequences, MAX_NODES),
        state("tree_depth", "i32", sequences, MAX_NODES),
        state("accepted_count", "i32", sequences),
        state("accepted_nodes", "i32", sequences, MAX_PATH),
        state("accepted_tokens", "i32", sequences, MAX_PATH),
        state("num_tokens", "i32", 1),
        state("tokens", "i32", rows),
        state("row_sequence", "i32", rows),
        state("row_position", "i32", rows),
        state("row_prefix", "i32", rows),
        state("row_slot", "i32", rows),
        state("row_path", "i32", rows, MAX_PATH),
        state("next_token", "i32", choices),
        state("logits", "f32", choices, spec.vocab_size),
        state("logit_begin", "i32", sequences + 1),
        state("num_logits", "i32", 1),
        state("logit_row", "i32", choices),
        state("logit_sequence", "i32", choices),
        state("logit_position", "i32", choices),
        work("residual", "f32", rows, spec.hidden_size),
        work("hidden", act, rows, spec.hidden_size),
        work("kv_a", "f32", rows, (spec.q_lora_rank or 0) + spec.cache_row_dim),
        work("q", act, rows, heads, spec.qk_head_dim),
        work("query", act, rows, heads, spec.cache_row_dim),
        work("split_values", "bf16" if mode.wgmma else "f32", group, splits, heads, spec.kv_lora_rank),
        work("split_max", "f32", group, *sums),
        work("split_sum", "f32", group, *sums),
        work("latent", act, rows, heads, spec.kv_lora_rank),
        work("attention", act, rows, heads, spec.v_head_dim),
    ]
    if rows > group:
        found.append(work("group_rows", "i32", -(-rows // group)))
    if mode.wgmma:
        found.append(work("attention_shares", "i32", -(-rows // group), share_bytes(spec) // 4))
    if spec.q_lora_rank is not None:
        found.append(work("q_a", act, rows, spec.q_lora_rank))
    if spec.first_k_dense_replace:
        found.append(work("mlp", act, rows, spec.intermediate_size))
    if spec.has_moe:
        experts, top_k = spec.n_routed_experts or 0, spec.num_experts_per_tok
        found += [
            work("router_logits", "f32", rows, experts),
            work("topk_experts", "i32", rows, top_k),
            work("topk_weights", "f32", rows, top_k),
            work("num_active", "i32", 1),
            work("active_expert", "i32", experts),
            work("active_begin", "i32", experts),
            work("active_end", "i32", experts),
            work("assignments", "i32", rows, top_k),
            work("expert_mlp", act, rows, top_k, spec.moe_intermediate_size),
            work("expert_output", "f32", rows, top_k, spec.hidden_size),
        ]
        if spec.shared_intermediate_size:
            found.append(work("shared_mlp", act, rows, spec.shared_intermediate_size))
    if not shard.whole:
        found += [
            work("attention_part", "f32", rows, spec.hidden_size),
            work("mlp_part", "f32", rows, spec.hidden_size),
            work("logits_parts", "f32", shard.ranks, choices, spec.vocab_size),
            work("whole_logits", "f32", choices, whole.vocab_size),
        ]
        if shard.exchange == "gather":
            found += [
                work("parts", "f32", shard.ranks, rows, spec.hidden_size),
                work("choice", "i32", choices, 2),
                work("choices", "i32", shard.ranks, choices, 2),
            ]
        else:
            for name, most, width in (("sum", rows, spec.hidden_size), ("choice", choices, 2), ("logits", choices, spec.vocab_size)):
                found += [  # a word and its round, for each of two turns
                    Buffer(f"inbox_{name}", "i32", (2, shard.ranks, most, width, 2), "inbox"),
                    Buffer(f"rounds_{name}", "i32", (most, column_blocks(width)), "counter"),
                ]
    return tuple(found)


def gathers(whole: Spec, shard: Shard) -> tuple[Gather, ...]:
    """The collectives of several ranks that are no kernels."""
    if shard.whole or shard.exchange == "peer":
        return ()
    spec = part_of(whole, shard.ranks)
    return (
        Gather("gather_attention", "attention_part", "parts", 4 * spec.hidden_size),
        Gather("gather_mlp", "mlp_part", "parts", 4 * spec.hidden_size),
        Gather("gather_choice", "choice", "choices", 8),
        Gather("gather_logits", "logits", "logits_parts", 4 * spec.vocab_size),
    )


def max_splits(spec: Spec, mode: Mode, limits: Limits) -> int:
    return attention_splits(spec, mode).count(limits.capacity)


def cache_slots(mode: Mode, limits: Limits) -> int:
    """Slots of a sequence's part of the cache: whole tiles, where it lies in tiles (``Plan.key_tiles``)."""
    return -(-limits.capacity // WGMMA_TILE) * WGMMA_TILE if mode.wgmma else limits.capacity


def attention_rows(spec: Spec, mode: Mode, limits: Limits) -> int:
    """Token rows of one attention launch; a step with more has several, one after another over the same partial values."""
    return min(limits.max_rows, ATTENTION_ROWS[spec.kv_lora_rank]) if mode.wgmma else limits.max_rows


def programs(whole: Spec, mode: Mode, limits: Limits, shard: Shard) -> tuple[Program, ...]:
    """Every program. ``prefill`` takes tokens that the host wrote, ``decode`` the sequences' root tokens, ``verify`` drafted trees."""
    spec = part_of(whole, shard.ranks)
    sequences = limits.max_sequences
    prefill, decode, verify = (
        _forward(spec, mode, limits, shard, start, rows, few)
        for start, rows, few in (
            ((_chain_rows(from_root=False), _logit_rows()), limits.max_tokens, False),
            ((_chain_rows(from_root=True),), sequences, True),
            (_tree_launches(), sequences * MAX_NODES, True),
        )
    )
    found = []
    for suffix, choose in _choices(spec, shard, limits.max_logits):
        found += [
            Program(f"prefill{suffix}", (*prefill, Stage((*_of_logits(choose), _advance("logit_begin"))))),
            Program(f"decode{suffix}", (*decode, Stage((*choose, _advance("step_begin"))))),
            Program(f"verify{suffix}", (*verify, Stage((*choose, *_commit_launches(mode, limits))))),
        ]
    return (*found, Program("draft_top_k", (Stage(top_k_launches()),)))


def top_k_launches() -> tuple[Launch, ...]:
    """The candidates of the step's draft rows."""
    parts = _buffers("part_candidates part_sums")
    return (
        launch("top_k_parts", *_buffers("step_count draft_shape draft_logits"), *parts),
        launch("top_k", *_buffers("step_count draft_shape"), *parts, *_buffers("candidate_tokens candidate_log_probs")),
    )


def _choices(spec: Spec, shard: Shard, rows: int) -> tuple[tuple[str, tuple[Launch, ...]], ...]:
    """How a step's next tokens are chosen, by the suffix of its program's name: one way for one rank, two for several."""
    drawn = "row_sequence row_position temperature top_k top_p min_p seed next_token"
    if shard.whole:
        return (
            ("", (launch("argmax", *_buffers("num_tokens logits next_token")), launch("sample", *_buffers(f"num_tokens logits {drawn}")))),
        )
    part = (*_buffers("num_tokens logits"), integer(shard.rank * spec.vocab_size))
    greedy: tuple[Launch, ...] = (
        launch("argmax", *part, buffer("choice")),
        launch("gather_choice"),
        launch("rank_choice", *_buffers("num_tokens choices"), ROWS, buffer("next_token")),
    )
    if shard.exchange == "peer":
        places = Arg("ranks", "inbox_choice"), integer(shard.rank), integer(rows)
        greedy = (launch("rank_argmax", *part, *places, *_buffers("rounds_choice next_token")),)
    sampled = (*joined_logits("whole_logits", rows, shard), launch("sample", *_buffers(f"num_tokens whole_logits {drawn}")))
    return ("", greedy), (SAMPLED, (*greedy, *sampled))


def joined_logits(target: str, rows: int, shard: Shard) -> tuple[Launch, ...]:
    """The ranks' logits as whole rows in the buffer ``target``. ``rows``: the most that a step has logits of."""
    join = launch("rank_logits", *_buffers("num_tokens logits_parts"), ROWS, buffer(target))
    if shard.exchange == "gather":
        return launch("gather_logits"), join
    places = Arg("ranks", "inbox_logits"), integer(shard.rank), integer(rows), ROWS
    return launch("gather_logits", *_buffers("num_tokens logits"), *places, *_buffers("rounds_logits logits_parts")), join


# ---- arguments ------------------------------------------------------------------------------------------------------


def launch(kernel: str, *args: Arg) -> Launch:
    return Launch(kernel, args)


def buffer(name: str) -> Arg:
    return Arg("buffer", name)


def weight(name: str) -> Arg:
    return Arg("weight", name)


def layer_weight(name: str) -> Arg:
    return Arg("layer_weight", name)


def integer(value: int) -> Arg:
    return Arg("int", value=value)


KV_CACHE = Arg("layer_buffer", "kv_cache")
ROWS = Arg("rows")
SAMPLED = "_sampled"  #: suffix of the programs that draw tokens, where those that do not are programs of their own


def _buffers(names: str) -> tuple[Arg, ...]:
    return tuple(buffer(name) for name in names.split())


# ---- before and after the model -------------------------------------------------------------------------------------


def _chain_rows(from_root: bool) -> Launch:
    step = "step_count step_sequence step_begin num_tokens tokens sequence_length root_token"
    rows = "row_sequence row_position row_prefix row_slot"
    return launch("chain_rows", *_buffers(f"{step} {rows}"), integer(int(from_root)))


def _logit_rows() -> Launch:
    rows = "row_sequence row_position num_logits logit_row logit_sequence logit_position"
    return launch("logit_rows", *_buffers(f"step_count step_begin logit_begin {rows}"))


#: Buffers of the rows that have logits, by those of token rows.
_LOGIT_ROWS = {"num_tokens": "num_logits", "row_sequence": "logit_sequence", "row_position": "logit_position"}


def _of_logits(launches: tuple[Launch, ...]) -> tuple[Launch, ...]:
    """``launches`` over the rows that have logits, instead of all token rows."""
    return tuple(
        Launch(each.kernel, tuple(replace(arg, name=_LOGIT_ROWS.get(arg.name, arg.name)) for arg in each.args), "logits")
        for each in launches
    )


def _advance(begin: str) -> Launch:
    """``begin``: the buffer that says where each place's choices begin."""
    return launch("advance", *_buffers(f"step_count step_sequence step_begin {begin} next_token sequence_length root_token"))


def _tree_launches() -> tuple[Launch, ...]:
    drafted = "step_count step_sequence draft_shape candidate_tokens candidate_log_probs root_token"
    built = "tree_size tree_token tree_parent tree_depth"
    step = "step_count step_sequence step_begin"
    rows = "sequence_length num_tokens tokens row_sequence row_position row_prefix row_slot row_path"
    return launch("tree_build", *_buffers(f"{drafted} {built}")), launch("tree_rows", *_buffers(f"{step} {built} {rows}"))


def _commit_launches(mode: Mode, limits: Limits) -> tuple[Launch, ...]:
    tree = "step_count step_sequence step_begin tree_size tree_token tree_parent next_token"
    accepted = "accepted_count accepted_nodes accepted_tokens sequence_length root_token"
    compact = "step_count step_begin accepted_count accepted_nodes row_sequence row_prefix kv_cache"
    return (
        launch("tree_accept", *_buffers(f"{tree} {accepted}")),
        launch("kv_compact", *_buffers(compact), integer(cache_slots(mode, limits)), integer(limits.max_sequences)),
    )


# ---- the model ------------------------------------------------------------------------------------------------------


def _forward(
    spec: Spec, mode: Mode, limits: Limits, shard: Shard, start: tuple[Launch, ...], rows: int, few: bool
) -> tuple[Stage, ...]:  # fmt: skip
    """From ``start``, which makes the rows, to their logits; ``rows``: the most there can be. ``few``: made for few rows, with several
    kernels' work in one launch, and logits of all of them; the bits are the same.
    """
    groups = -(-rows // attention_rows(spec, mode, limits))
    attention = _attention(spec, mode, limits, shard, few, groups)
    dense, moe = spec.first_k_dense_replace, spec.moe_layers
    if groups > 1:
        start = (*start, launch("row_groups", *_buffers("num_tokens group_rows"), integer(groups)))
    if mode.wgmma:
        start = (*start, *(_shares(spec, mode, limits, group if groups > 1 else None) for group in range(groups)))
    head = launch("lm_head", *_buffers("num_tokens hidden"), weight("lm_head"), buffer("logits"))
    norm, last = _norm(layer_weight("input_layernorm")), spec.num_hidden_layers - 1
    layers = []
    if dense:
        layers.append((_dense_mlp(limits, shard), (0, dense)))
    if spec.has_moe:
        layers.append((_moe(spec, mode, limits, shard, few), moe))
    if not (few and norms_sums(shard.ranks, shard.exchange)):
        inside = (Stage((norm, *attention, *mlp), span) for mlp, span in layers)
        ends = (_norm(weight("norm")), head) if few else (_norm_logits(), *_of_logits((head,)))
        return Stage(start), Stage(embedding(spec, limits, shard)), *inside, Stage(ends)
    # a layer's last sum is normalised for the next one, or for the head
    stages = [Stage(start), Stage(_normed(spec, embedding(spec, limits, shard), norm))]
    following = _norm(replace(layer_weight("input_layernorm"), value=1))
    for mlp, (first, stop) in layers:
        if first < min(stop, last):
            stages.append(Stage((*attention, *_normed(spec, mlp, following)), (first, min(stop, last))))
        if stop > last:
            stages.append(Stage((*attention, *_normed(spec, mlp, _norm(weight("norm")))), (last, stop)))
    return (*stages, Stage((head,)))


def embedding(spec: Spec, limits: Limits, shard: Shard) -> tuple[Launch, ...]:
    """The step's tokens into the residual. ``spec`` is a rank's part."""
    start = (*_buffers("num_tokens tokens"), weight("embed_tokens"))
    if shard.whole:
        return (launch("embed", *start, buffer("residual")),)
    return launch("embed", *start, integer(shard.rank * spec.vocab_size), *_buffers("mlp_part residual")), *summed("mlp", limits, shard)


def summed(what: str, limits: Limits, shard: Shard, bias: Arg | None = None, count: str = "num_tokens") -> tuple[Launch, ...]:
    """The ranks' parts of ``what`` (attention, mlp) into the residual, of as many token rows as the buffer ``count`` says."""
    name, end = "rank_sum_bias" if bias else "rank_sum", (*((bias,) if bias else ()), buffer("residual"))
    if shard.exchange == "gather":
        return launch(f"gather_{what}"), launch(name, *_buffers(f"{count} parts"), ROWS, *end)
    places = Arg("ranks", "inbox_sum"), integer(shard.rank), integer(limits.max_rows)
    return (launch(name, *_buffers(f"{count} {what}_part"), *places, buffer("rounds_sum"), *end),)


def _norm(gain: Arg) -> Launch:
    return launch("rmsnorm_hidden", *_buffers("num_tokens residual"), gain, buffer("hidden"))


def _norm_logits() -> Launch:
    args = (*_buffers("num_logits logit_row residual"), weight("norm"), buffer("hidden"))
    return Launch("rmsnorm_logits", args, "logits")


def _normed(spec: Spec, launches: tuple[Launch, ...], norm: Launch) -> tuple[Launch, ...]:
    """``launches``, the last of which is a sum over ranks of what the one before computes, with ``norm`` behind it: this one sends its
    part to all ranks instead of leaving it in a buffer, and sum and norm are one launch.
    """
    *before, computes, added = launches
    count, part, *rest = added.args
    outbox = (*((part,) if computes.kernel == "moe_combine" and spec.shared_intermediate_size else ()), *rest[:4])
    place = computes.args.index(part)
    sends = launch(computes.kernel + SENT, *computes.args[:place], *outbox, *computes.args[place + 1 :])
    return *before, sends, launch(added.kernel + NORMED, count, *rest, *norm.args[2:])


def _linear(name: str, x: str, y: str, bias: bool = False) -> Launch:
    extra = (layer_weight(f"{name}_bias"),) if bias else ()
    return launch(name, *_buffers(f"num_tokens {x}"), layer_weight(name), *extra, buffer(y))


def _attention(spec: Spec, mode: Mode, limits: Limits, shard: Shard, few: bool, groups: int) -> tuple[Launch, ...]:
    """From the normalised residual to the one behind attention."""
    capacity = integer(cache_slots(mode, limits))
    if spec.q_lora_rank is None:
        queries: tuple[Launch, ...] = (_linear("q_proj", "hidden", "q"), _linear("kv_a_proj", "hidden", "kv_a", spec.attention_bias))
    else:
        queries = (
            _linear("q_a_kv_a_proj", "hidden", "kv_a", spec.attention_bias),
            launch("rmsnorm_q_a", *_buffers("num_tokens kv_a"), layer_weight("q_a_layernorm"), buffer("q_a")),
            _linear("q_b_proj", "q_a", "q"),
        )
    absorb = _linear("w_uk_absorb", "q", "query")
    rope = launch(
        "rope_cache", *_buffers("num_tokens row_sequence row_position row_slot kv_a"), layer_weight("kv_a_layernorm"),
        *_buffers("q cos_table sin_table"), KV_CACHE, buffer("query"), capacity,
    )  # fmt: skip
    values = _linear("w_uv_absorb", "latent", "attention")
    if few and holds_heads(spec, mode):
        absorb, values = replace(absorb, kernel=absorb.kernel + FEW), replace(values, kernel=values.kernel + FEW)
    queries = *queries, rope, absorb
    if few and caches_beside(spec, mode):
        gains = layer_weight("q_a_layernorm"), layer_weight("kv_a_layernorm")
        tables = _buffers("cos_table sin_table")
        cache = launch(
            CACHE_BESIDE,
            *_buffers("num_tokens row_sequence row_position row_slot kv_a"),
            *gains,
            *tables,
            buffer("q_a"),
            KV_CACHE,
            capacity,
        )
        *inputs, target = absorb.args
        queries = queries[0], cache, queries[2], launch(absorb.kernel, *inputs, buffer("row_position"), *tables, target)
    norm = _norm(layer_weight("post_attention_layernorm"))
    joins = few and combines_beside(spec, mode)
    attend = [each for group in range(groups) for each in _attend(spec, mode, limits, group if groups > 1 else None, joins)]
    out: tuple[Launch, ...] = (_linear("o_proj", "attention", "residual", spec.attention_bias), norm)
    if not shard.whole:
        bias = layer_weight("o_proj_bias") if spec.attention_bias else None
        out = (_linear("o_proj", "attention", "attention_part"), *summed("attention", limits, shard, bias))
        out = _normed(spec, out, norm) if few and norms_sums(shard.ranks, shard.exchange) else (*out, norm)
    return *queries, *attend, *(() if joins else (values,)), *out


def _of_group(spec: Spec, mode: Mode, limits: Limits, group: int | None, names: str) -> tuple[Arg, ...]:
    """Buffers from the first row of a group of rows on, or of all (None); ``count``: how many rows those are."""
    rows, head_bytes = attention_rows(spec, mode, limits), spec.num_attention_heads * (2 if mode.compute == "bf16" else 4)
    row_bytes = {
        "row_path": 4 * MAX_PATH,
        "query": head_bytes * spec.cache_row_dim,
        "latent": head_bytes * spec.kv_lora_rank,
        "attention": head_bytes * spec.v_head_dim,
    }

    def at(name: str) -> Arg:
        if name == "count":
            return buffer("num_tokens") if group is None else Arg("buffer", "group_rows", 4 * group)
        if name == "attention_shares":
            return Arg("buffer", name, (group or 0) * share_bytes(spec))
        return Arg("buffer", name, (group or 0) * rows * row_bytes.get(name, 4))

    return tuple(map(at, names.split()))


def _shares(spec: Spec, mode: Mode, limits: Limits, group: int | None) -> Launch:
    """What each block of ``_attend``'s attention does, where it is told."""
    args = _of_group(spec, mode, limits, group, "count row_sequence row_position row_prefix attention_shares")
    return launch("attention_shares", *args, integer((group or 0) * attention_rows(spec, mode, limits)))


def _attend(spec: Spec, mode: Mode, limits: Limits, group: int | None, joins: bool) -> tuple[Launch, Launch]:
    """Attention of a group of rows, or of all (None), and the joining of its splits, which w_uv is in one launch with if ``joins``."""
    splits, parts = integer(max_splits(spec, mode, limits)), _buffers("split_values split_max split_sum")
    rows = "attention_shares" if mode.wgmma else "count row_sequence row_position row_prefix"
    seen = _of_group(spec, mode, limits, group, f"{rows} row_path query")
    attend = launch("mla_attention", *seen, KV_CACHE, *parts, integer(cache_slots(mode, limits)), splits)
    joined = (*_of_group(spec, mode, limits, group, "count row_position"), *parts)
    target = _of_group(spec, mode, limits, group, "attention" if joins else "latent")
    if joins:
        most = integer(limits.max_rows - (group or 0) * attention_rows(spec, mode, limits))
        return attend, launch(COMBINE_BESIDE, *joined, layer_weight("w_uv_absorb"), *target, splits, most)
    return attend, launch("mla_combine", *joined, *target, splits)


def _dense_mlp(limits: Limits, shard: Shard) -> tuple[Launch, ...]:
    gate_up = _linear("gate_up_proj", "hidden", "mlp")
    if shard.whole:
        return gate_up, _linear("down_proj", "mlp", "residual")
    return gate_up, _linear("down_proj", "mlp", "mlp_part"), *summed("mlp", limits, shard)


def _moe(spec: Spec, mode: Mode, limits: Limits, shard: Shard, few: bool) -> tuple[Launch, ...]:
    """The shared experts' output is added to the target first, then the routed experts'."""
    target = "residual" if shard.whole else "mlp_part"
    joined = () if shard.whole else summed("mlp", limits, shard)
    bias = (layer_weight("router_bias"),) if spec.has_router_bias else ()
    lists = _buffers("num_active active_expert active_begin active_end assignments")
    logits = launch("router_logits", *_buffers("num_tokens hidden"), layer_weight("router"), buffer("router_logits"))
    chosen = (buffer("router_logits"), *bias, *_buffers("topk_experts topk_weights"))
    routed: tuple[Launch, ...] = (
        logits,
        launch("router_topk", buffer("num_tokens"), *chosen),
        launch("moe_sort", *_buffers("num_tokens topk_experts"), *lists),
    )
    if spec.shared_intermediate_size:
        gate_up, down = _linear("shared_gate_up_proj", "hidden", "shared_mlp"), _linear("shared_down_proj", "shared_mlp", target)
        if few and routes_beside(spec, mode):
            first: tuple[Launch, ...] = (logits, gate_up)
            if has_bf16_router(spec, mode):
                first = (launch(ROUTER_BESIDE, *gate_up.args, *logits.args[2:]),)
            routed = *first, launch(CHOICE_BESIDE, *down.args, *chosen, *lists)
        else:
            routed = *routed, gate_up, down
    return (
        *routed,
        launch("experts_gate_up", *lists, buffer("hidden"), layer_weight("experts_gate_up"), buffer("expert_mlp")),
        launch("experts_down", *lists, buffer("expert_mlp"), layer_weight("experts_down"), buffer("expert_output")),
        launch("moe_combine", *_buffers(f"num_tokens topk_weights expert_output {target}")),
        *joined,
    )
