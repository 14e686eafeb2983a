"""A DFlash drafter's description (arXiv 2602.06036): a few Qwen3-style layers that fill in a block of masked tokens at once.

The drafter has no embedding and no head of its own. It uses its target's, and it has its target's vocabulary and hidden size.
It reads the outputs of some of the target's layers. ``load_draft_config`` (``kdgen.spec.published_drafter``) reads published ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from kdgen.errors import Finding, KdgenError, SpecError
from kdgen.spec.fields import MAX_BYTES, MAX_DIM, Frozen, Layers, Positive, RopeScaling, Size, TensorGroup, findings, keys, show_at

#: Rows of a draft block, root included: candidates and tree paths are kept for no more.
MAX_BLOCK = 16

LayerType = Literal["full_attention", "sliding_attention"]


def no_drafter(name: str) -> KdgenError:
    """For a spec called ``name`` where a drafter is needed."""
    return KdgenError(f"{name} has no drafter: add a draft: section to its spec (of `kdgen generate`, --draft DIR names a published one)")


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class DraftSpec(Frozen):
    """One drafter; field names are those of its published config. Raises as ``Spec`` does: ``from_mapping`` with every finding.

    ``sliding_mask`` says what a row of the block at position p sees in ``sliding_attention`` layers, W being ``sliding_window``:
    ``causal``: p − W + 1 … p, as serving engines run published drafters; ``symmetric``: everything closer than W;
    ``none``: everything. Rows of other layers see everything, and nothing is causal inside the block.

    ``rope_scaling.attention_factor`` is the amplitude of cos and sin; without it the amplitude follows from the mscales.
    """

    always_written: ClassVar[Set[str]] = keys("rope_scaling attention_bias layer_types sliding_window sliding_mask dtype")

    hidden_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Annotated[int, Field(gt=0, le=512)]
    intermediate_size: Size
    rms_norm_eps: Positive
    rope_theta: Positive
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    block_size: Annotated[int, Field(ge=2, le=MAX_BLOCK)]
    mask_token_id: Annotated[int, Field(ge=0, le=MAX_DIM)]
    target_layer_ids: Annotated[tuple[Annotated[int, Field(ge=0, le=MAX_DIM)], ...], BeforeValidator(_tuple), Field(min_length=1)]
    layer_types: Annotated[tuple[LayerType, ...], BeforeValidator(_tuple)] = ()
    sliding_window: Size | None = None
    sliding_mask: Literal["causal", "symmetric", "none"] = "causal"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    @model_validator(mode="after")
    def _consistent(self) -> DraftSpec:
        pairs = [*draft_contradictions(self.__dict__)] or [*_overflows(self)]
        if pairs:
            text = "; ".join(f"{key}: {reason}" for key, reason in pairs)
            raise PydanticCustomError("contradictions", "{text}", {"text": text, "pairs": pairs})
        return self

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], file: str = "draft") -> DraftSpec:
        """Validate plain data. Raises SpecError with every finding; ``file`` names the source in them."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            details = error.errors(include_url=False)
        found = findings(details, file, cls, {"rope_scaling": RopeScaling})
        pairs = [pair for detail in details if not detail["loc"] for pair in detail["ctx"]["pairs"]]
        raise SpecError(found + [Finding(file, key, show_at(values, key), reason) for key, reason in pairs])

    # ---- derived ------------------------------------------------------------------------------------------------------

    @property
    def query_width(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Elements of one token's keys in one layer, and of its values."""
        return self.num_key_value_heads * self.head_dim

    @property
    def group_heads(self) -> int:
        """Query heads that share a key head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def feature_width(self) -> int:
        """Elements of one token's features: the outputs of ``target_layer_ids``, one after another."""
        return len(self.target_layer_ids) * self.hidden_size

    def window(self, layer: int) -> int:
        """Positions that a row of this layer sees before itself, itself included; 0 where it sees everything."""
        slides = bool(self.layer_types) and self.layer_types[layer] == "sliding_attention" and self.sliding_mask != "none"
        return self.sliding_window or 0 if slides else 0

    # ---- checkpoint tensors -------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[TensorGroup]:
        """Every tensor of a published checkpoint: [outputs, inputs] for matrices."""
        hidden = self.hidden_size
        yield TensorGroup("fc.weight", (hidden, self.feature_width))
        yield TensorGroup("hidden_norm.weight", (hidden,), "small")
        yield TensorGroup("norm.weight", (hidden,), "small")
        for layer in range(self.num_hidden_layers):
            yield from self._layer_tensors(f"layers.{layer}.")

    def _layer_tensors(self, prefix: str) -> Iterator[TensorGroup]:
        hidden, width, attn = self.hidden_size, self.intermediate_size, f"{prefix}self_attn."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield TensorGroup(f"{prefix}{norm}.weight", (hidden,), "small")
        for norm in ("q_norm", "k_norm"):
            yield TensorGroup(f"{attn}{norm}.weight", (self.head_dim,), "small")
        projections = (
            ("q_proj", self.query_width, hidden),
            ("k_proj", self.key_width, hidden),
            ("v_proj", self.key_width, hidden),
            ("o_proj", hidden, self.query_width),
        )
        for name, rows, cols in projections:
            yield TensorGroup(f"{attn}{name}.weight", (rows, cols))
            if self.attention_bias:
                yield TensorGroup(f"{attn}{name}.bias", (rows,), "small")
        for name, rows, cols in (("gate_proj", width, hidden), ("up_proj", width, hidden), ("down_proj", hidden, width)):
            yield TensorGroup(f"{prefix}mlp.{name}.weight", (rows, cols))


def draft_contradictions(v: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, reason) for every rule that the fields in ``v``, all valid by themselves, break together."""
    if v["num_attention_heads"] % v["num_key_value_heads"]:
        yield "num_key_value_heads", f"does not divide num_attention_heads {v['num_attention_heads']}"
    if v["head_dim"] % 2:
        yield "head_dim", "must be even: RoPE rotates pairs"
    if v["num_attention_heads"] * v["head_dim"] > MAX_DIM:
        yield "num_attention_heads", "times head_dim is more than 2^31 - 1 rows"
    if len(v["target_layer_ids"]) * v["hidden_size"] > MAX_DIM:
        yield "target_layer_ids", "times hidden_size is more than 2^31 - 1 inputs"
    if any(a >= b for a, b in zip(v["target_layer_ids"], v["target_layer_ids"][1:], strict=False)):
        yield "target_layer_ids", "must ascend"
    if v["layer_types"] and len(v["layer_types"]) != v["num_hidden_layers"]:
        yield "layer_types", f"names {len(v['layer_types'])} layers of num_hidden_layers {v['num_hidden_layers']}"
    if "sliding_attention" in v["layer_types"] and v["sliding_window"] is None:
        yield "sliding_window", "missing, or not in use, and layer_types has layers that slide"
    if v["rope_scaling"] is not None and v["rope_theta"] <= 1:
        yield "rope_theta", "must exceed 1 with YaRN, which divides by its logarithm"


def target_contradictions(draft: DraftSpec, v: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, reason) for every field of ``draft`` that does not fit its target. ``v`` holds some of the target's fields."""
    if "hidden_size" in v and draft.hidden_size != v["hidden_size"]:
        yield "draft.hidden_size", f"must be the target's hidden_size {v['hidden_size']}: embedding and head are the target's"
    if "vocab_size" in v and draft.mask_token_id >= v["vocab_size"]:
        yield "draft.mask_token_id", f"is not below vocab_size {v['vocab_size']}"
    if "num_hidden_layers" in v and draft.target_layer_ids[-1] >= v["num_hidden_layers"]:
        yield "draft.target_layer_ids", f"is not below num_hidden_layers {v['num_hidden_layers']}"


def _overflows(draft: DraftSpec) -> Iterator[tuple[str, str]]:
    """Weights that 64-bit byte counts cannot hold, counted at 4 bytes an element."""
    layer = sum(math.prod(group.shape) for group in draft._layer_tensors(""))
    if 4 * (layer * draft.num_hidden_layers + draft.hidden_size * draft.feature_width) > MAX_BYTES:
        yield "memory", "the drafter's weights need more bytes than 64-bit arithmetic holds"
