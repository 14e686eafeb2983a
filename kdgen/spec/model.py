"""A model description, validated once, that every later stage trusts.

Field names are those of a published ``config.json``. ``load_spec`` reads kdgen's own YAML, ``load_config`` a published
model's ``config.json``; both refuse a file with everything that is wrong with it, not just the first thing.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from kdgen.errors import Finding, SpecError
from kdgen.files.inputs import read_input
from kdgen.files.resources import specs_dir
from kdgen.spec.drafter import DraftSpec, target_contradictions
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
    show,
    show_at,
    show_key,
    yarn_mscale,
)

#: RMSNorm inside the query and key-value projections: the modelling code leaves it at its default, whatever ``rms_norm_eps`` says.
LORA_NORM_EPS = 1e-6


class Quantization(Frozen):
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


MAX_NAME = 64  #: characters
#: Names that Windows reserves whatever their extension.
_RESERVED = frozenset({"con", "prn", "aux", "nul", *(f"{port}{i}" for port in ("com", "lpt") for i in range(10))})


def is_reserved(name: str) -> bool:
    """Whether Windows has no file or folder called ``name``, which is in lower case."""
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
    #: of mlp.gate.weight, where it is not ``dtype``: some checkpoints keep it in float32
    router_dtype: Literal["bfloat16", "float32"] | None = None
    quantization: Quantization | None = None
    draft: DraftSpec | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Spec:
        pairs = [*_contradictions(self.__dict__, self.model_fields_set)] or [*_overflows(self)]
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
        if found:  # pydantic checks fields together only when each is fine by itself; do it here for those that are
            bad = {str(detail["loc"][0]) for detail in details}
            pairs = [*_contradictions(_fine(cls, values, bad), set(values))]
        else:
            pairs = details[0]["ctx"]["pairs"]
        found += [Finding(file, key, show_at(values, key), reason) for key, reason in pairs]
        raise SpecError(found)

    def to_yaml(self) -> str:
        """The spec as YAML that ``load_spec`` reads back to an equal value; every field is written out."""
        return dump_yaml(self.model_dump(mode="json"))

    def with_draft(self, draft: DraftSpec | None) -> Spec:
        """The same model with another drafter, or none. Raises SpecError when the drafter does not fit it."""
        values = self.model_dump(mode="json") | {"draft": draft.model_dump(mode="json") if draft else None}
        return Spec.from_mapping(values, self.name)

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
        drafter."""
        left_out = {"name", "router_dtype"} | (set() if self.draft else {"draft"})
        text = json.dumps(self.model_dump(mode="json", exclude=left_out), sort_keys=True, separators=(",", ":"))
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
                yield TensorGroup(f"{key}_packed", (rows, cols // 8), "packed", count)
                yield TensorGroup(f"{key}_scale", (rows, cols // quantization.group_size), "scale", count)
                yield TensorGroup(f"{key}_shape", (2,), "shape", count)

    def tensors(self) -> Iterator[TensorGroup]:
        """Every tensor of a published checkpoint of this model (without the ``language_model.`` prefix)."""
        yield from self.top_tensors()
        for layer in range(self.num_hidden_layers):
            yield from self.layer_tensors(layer)

    def tensor_kinds(self) -> Iterator[tuple[TensorGroup, int]]:
        """The same, with all layers that are alike as one of them and their number: quick for any number of layers."""
        yield from ((group, 1) for group in self.top_tensors())
        first, stop = self.moe_layers
        for layer, times in ((0, first), (first, stop - first)):
            if times:
                yield from ((group, times) for group in self.layer_tensors(layer))


# ---- what fields must fulfil together -----------------------------------------------------------------------------------


def _contradictions(v: Mapping[str, Any], given: Set[str]) -> Iterator[tuple[str, str]]:
    """(key, reason) for every rule broken by the fields in ``v``; rules about fields that are not there are left out."""

    def known(*keys: str) -> bool:
        return all(key in v for key in keys)

    if known("qk_rope_head_dim") and v["qk_rope_head_dim"] % 2:
        yield "qk_rope_head_dim", "must be even: RoPE rotates pairs"
    for other in ("qk_rope_head_dim", "v_head_dim"):
        parts = ("num_attention_heads", "qk_nope_head_dim", other)
        if known(*parts) and v["num_attention_heads"] * (v["qk_nope_head_dim"] + v[other]) > MAX_DIM:
            yield "num_attention_heads", f"times (qk_nope_head_dim + {other}) is more than 2^31 - 1 rows"
    if known("bos_token_id", "vocab_size") and v["bos_token_id"] is not None and v["bos_token_id"] >= v["vocab_size"]:
        yield "bos_token_id", f"is not below vocab_size {v['vocab_size']}"
    if known("eos_token_id", "vocab_size") and any(token >= v["vocab_size"] for token in v["eos_token_id"]):
        yield "eos_token_id", f"is not below vocab_size {v['vocab_size']}"
    if known("rope_scaling", "rope_theta") and v["rope_scaling"] is not None and v["rope_theta"] <= 1:
        yield "rope_theta", "must exceed 1 with YaRN, which divides by its logarithm"
    if known("draft") and v["draft"] is not None:
        yield from target_contradictions(v["draft"], v)
    if not known("first_k_dense_replace", "num_hidden_layers", "n_routed_experts"):
        return
    dense, layers, experts = v["first_k_dense_replace"], v["num_hidden_layers"], v["n_routed_experts"]
    if dense > layers:
        yield "first_k_dense_replace", f"is more than num_hidden_layers {layers}"
    elif experts is None and dense < layers:
        yield "first_k_dense_replace", f"must be num_hidden_layers {layers} when n_routed_experts is null (a dense model)"
    if dense >= layers:
        if known("quantization") and v["quantization"] is not None:
            yield "quantization", "applies to routed experts, of which this model has none"
    elif experts is not None:
        yield from _moe_contradictions(v, given, experts)


def _moe_contradictions(v: Mapping[str, Any], given: Set[str], experts: int) -> Iterator[tuple[str, str]]:
    def known(*keys: str) -> bool:
        return all(key in v for key in keys)

    for key in ("moe_intermediate_size", "num_experts_per_tok", "scoring_func", "norm_topk_prob", "routed_scaling_factor"):
        if key not in given:
            yield key, "missing, and a model with routed experts needs it"
        elif known(key) and v[key] == 0 and v[key] is not False:
            yield key, "must be positive in a model with routed experts"
    top_k = v.get("num_experts_per_tok", 0)
    if top_k > experts:
        yield "num_experts_per_tok", f"is more than n_routed_experts {experts}"
    if known("n_shared_experts", "moe_intermediate_size") and v["n_shared_experts"] * v["moe_intermediate_size"] > MAX_DIM:
        yield "n_shared_experts", "times moe_intermediate_size is more than 2^31 - 1 rows"
    if known("n_group", "topk_group"):
        groups, kept = v["n_group"], v["topk_group"]
        if kept > groups:
            yield "topk_group", f"is more than n_group {groups}"
        if experts % groups:
            yield "n_group", f"does not divide n_routed_experts {experts}"
        elif kept <= groups and top_k <= experts and top_k > kept * (experts // groups):
            yield "num_experts_per_tok", f"is more than the {kept * (experts // groups)} experts of topk_group {kept} groups"
        method = v.get("topk_method")
        if method == "noaux_tc" and groups > 1 and experts // groups < 2:
            yield "n_group", "leaves fewer than 2 experts a group, and noaux_tc ranks groups by the sum of their best 2"
        if method == "greedy" and groups > 1:
            yield "n_group", "must be 1 with topk_method greedy, which knows no groups"
    quantization = v.get("quantization")
    if quantization is not None:
        for key in ("hidden_size", "moe_intermediate_size"):
            if known(key) and v[key] % quantization.group_size:
                yield "quantization.group_size", f"does not divide {key} {v[key]}"


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
_MAX_DEPTH = 32


def _refuse(file: str, reason: str, key: str = "file", value: str = "") -> SpecError:
    return SpecError([Finding(file, key, value, reason)])


def read_text(path: Path, limit: int) -> str:
    file = str(path)
    if path.suffix in (".kdtr", ".safetensors"):
        raise _refuse(file, "holds weights, and a description is wanted: a config.json or a spec; `kdgen inspect` shows what it holds")
    try:
        data = read_input(path, limit)
    except IsADirectoryError:
        raise _refuse(file, "is a folder, not a file") from None
    except OSError as error:
        what = ", so it is no model description" if error.errno == errno.EFBIG else ""
        raise _refuse(file, f"cannot be read: {error.strerror or error}{what}") from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _refuse(file, f"is not UTF-8 text (byte {error.start})") from None
    if not text.strip():
        raise _refuse(file, "is empty")
    return text


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's scalars, so that 1e-5 is a number, and ``no`` and ``1:30`` are not."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own attribute, replaced so as not to add to its table


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own attribute, replaced so as not to add to its table


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
    _class.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
    _class.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789"))
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"),
        list("-+0123456789."),
    )


def dump_yaml(values: Mapping[str, Any]) -> str:
    """YAML text of plain data, keys in their order, that this module's loader reads back exactly."""
    return str(yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def _parse_yaml(text: str, file: str) -> object:
    """One YAML document of plain mappings, sequences and scalars. Raises SpecError for tags, anchors, aliases, duplicate keys, depth."""
    try:
        depth = documents = 0
        for event in yaml.parse(text, Loader=_Loader):
            where = f"line {event.start_mark.line + 1}" if event.start_mark else "file"
            if getattr(event, "anchor", None) is not None:  # of a node, or what an alias points to
                raise _refuse(file, "anchors and aliases are not allowed: write the value out", where)
            if (tag := getattr(event, "tag", None)) is not None:
                raise _refuse(file, "YAML tags are not allowed", where, show(tag))
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            documents += isinstance(event, yaml.DocumentStartEvent)
            if depth > _MAX_DEPTH:
                raise _refuse(file, f"nested deeper than {_MAX_DEPTH} levels", where)
        if documents != 1:
            raise _refuse(file, f"holds {documents} YAML documents instead of one" if documents else "is empty")
        node = yaml.compose(text, Loader=_Loader)
        duplicates = [*_duplicate_keys(node, file)]
        if duplicates:
            raise SpecError(duplicates)
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise _refuse(file, f"is not valid YAML: {' '.join(str(error).split())}") from None
    except ValueError as error:  # a date that is none, an integer of more digits than Python converts
        raise _refuse(file, f"holds a value that cannot be read: {error}") from None


def _duplicate_keys(node: object, file: str, path: str = "") -> Iterator[Finding]:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = f"{path}{key.value}" if isinstance(key, yaml.ScalarNode) else f"{path}?"
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                yield Finding(file, show_key(name), "", f"a key must be plain text (line {key.start_mark.line + 1})")
            elif key.value in seen:
                yield Finding(file, show_key(name), "", f"given twice (line {key.start_mark.line + 1})")
            seen.add(str(key.value))
            yield from _duplicate_keys(value, file, f"{name}.")
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield from _duplicate_keys(value, file, f"{path}{i}.")


def parse_spec(text: str, file: str = "spec") -> Spec:
    """A Spec from YAML text. Raises SpecError with every finding."""
    values = _parse_yaml(text, file)
    if not isinstance(values, dict):
        raise _refuse(file, "must be a mapping of keys to values", value=show(values))
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
            raise _refuse(source, f"neither a file nor a shipped spec{hint}; shipped are {', '.join(names)}")
        path = shipped if shipped.is_file() else path  # a folder of that name may be what was generated from it
    return parse_spec(read_text(path, MAX_YAML_BYTES), path.name)
