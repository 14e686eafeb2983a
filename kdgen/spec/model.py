"""A model description, validated once, that every later stage trusts.

Field names are those of a published ``config.json``. ``load_spec`` reads kdgen's own YAML, ``load_config`` a published
model's ``config.json``; both refuse a file with everything that is wrong with it, not just the first thing.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from kdgen.errors import Finding, SpecError
from kdgen.files.resources import specs_dir
from kdgen.spec.drafter import DraftSpec
from kdgen.spec.fields import (
    MAX_BYTES,
    MAX_DIM,
    Frozen,
    Layers,
    Positive,
    RopeScaling,
    Size,
    TensorGroup,
    findings,
    keys,
    show,
    show_at,
    yarn_mscale,
)
from kdgen.spec.rules import contradictions
from kdgen.spec.yaml_text import Dumper, Loader, dump_yaml, parse_yaml, read_text, refuse

#: RMSNorm inside the query and key-value projections: the modelling code leaves it at its default, whatever ``rms_norm_eps`` says.
LORA_NORM_EPS = 1e-6


class Quantization(Frozen):
    """compressed-tensors ``pack-quantized`` INT4 of the routed experts; everything else keeps ``Spec.dtype``."""

    always_written: ClassVar[Set[str]] = keys("num_bits symmetric")

    num_bits: Literal[4] = 4
    group_size: Literal[32, 64, 128]
    symmetric: Literal[True] = True

    def tensors(self, key: str, rows: int, cols: int, count: int) -> Iterator[TensorGroup]:
        """The checkpoint tensors of ``count`` [rows, cols] matrices called ``key``."""
        matrix = rows, cols
        yield TensorGroup(f"{key}_packed", (rows, cols // 8), "packed", count, matrix, ("I32",))
        yield TensorGroup(f"{key}_scale", (rows, cols // self.group_size), "scale", count, matrix, ("BF16",))
        yield TensorGroup(f"{key}_shape", (2,), "shape", count, matrix, ("I64", "I32"))


def _none_is_zero(value: object) -> object:
    return 0 if value is None else value


def _ids(value: object) -> object:
    if value is None:
        return ()
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


MAX_NAME = 64  #: characters
#: Names that Windows reserves whatever their extension.
_RESERVED = frozenset({"con", "prn", "aux", "nul", *(f"{port}{i}" for port in ("com", "lpt") for i in range(10))})


def is_reserved(name: str) -> bool:
    """Whether Windows allows no file or folder called ``name`` (lower case)."""
    return name.split(".")[0] in _RESERVED


def _name(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", value):
        raise ValueError("must match [a-z0-9][a-z0-9_.-]*, for it names folders and generated files")
    if len(value) > MAX_NAME or value.endswith(".") or is_reserved(value):
        raise ValueError(f"is no portable folder name (at most {MAX_NAME} characters, no final dot, no device name)")
    return value


class Spec(Frozen):
    """One model. Construct it with ``load_spec``, ``load_config`` or ``Spec.from_mapping``, which raise SpecError.

    ``Spec(...)`` itself raises pydantic's ValidationError. Types are strict: ``true`` is no int, ``"8"`` is no number.
    """

    always_written: ClassVar[Set[str]] = keys(
        "model_type attention_bias moe_intermediate_size num_experts_per_tok n_shared_experts n_group topk_group topk_method scoring_func"
        " norm_topk_prob routed_scaling_factor hidden_act rope_interleave rope_scaling tie_word_embeddings bos_token_id eos_token_id dtype"
        " quantization"
    )

    name: Annotated[str, AfterValidator(_name)]
    model_type: Literal["deepseek_v3", "kimi_k2", "deepseek_v2", "glm4_moe_lite"] = "deepseek_v3"
    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Layers
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
    #: the type of mlp.gate.weight where it differs from ``dtype``: some checkpoints keep it in float32
    router_dtype: Literal["bfloat16", "float32"] | None = None
    quantization: Quantization | None = None
    draft: DraftSpec | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Spec:
        pairs = [*contradictions(self.__dict__, self.model_fields_set)] or [*_overflows(self)]
        if pairs:
            text = "; ".join(f"{key}: {reason}" for key, reason in pairs)
            raise PydanticCustomError("contradictions", "{text}", {"text": text, "pairs": pairs})
        return self

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], file: str = "spec") -> Spec:
        """Validate plain data, as YAML or JSON give it. Raises SpecError with every finding; ``file`` names the source in them."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            details = error.errors(include_url=False)
        found = findings(details, file, cls, _NESTED)
        if found:  # pydantic checks fields together only when each is valid by itself; this checks the valid ones together
            bad = {str(detail["loc"][0]) for detail in details}
            pairs = [*contradictions(_fine(cls, values, bad), set(values))]
        else:
            pairs = details[0]["ctx"]["pairs"]
        found += [Finding(file, key, show_at(values, key), reason) for key, reason in pairs]
        raise SpecError(found)

    def to_yaml(self) -> str:
        """The spec as YAML that ``load_spec`` reads back to an equal value; every field is written out."""
        return dump_yaml(self.model_dump(mode="json"))

    def with_draft(self, draft: DraftSpec | None) -> Spec:
        """The same model with another drafter, or none. Raises SpecError when the drafter does not fit it."""
        values = self.essential() | {"draft": draft.model_dump(mode="json") if draft else None}
        return type(self).from_mapping(values, self.name)

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
        scale = 1.0 / math.sqrt(self.qk_head_dim)
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
        """Hash of everything but the name and how the router is stored: two specs with the same hash are the same model, with the same
        drafter. A field that is added to specs later does not change the hash where it has its default."""
        text = json.dumps(self.essential(exclude={"name", "router_dtype"}), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    # ---- checkpoint tensors -------------------------------------------------------------------------------------------

    def top_tensors(self) -> Iterator[TensorGroup]:
        """Tensors outside the layers, in the published layout."""
        yield TensorGroup("model.embed_tokens.weight", (self.vocab_size, self.hidden_size))
        yield TensorGroup("model.norm.weight", (self.hidden_size,), "small")
        if not self.tie_word_embeddings:
            yield TensorGroup("lm_head.weight", (self.vocab_size, self.hidden_size))

    def layer_tensors(self, layer: int) -> Iterator[TensorGroup]:
        """Tensors of one decoder layer, in the published layout: [outputs, inputs] for matrices."""
        prefix = f"model.layers.{layer}."
        yield TensorGroup(f"{prefix}input_layernorm.weight", (self.hidden_size,), "small")
        yield TensorGroup(f"{prefix}post_attention_layernorm.weight", (self.hidden_size,), "small")
        attn, biased = f"{prefix}self_attn.", []
        if self.q_lora_rank is None:
            yield TensorGroup(f"{attn}q_proj.weight", (self.num_attention_heads * self.qk_head_dim, self.hidden_size))
        else:
            yield TensorGroup(f"{attn}q_a_proj.weight", (self.q_lora_rank, self.hidden_size))
            yield TensorGroup(f"{attn}q_a_layernorm.weight", (self.q_lora_rank,), "small")
            yield TensorGroup(f"{attn}q_b_proj.weight", (self.num_attention_heads * self.qk_head_dim, self.q_lora_rank))
            biased.append(("q_a_proj", self.q_lora_rank))
        yield TensorGroup(f"{attn}kv_a_proj_with_mqa.weight", (self.cache_row_dim, self.hidden_size))
        yield TensorGroup(f"{attn}kv_a_layernorm.weight", (self.kv_lora_rank,), "small")
        kv_rows = self.num_attention_heads * (self.qk_nope_head_dim + self.v_head_dim)
        yield TensorGroup(f"{attn}kv_b_proj.weight", (kv_rows, self.kv_lora_rank))
        yield TensorGroup(f"{attn}o_proj.weight", (self.hidden_size, self.num_attention_heads * self.v_head_dim))
        biased += [("kv_a_proj_with_mqa", self.cache_row_dim), ("o_proj", self.hidden_size)]
        if self.attention_bias:
            yield from (TensorGroup(f"{attn}{name}.bias", (rows,), "small") for name, rows in biased)
        mlp = f"{prefix}mlp."
        if layer < self.first_k_dense_replace:
            yield from self._swiglu(mlp, self.intermediate_size)
            return
        experts = self.n_routed_experts or 0
        yield TensorGroup(f"{mlp}gate.weight", (experts, self.hidden_size), "small")
        if self.has_router_bias:
            yield TensorGroup(f"{mlp}gate.e_score_correction_bias", (experts,), "small")
        yield from self._swiglu(f"{mlp}experts.{{e}}.", self.moe_intermediate_size, experts, self.quantization)
        if self.shared_intermediate_size:
            yield from self._swiglu(f"{mlp}shared_experts.", self.shared_intermediate_size)

    def _swiglu(self, prefix: str, width: int, count: int = 1, quantization: Quantization | None = None) -> Iterator[TensorGroup]:
        h = self.hidden_size
        for name, rows, cols in (("gate_proj", width, h), ("up_proj", width, h), ("down_proj", h, width)):
            key = f"{prefix}{name}.weight"
            if quantization is None:
                yield TensorGroup(key, (rows, cols), count=count)
            else:
                yield from quantization.tensors(key, rows, cols, count)

    def tensors(self) -> Iterator[TensorGroup]:
        """Every tensor of a published checkpoint of this model (without the ``language_model.`` prefix)."""
        yield from self.top_tensors()
        for layer in range(self.num_hidden_layers):
            yield from self.layer_tensors(layer)

    def tensor_kinds(self) -> Iterator[tuple[TensorGroup, int]]:
        """The tensors of ``tensors``, with one layer for all layers that are alike, and their number: quick for any model."""
        yield from ((group, 1) for group in self.top_tensors())
        first, stop = self.moe_layers
        for layer, times in ((0, first), (first, stop - first)):
            if times:
                yield from ((group, times) for group in self.layer_tensors(layer))


# ---- what fields must fulfil together -----------------------------------------------------------------------------------


# ---- findings -----------------------------------------------------------------------------------------------------------


#: Fields that are mappings.
_NESTED: Mapping[str, type[Frozen]] = {"rope_scaling": RopeScaling, "quantization": Quantization, "draft": DraftSpec}


def _fine(cls: type[Spec], values: Mapping[str, Any], bad: Set[str]) -> dict[str, Any]:
    """The fields, defaults included, that are valid by themselves, parsed."""
    fine = {key: field.get_default() for key, field in cls.model_fields.items() if not field.is_required()}
    fine |= {key: value for key, value in values.items() if key in cls.model_fields}
    for key, model in _NESTED.items():
        if key not in bad and isinstance(fine[key], Mapping):
            fine[key] = model.model_validate(dict(fine[key]))
    fine |= {"eos_token_id": _ids(fine["eos_token_id"]), "n_shared_experts": _none_is_zero(fine["n_shared_experts"])}
    return {key: value for key, value in fine.items() if key not in bad}


# ---- files --------------------------------------------------------------------------------------------------------------

#: A spec is a page of text; a config may list thousands of module names.
MAX_YAML_BYTES, MAX_JSON_BYTES = 64 * 1024, 4 * 1024 * 1024


for _class in (Loader, Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
    _class.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
    _class.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789"))
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"),
        list("-+0123456789."),
    )


def parse_spec(text: str, file: str = "spec") -> Spec:
    """A Spec from YAML text. Raises SpecError with every finding."""
    values = parse_yaml(text, file)
    if not isinstance(values, dict):
        raise refuse(file, "must be a mapping of keys to values", value=show(values))
    return Spec.from_mapping(values, file)


def shipped_specs() -> list[str]:
    """Names that ``load_spec`` takes."""
    return sorted(path.stem for path in specs_dir().glob("*.yaml"))


def load_spec(source: str | Path) -> Spec:
    """A Spec from a YAML file, or from the bare name of a shipped one (``tiny``, ``k26``, …).

    Raises SpecError with every finding, each with file, key, value and reason.
    """
    path = Path(source)
    if isinstance(source, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", source) and not path.is_file():
        name = source.removesuffix(".yaml")
        shipped = specs_dir() / f"{name}.yaml"
        if not shipped.is_file() and not path.exists():
            names = shipped_specs()
            close = difflib.get_close_matches(name[:MAX_NAME].lower(), names, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise refuse(source, f"neither a file nor a shipped spec{hint}; shipped are {', '.join(names)}")
        path = shipped if shipped.is_file() else path  # a folder of that name may hold the text generated from it
    return parse_spec(read_text(path, MAX_YAML_BYTES), path.name)


def _overflows(spec: Spec) -> Iterator[tuple[str, str]]:
    """Sizes that 64-bit byte counts cannot hold: any tensor, their sum, or the cache, counted at 4 bytes an element."""
    total = 0
    for group, times in spec.tensor_kinds():
        size = 4 * math.prod(group.shape) * group.count
        total += size * times
        if size > MAX_BYTES:
            yield "memory", f"{group.key} needs {size} bytes, more than 64-bit arithmetic holds"
    cache = 4 * spec.num_hidden_layers * spec.max_position_embeddings * spec.cache_row_dim
    if total > MAX_BYTES:
        yield "memory", f"the weights need {total} bytes, more than 64-bit arithmetic holds"
    if cache > MAX_BYTES:
        yield "max_position_embeddings", f"a full cache needs {cache} bytes, more than 64-bit arithmetic holds"
