"""What a drafter adds to its target's programs: features and cache rows of what was committed, and the pass that drafts a block."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from kdgen.plan.ir import ITEM_BYTES, Arg, DType
from kdgen.plan.ops.dense import Layer, LinearOp, Sublayer
from kdgen.plan.ops.drafter import DraftBlockOp, DraftContextOp, DraftHeadsOp, GqaAttentionOp, GqaCombineOp
from kdgen.plan.ops.norm import RmsNormOp
from kdgen.plan.ops.op import Context, Op, buffer, layer_weight, weight
from kdgen.plan.ops.ranks import whole_logits
from kdgen.plan.ops.rows import EmbedOp
from kdgen.plan.passes import shard
from kdgen.plan.shard import WHOLE, Shard, shares_draft
from kdgen.plan.step import Ops, lm_head, top_k
from kdgen.plan.tuning import mode_of
from kdgen.spec.drafter import DraftSpec
from kdgen.spec.model import Spec


def own_shard(spec: Spec, shard: Shard) -> Shard:
    """The drafter's place among ``shard``'s ranks: one of its own where they do not share it."""
    return shard if shares_draft(spec, shard.ranks) else WHOLE


@dataclass(frozen=True)
class Drafter:
    """A drafter's steps. ``target`` is the target's context, ``c`` the drafter's, ``draft`` the part of it that a rank has."""

    target: Context
    c: Context
    draft: DraftSpec

    @classmethod
    def of(cls, target: Context) -> Drafter | None:
        """The drafter of ``target``'s spec, if it has one."""
        draft = target.spec.draft
        if draft is None:
            return None
        c = replace(target, mode=mode_of(draft, target.mode.compute), shard=own_shard(target.whole, target.shard))
        return cls(target, c, draft)

    def context(self, from_tree: bool) -> tuple[Ops, ...]:
        """From the features of what a step committed to rows of the draft cache."""
        d, ranks = self.draft, self.c.shard.ranks
        fc = Layer(
            "draft_fc", "drafter", "a token's features to the drafter's width", d.hidden_size, d.feature_width // ranks,
            x_stride=d.feature_width, out_float=True,
        )  # fmt: skip
        first = self.c.shard.rank * fc.cols * ITEM_BYTES[self.target_type]  # each rank takes some of the features
        project = LinearOp(
            self.c, fc, buffer("context_features", first), buffer("residual"), adds_to=None if self.c.shard.whole else "mlp",
            count="context_count", count_is_ready=False, layered=False,
        )  # fmt: skip
        start = DraftContextOp(self.c, d, from_tree), project, self._norm(weight("draft_hidden_norm"), "context_count")
        kv = Ops((self._kv("context_count"), DraftHeadsOp(self.c, d, queries=False)), (0, d.num_hidden_layers))
        return *shard([Ops(start)], self.c), kv

    def pass_over_blocks(self) -> tuple[Ops, ...]:
        """One pass over the blocks of the step's sequences, up to the candidates of each depth. Row 0, the root's own, proposes nothing.

        Its rows stand where the verify step's will.
        """
        t, d = self.target, self.draft
        begin = (DraftBlockOp(self.c, d), *shard([Ops((EmbedOp(t),))], t)[0].ops)
        joined = () if t.shard.whole else whole_logits(t, "draft_logits", t.limits.max_logits)
        logits = lm_head(t, "draft_logits" if t.shard.whole else "logits")
        end = (self._norm(weight("draft_final_norm")), logits, *joined, *top_k(t))
        runs = itertools.groupby(range(d.num_hidden_layers), key=d.window)
        alike = [(window, list(members)) for window, members in runs]
        layers = [Ops(self._layer(window), (run[0], run[-1] + 1)) for window, run in alike]
        return Ops(begin), *shard(layers, self.c), Ops(end)

    @property
    def target_type(self) -> DType:
        return "bf16" if self.target.mode.compute == "bf16" else "f32"

    def _layer(self, window: int) -> tuple[Op, ...]:
        d, hidden, bias = self.draft, self.draft.hidden_size, self.draft.attention_bias
        q = Layer("draft_q_proj", "drafter", "queries of the block", d.query_width, hidden, bias=bias, out_float=True)
        o = Layer("draft_o_proj", "drafter", "attention output added to the residual", hidden, d.query_width, bias=bias)
        gate_up = Layer("draft_gate_up_proj", "drafter", "SwiGLU: silu(gate) * up", 2 * d.intermediate_size, hidden, gated=True)
        down = Layer("draft_down_proj", "drafter", "MLP output added to the residual", hidden, d.intermediate_size)
        return (
            self._norm(layer_weight("draft_input_layernorm")),
            self._linear(q, "hidden", "draft_q"),
            self._kv(),
            DraftHeadsOp(self.c, d, queries=True),
            GqaAttentionOp(self.c, d, window),
            GqaCombineOp(self.c, d, window),
            self._into_residual(o, "draft_attended", "attention"),
            self._norm(layer_weight("draft_post_attention_layernorm")),
            self._linear(gate_up, "hidden", "draft_mlp"),
            self._into_residual(down, "draft_mlp", "mlp"),
        )

    def _kv(self, count: str = "num_tokens") -> LinearOp:
        d = self.draft
        layer = Layer("draft_kv_proj", "drafter", "[keys | values]", 2 * d.key_width, d.hidden_size, bias=d.attention_bias, out_float=True)
        return self._linear(layer, "hidden", "draft_kv", count)

    def _linear(self, layer: Layer, x: str, y: str, count: str = "num_tokens") -> LinearOp:
        # some rows are context tokens, which the kernel right before counts
        return LinearOp(self.c, layer, buffer(x), buffer(y), count=count, count_is_ready=False)

    def _into_residual(self, layer: Layer, x: str, what: Sublayer) -> LinearOp:
        return replace(self._linear(layer, x, "residual"), accumulate=True, adds_to=what)

    def _norm(self, gain: Arg, count: str = "num_tokens") -> RmsNormOp:
        d = self.draft
        return RmsNormOp(
            self.c, "draft_norm", d.hidden_size, d.rms_norm_eps, "residual", gain, "hidden", count=count, count_is_ready=False,
            group="drafter",
        )  # fmt: skip
