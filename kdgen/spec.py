"""A model description, validated once, that every later stage trusts.

Field names are those of a published ``config.json``. ``load_spec`` reads kdgen's own YAML, ``load_config`` a published
model's ``config.json``; both refuse a file with everything that is wrong with it, not just the first thing.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kdgen.errors import Finding, SpecError

#: Kernels index a dimension with a 32-bit integer.
MAX_DIM = 2**31 - 1
#: Host and device code count bytes in signed 64-bit integers.
MAX_BYTES = 2**63 - 1
#: RMSNorm inside the query and key-value projections: the modelling code leaves it at its default, whatever ``rms_norm_eps`` says.
LORA_NORM_EPS = 1e-6

Size = Annotated[int, Field(gt=0, le=MAX_DIM)]


def _fits_float32(value: float) -> float:
    with np.errstate(over="ignore", under="ignore"):
        single = np.float32(value)
    if not np.isfinite(single) or (single == 0 and value != 0):
        raise ValueError("does not fit in float32")
    return value


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), AfterValidator(_fits_float32)]


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention magnitude: 0.1·mscale·ln(factor) + 1, and 1 where nothing is stretched (``yarn_get_mscale``)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class RopeScaling(_Frozen):
    """YaRN. ``mscale`` and ``mscale_all_dim`` of 0 mean "not given", as the modelling code treats them."""

    type: Literal["yarn"] = "yarn"
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False), AfterValidator(_fits_float32)]
    original_max_position_embeddings: Size
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    mscale_all_dim: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    attention_factor: Positive | None = None

    @property
    def cos_sin_factor(self) -> float:
        """What cos and sin are multiplied by: 1 for every published DeepSeek and Kimi config, whose two mscales are equal."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)


class Quantization(_Frozen):
    """compressed-tensors ``pack-quantized`` INT4 of the routed experts; everything else keeps ``Spec.dtype``."""

    num_bits: Literal[4] = 4
    group_size: Literal[32, 64, 128]
    symmetric: Literal[True] = True


def _none_is_zero(value: object) -> object:
    return 0 if value is None else value


def _ids(value: object) -> object:
    if value is None:
        return ()
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one shape in a checkpoint: ``key`` with ``{e}`` for each of ``count`` experts (count 1: no ``{e}``).

    ``kind`` says what may be stored: ``weight`` bf16 or float32, ``int4`` the packed int32 words, ``scale`` bf16, ``shape`` int64.
    """

    key: str
    shape: tuple[int, ...]
    kind: Literal["weight", "int4", "scale", "shape"] = "weight"
    count: int = 1


class Spec(_Frozen):
    """One model. Construct it with ``load_spec``, ``load_config`` or ``Spec.from_mapping``, which raise SpecError.

    ``Spec(...)`` itself raises pydantic's ValidationError. Types are strict: ``true`` is no int, ``"8"`` is no number.
    """

    name: str
    model_type: Literal["deepseek_v3", "kimi_k2", "deepseek_v2", "glm4_moe_lite"] = "deepseek_v3"
    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    q_lora_rank: Size | None
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    attention_bias: bool = False
    intermediate_size: Size
    first_k_dense_replace: Annotated[int, Field(ge=0, le=MAX_DIM)]
    n_routed_experts: Size | None
    moe_intermediate_size: Annotated[int, Field(ge=0, le=MAX_DIM)] = 0
    num_experts_per_tok: Annotated[int, Field(ge=0, le=MAX_DIM)] = 0
    n_shared_experts: Annotated[int, Field(ge=0, le=MAX_DIM), BeforeValidator(_none_is_zero)] = 0
    n_group: Size = 1
    topk_group: Size = 1
    topk_method: Literal["noaux_tc", "greedy", "group_limited_greedy"] = "noaux_tc"
    scoring_func: Literal["sigmoid", "softmax"] = "sigmoid"
    norm_topk_prob: bool = True
    routed_scaling_factor: Positive = 1.0
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: Positive
    rope_theta: Positive
    rope_interleave: bool = True
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: Size
    tie_word_embeddings: bool = False
    bos_token_id: Annotated[int, Field(ge=0, le=MAX_DIM)] | None = None
    eos_token_id: Annotated[tuple[Annotated[int, Field(ge=0, le=MAX_DIM)], ...], BeforeValidator(_ids)] = ()
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    quantization: Quantization | None = None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], file: str = "spec") -> Spec:
        """Validate plain data (as YAML or JSON give it). Raises SpecError with every finding; ``file`` names the source in them."""
        raise NotImplementedError

    # ---- derived ------------------------------------------------------------------------------------------------------

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_row_dim(self) -> int:
        """Elements of one token's cache row in one layer: [c_kv | k_rope], shared by all heads."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """qk_head_dim^-0.5, times m² with YaRN (``mscale_all_dim``)."""
        scale = self.qk_head_dim**-0.5
        if self.rope_scaling is not None and self.rope_scaling.mscale_all_dim:
            scale *= yarn_mscale(self.rope_scaling.factor, self.rope_scaling.mscale_all_dim) ** 2
        return scale

    @property
    def moe_layers(self) -> tuple[int, int]:
        """(first, stop) of the mixture-of-experts layers; empty (L, L) for a dense model."""
        return self.first_k_dense_replace, self.num_hidden_layers

    @property
    def has_moe(self) -> bool:
        return self.first_k_dense_replace < self.num_hidden_layers

    @property
    def has_router_bias(self) -> bool:
        """Whether the choice of experts adds ``e_score_correction_bias`` (DeepSeek V3's noaux_tc)."""
        return self.has_moe and self.topk_method == "noaux_tc"

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the one SwiGLU that all shared experts form together; 0 when there is none."""
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def sha256(self) -> str:
        """Hash of everything but the name: two specs with the same hash are the same model."""
        text = json.dumps(self.model_dump(mode="json", exclude={"name"}), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
