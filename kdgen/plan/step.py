"""One forward, readable as a model: the ops of an MLA layer, of a mixture of experts, of a dense MLP, of the head, in order.

These are the ops of one GPU and of many rows. ``kdgen.plan.passes`` rewrites them for ranks, for few rows, for a drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

from kdgen.plan.ir import Group
from kdgen.plan.ops.attention import MlaAttentionOp, RopeCacheOp, kv_a_stride, norm_q_a
from kdgen.plan.ops.attention_combine import MlaCombineOp
from kdgen.plan.ops.dense import Layer, LinearOp, Sublayer
from kdgen.plan.ops.experts import ExpertsOp, MoeCombineOp
from kdgen.plan.ops.logits import ArgmaxOp, SampleOp
from kdgen.plan.ops.norm import RmsNormOp
from kdgen.plan.ops.op import Context, Op, buffer, layer_weight, weight
from kdgen.plan.ops.ranks import GatherOp, PeerArgmaxOp, RankChoiceOp, whole_logits
from kdgen.plan.ops.router import MoeSortOp, RouterLogitsOp, RouterTopKOp
from kdgen.plan.ops.rows import EmbedOp
from kdgen.plan.ops.tree import KvCompactOp, TopKOp, TopKPartsOp, TreeAcceptOp, TreeBuildOp, TreeRowsOp

PROJECTIONS: Group = "attention projections"
SAMPLED = "_sampled"  #: suffix of the programs that draw tokens, where those that do not are programs of their own


@dataclass(frozen=True)
class Ops:
    """Ops in order; with ``layers`` = (first, stop) all of them once a layer."""

    ops: tuple[Op, ...]
    layers: tuple[int, int] | None = None


def model(c: Context) -> tuple[Ops, ...]:
    """From the step's tokens to logits of every row."""
    s = c.spec
    layers = []
    if s.first_k_dense_replace:
        layers.append(Ops((*attention(c), *dense_mlp(c)), (0, s.first_k_dense_replace)))
    if s.has_moe:
        layers.append(Ops((*attention(c), *mixture_of_experts(c)), s.moe_layers))
    return Ops((EmbedOp(c),)), *layers, Ops(head(c))


def attention(c: Context) -> tuple[Op, ...]:
    """Multi-head latent attention: the residual plus attention over everything before, in the latent space."""
    s, heads, row = c.spec, c.spec.num_attention_heads, c.spec.cache_row_dim
    q_width = heads * s.qk_head_dim
    if s.q_lora_rank is None:
        kv_a = Layer("kv_a_proj", PROJECTIONS, "[c_kv | k_rope]", row, s.hidden_size, bias=s.attention_bias, out_float=True)
        queries: tuple[Op, ...] = (
            _linear(c, Layer("q_proj", PROJECTIONS, "queries", q_width, s.hidden_size), "hidden", "q"),
            _linear(c, kv_a, "hidden", "kv_a"),
        )
    else:
        summary = "[q_a | c_kv | k_rope] in one reading of h"
        both = Layer("q_a_kv_a_proj", PROJECTIONS, summary, kv_a_stride(s), s.hidden_size, bias=s.attention_bias, out_float=True)
        q_b = Layer("q_b_proj", PROJECTIONS, "queries from their low-rank form", q_width, s.q_lora_rank)
        queries = _linear(c, both, "hidden", "kv_a"), norm_q_a(c), _linear(c, q_b, "q_a", "q")
    w_uk = Layer(
        "w_uk_absorb", PROJECTIONS, "per head, q_nope into the latent space", s.kv_lora_rank, s.qk_nope_head_dim, batch=heads,
        x_stride=q_width, x_batch_stride=s.qk_head_dim, y_stride=heads * row, y_batch_stride=row,
    )  # fmt: skip
    w_uv = Layer(
        "w_uv_absorb", PROJECTIONS, "per head, attention output out of the latent space", s.v_head_dim, s.kv_lora_rank, batch=heads,
        x_batch_stride=s.kv_lora_rank, y_batch_stride=s.v_head_dim,
    )  # fmt: skip
    o_proj = Layer(
        "o_proj", PROJECTIONS, "attention output added to the residual", s.hidden_size, heads * s.v_head_dim, bias=s.attention_bias
    )  # fmt: skip
    return (
        norm(c, "input_layernorm"),
        *queries,
        RopeCacheOp(c),
        _linear(c, w_uk, "q", "query"),
        MlaAttentionOp(c),
        MlaCombineOp(c),
        _linear(c, w_uv, "latent", "attention"),
        into_residual(c, o_proj, "attention", "attention"),
    )


def dense_mlp(c: Context) -> tuple[Op, ...]:
    """The residual plus a SwiGLU MLP."""
    return norm(c, "post_attention_layernorm"), *_swiglu(c, "", c.spec.intermediate_size, "mlp")


def mixture_of_experts(c: Context) -> tuple[Op, ...]:
    """The residual plus the shared experts' output, then plus the routed experts'."""
    width = c.spec.shared_intermediate_size
    return (
        norm(c, "post_attention_layernorm"),
        RouterLogitsOp(c),
        RouterTopKOp(c),
        MoeSortOp(c),
        *(_swiglu(c, "shared_", width, "shared_mlp") if width else ()),
        ExpertsOp(c, "gate_up"),
        ExpertsOp(c, "down"),
        MoeCombineOp(c),
    )


def head(c: Context) -> tuple[Op, ...]:
    """Logits of every row, or of a rank's part of the vocabulary."""
    gain = RmsNormOp(c, "rmsnorm_hidden", c.spec.hidden_size, c.spec.rms_norm_eps, "residual", weight("norm"), "hidden")
    return gain, lm_head(c, "logits")


def lm_head(c: Context, target: str) -> LinearOp:
    layer = Layer("lm_head", "embedding and logits", "logits", c.spec.vocab_size, c.spec.hidden_size, out_float=True)
    return LinearOp(c, layer, buffer("hidden"), buffer(target), layered=False)


def norm(c: Context, gain: str) -> RmsNormOp:
    """The residual normalised, into ``hidden``."""
    return RmsNormOp(c, "rmsnorm_hidden", c.spec.hidden_size, c.spec.rms_norm_eps, "residual", layer_weight(gain), "hidden")


def into_residual(c: Context, layer: Layer, x: str, what: Sublayer) -> LinearOp:
    """A layer whose outputs are added to the residual."""
    return LinearOp(c, layer, buffer(x), buffer("residual"), accumulate=True, adds_to=what)


def _linear(c: Context, layer: Layer, x: str, y: str) -> LinearOp:
    return LinearOp(c, layer, buffer(x), buffer(y))


def _swiglu(c: Context, prefix: str, width: int, between: str) -> tuple[Op, ...]:
    hidden = c.spec.hidden_size
    group: Group = "shared experts" if prefix else "dense MLPs"
    gate_up = Layer(f"{prefix}gate_up_proj", group, "SwiGLU: silu(gate) * up", 2 * width, hidden, gated=True)
    down = Layer(f"{prefix}down_proj", group, "MLP output added to the residual", hidden, width)
    return _linear(c, gate_up, "hidden", between), into_residual(c, down, between, "mlp")


# ---- before and after the model -------------------------------------------------------------------------------------


def tree_rows(c: Context) -> tuple[Op, ...]:
    """Draft trees from their candidates, and their rows."""
    return TreeBuildOp(c), TreeRowsOp(c)


def commit_tree(c: Context) -> tuple[Op, ...]:
    """The accepted path committed, its cache rows at its tokens' positions."""
    return TreeAcceptOp(c), KvCompactOp(c)


def top_k(c: Context) -> tuple[Op, ...]:
    """The candidates of the step's draft rows."""
    return TopKPartsOp(c), TopKOp(c)


def choices(c: Context) -> tuple[tuple[str, tuple[Op, ...]], ...]:
    """How a step's next tokens are chosen, by the suffix of its program's name: one way for one rank, two for several, which gather whole
    rows of logits only where a token is drawn."""
    most = c.limits.max_logits
    if c.shard.whole:
        return (("", (ArgmaxOp(c), SampleOp(c, "logits"))),)
    greedy: tuple[Op, ...] = (PeerArgmaxOp(c, most),)
    if c.shard.exchange == "gather":
        greedy = ArgmaxOp(c), GatherOp(c, "choice"), RankChoiceOp(c)
    return ("", greedy), (SAMPLED, (*greedy, *whole_logits(c, "whole_logits", most), SampleOp(c, "whole_logits")))
