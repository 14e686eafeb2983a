"""Published ``config.json`` files to Specs.

Every key of a config is either read, known to mean nothing for decoding (``HARMLESS``), allowed only at the value the
kernels implement (``FIXED``), or refused: a key that nobody looked at may change what the model computes.

Where families differ, as transformers' modelling code has it:

- ``deepseek_v3``, ``kimi_k2``, ``glm4_moe_lite``: sigmoid scores, choice by score + bias, groups ranked by their best two.
  No other ``topk_method`` or ``scoring_func`` exists there. GLM says which layers are dense by ``mlp_layer_types``.
- ``deepseek_v2``: softmax scores without bias, ``greedy`` or ``group_limited_greedy`` (groups ranked by their best one).
  ``norm_topk_prob`` is never applied, whatever it says (no published model of the family sets it).
- ``kimi_k25``: a wrapper; the text model is under ``text_config``, the quantization under either or both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kdgen.errors import SpecError
from kdgen.spec.fields import keys, show
from kdgen.spec.model import MAX_JSON_BYTES, Quantization, Spec, is_reserved
from kdgen.spec.published_reader import Origins, Reader, read_json
from kdgen.spec.yaml_text import read_text

FAMILIES = ("deepseek_v3", "kimi_k2", "deepseek_v2", "glm4_moe_lite")
WRAPPERS = ("kimi_k25",)
SUPPORTED_QUANTIZATION = (
    "supported is compressed-tensors pack-quantized: 4-bit int, symmetric, group 32, 64 or 128, no actorder, routed experts only"
)


#: Keys that do not change what a decode computes, by who writes them. A key belongs here when somebody has looked up what reads it.
HARMLESS = (
    # transformers' bookkeeping: where a model is from, how it is to be run, tasks that are not decoding
    keys(
        "_attn_implementation _attn_implementation_autoset _attn_implementation_internal _auto_class _commit_hash _diffusers_version",
        "_experts_implementation _experts_implementation_internal _flash_attn_2_enabled _from_model_config _name_or_path",
        "_output_attentions add_cross_attention architectures auto_map chunk_size_feed_forward cross_attention_hidden_size",
        "custom_pipelines finetuning_task gradient_checkpointing head_dim id2label is_decoder is_encoder_decoder",
        "keys_to_ignore_at_inference label2id loss_type name_or_path output_attentions output_hidden_states output_router_logits",
        "prefix problem_type pruned_heads return_dict task_specific_params tf_legacy_loss tie_encoder_decoder",
        "torchscript transformers.js_config transformers_version transformers_weights use_bfloat16 use_cache use_return_dict",
    )
    # the tokenizer's
    | keys(
        "add_bos_token add_eos_token cls_token_id decoder_start_token_id mask_token_id model_max_length pad_token_id sep_token_id",
        "tokenizer_class tokenizer_name unk_token_id",
    )
    # training
    | keys(
        "attention_dropout aux_loss_alpha classifier_dropout embd_pdrop ep_size hidden_dropout hidden_dropout_prob ignore_index",
        "initializer_range num_mtp_layers num_nextn_predict_layers pretraining_tp resid_pdrop router_aux_loss_coef router_jitter_noise",
        "router_z_loss_coef seq_aux unsloth_fixed unsloth_version",
    )
    # how tokens are chosen: older versions wrote here what a generation_config.json holds; the command line decides it
    | keys(
        "assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind bad_words_ids",
        "begin_suppress_tokens cache_config cache_implementation compile_config constraints continuous_batching_config disable_compile",
        "diversity_penalty do_sample dola_layers early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty",
        "epsilon_cutoff eta_cutoff exponential_decay_length_penalty force_words_ids forced_bos_token_id forced_decoder_ids",
        "forced_eos_token_id generation_config guidance_scale is_assistant length_penalty low_memory max_cache_len max_length",
        "max_matching_ngram_size max_new_tokens max_time min_length min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens",
        "num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_logits output_scores penalty_alpha",
        "prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values renormalize_logits repetition_penalty",
        "return_dict_in_generate sequence_bias speculation_type stop_strings suppress_tokens target_lookbehind temperature",
        "token_healing top_h top_k top_p typical_p use_mtp watermarking_config",
    )
)
#: Harmless keys of a multimodal wrapper. Its vision tower is skipped.
WRAPPER_HARMLESS = HARMLESS | keys(
    "image_token_id media_placeholder_token_id projection_hidden_size projection_layer_norm_eps use_unified_vision_chunk",
    "video_placeholder video_token_id vision_config vision_end_token_id vision_start_token_id",
)
_WRAPPER_READ = keys("model_type text_config quantization_config dtype torch_dtype bos_token_id eos_token_id tie_word_embeddings")
#: Keys allowed only at a value that leaves the computation as the kernels have it; null is such a value for each.
FIXED: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "layer_types": ("full_attention in every layer", lambda v: isinstance(v, list) and all(kind == "full_attention" for kind in v)),
    "mlp_bias": ("false", lambda v: v is False),
    "moe_layer_freq": ("1", lambda v: v == 1),
    "partial_rotary_factor": ("1: all of qk_rope_head_dim is rotated", lambda v: v == 1),
    "quantization": ("null, for MLX's quantized weights are not read", lambda v: v is None),
    "sliding_window": ("null", lambda v: v is None),
    "use_mla": ("true", lambda v: v is True),
    "use_sliding_window": ("false", lambda v: v is False),
}
_COPIED = keys(
    "vocab_size hidden_size num_hidden_layers num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim",
    "v_head_dim intermediate_size rms_norm_eps max_position_embeddings hidden_act attention_bias rope_interleave tie_word_embeddings",
)
MOE_KEYS = keys("n_routed_experts moe_intermediate_size num_experts_per_tok n_shared_experts routed_scaling_factor norm_topk_prob")
_READ = frozenset(FIXED).union(
    _COPIED,
    MOE_KEYS,
    keys("model_type dtype torch_dtype rope_theta rope_scaling rope_parameters first_k_dense_replace mlp_layer_types n_group"),
    keys("topk_group topk_method scoring_func bos_token_id eos_token_id quantization_config num_key_value_heads num_local_experts"),
    keys("qk_head_dim"),
)


_QUANTIZATION = keys(
    "quant_method format quantization_status kv_cache_scheme ignore config_groups global_compression_ratio sparsity_config",
    "transform_config version run_compressed",
)
_QUANTIZED_WEIGHTS = keys(
    "num_bits type symmetric strategy group_size dynamic actorder observer observer_kwargs block_structure scale_dtype zp_dtype"
)
_YARN = keys("type factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim attention_factor")


def known_keys() -> frozenset[str]:
    """Every key that a text model's config may have."""
    return HARMLESS | _READ


def _untransformed(value: Any) -> bool:
    return value is None or value == {} or (isinstance(value, dict) and value.keys() == {"config_groups"} and not value["config_groups"])


def _dense(value: Any) -> bool:
    return value is None or value == {} or (isinstance(value, dict) and value.get("format") == "dense")


def _quantization(config: Reader, origins: Origins) -> dict[str, Any] | None:
    if config.get("quantization_config") is None:
        return None
    q = config.inside("quantization_config")
    if q.get("quant_method") != "compressed-tensors":
        q.bad("quant_method", f"not supported; {SUPPORTED_QUANTIZATION}")
        return None
    q.only(_QUANTIZATION, "quantization")
    q.must("format", "pack-quantized", reason=f"not supported; {SUPPORTED_QUANTIZATION}")
    q.must("quantization_status", None, "compressed", reason="the weights must be stored compressed")
    q.must("kv_cache_scheme", None, reason="a quantized cache is not supported")
    if not _dense(q.get("sparsity_config")):
        q.bad("sparsity_config", "not supported: weights must be dense")
    if not _untransformed(q.get("transform_config")):
        q.bad("transform_config", "not supported: weights must be untransformed")
    groups = q.inside("config_groups")
    if len(groups.values) != 1:
        q.bad("config_groups", f"must hold one group; {SUPPORTED_QUANTIZATION}")
        return None
    group = groups.inside(next(iter(groups.values)))
    group.only(frozenset({"targets", "weights", "input_activations", "output_activations", "format"}), "quantization group")
    group.must("format", None, "pack-quantized", reason=f"not supported; {SUPPORTED_QUANTIZATION}")
    for key in ("input_activations", "output_activations"):
        group.must(key, None, reason="quantized activations are not supported")
    weights = group.inside("weights")
    weights.only(_QUANTIZED_WEIGHTS, "quantization")
    weights.must("num_bits", 4, reason=f"not supported; {SUPPORTED_QUANTIZATION}")
    weights.must("type", "int", reason=f"not supported; {SUPPORTED_QUANTIZATION}")
    weights.must("symmetric", True, reason=f"asymmetric is not supported; {SUPPORTED_QUANTIZATION}")
    weights.must("strategy", None, "group", reason=f"not supported; {SUPPORTED_QUANTIZATION}")
    weights.must("dynamic", None, False, reason=f"not supported; {SUPPORTED_QUANTIZATION}")
    # ``static`` (also called ``weight``) says in which order columns were rounded; it does not change where they lie
    weights.must("actorder", None, False, "static", "weight", reason=f"act-order is not supported; {SUPPORTED_QUANTIZATION}")
    weights.must("block_structure", None, reason=f"not supported; {SUPPORTED_QUANTIZATION}")
    weights.must("group_size", 32, 64, 128, reason=f"not supported; {SUPPORTED_QUANTIZATION}")
    origins.note("quantization", config.full("quantization_config"))
    origins.note("quantization.group_size", weights.full("group_size"))
    # ``ignore`` and ``targets`` are not interpreted: the checkpoint's tensors must be packed for the routed experts and
    # for nothing else, and that is checked tensor by tensor.
    return Quantization.model_construct(group_size=weights.get("group_size")).model_dump()


def read_rope(config: Reader, origins: Origins) -> dict[str, Any]:
    """{rope_theta, rope_scaling} from the old keys (``rope_theta``, ``rope_scaling``), the new (``rope_parameters``), or both agreeing."""
    if isinstance(config.get("rope_parameters"), dict):
        origins.note("rope_theta", config.full("rope_parameters.rope_theta"))  # where one is missed
    found: dict[str, Any] = {}
    if (theta := config.get("rope_theta")) is not None:
        found["rope_theta"] = theta
        origins.note("rope_theta", config.full("rope_theta"))
    scalings: list[dict[str, Any] | None] = []
    for key in ("rope_scaling", "rope_parameters"):
        if config.get(key) is None:
            continue
        rope = config.inside(key)
        if (theta := rope.get("rope_theta")) is not None:
            if "rope_theta" not in found:
                origins.note("rope_theta", rope.full("rope_theta"))
            if found.setdefault("rope_theta", theta) != theta:
                rope.bad("rope_theta", f"contradicts {origins.key('rope_theta')} {show(found['rope_theta'])}")
        kinds = {rope.get(name) for name in ("rope_type", "type") if isinstance(rope.get(name), str | None)} - {None} or {"default"}
        if len(kinds) > 1 or not kinds <= {"default", "yarn"} or not isinstance(rope.get("type"), str | None):
            rope.bad("rope_type" if "rope_type" in rope.values else "type", "not supported; supported are default and yarn")
            continue
        rope.only(_YARN | keys("rope_type rope_theta truncate partial_rotary_factor"), "RoPE")
        if "truncate" in rope.values:  # transformers takes null for false
            rope.must("truncate", True, reason="YaRN without rounded bounds is not supported")
        rope.must("partial_rotary_factor", None, 1, 1.0, reason="must be 1: all of qk_rope_head_dim is rotated")
        scaling = {name: value for name, value in rope.values.items() if name in _YARN and value is not None}
        if kinds == {"default"} and scaling.keys() - {"type"}:
            rope.bad(
                "type" if "type" in rope.values else "rope_type",
                f"missing or default, beside {', '.join(sorted(scaling.keys() - {'type'}))}",
            )
        if not scalings:
            origins.note("rope_scaling", config.full(key))
        scalings.append(None if kinds == {"default"} else scaling | {"type": "yarn"})
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        config.bad("rope_parameters", f"contradicts {config.full('rope_scaling')}")
    if scalings:
        found["rope_scaling"] = scalings[0]
    return found


def read_dtype(configs: Sequence[Reader], origins: Origins) -> Any:
    """How weights are stored, by the first of ``configs`` that says it, under the new key or the old one; bfloat16 where none does."""
    for config in configs:
        for key in ("dtype", "torch_dtype"):
            if config.get(key) is not None:
                origins.note("dtype", config.full(key))
                return config.get(key)
    return "bfloat16"


def _layers(config: Reader, family: str, origins: Origins) -> dict[str, Any]:
    """Which layers are dense, and the routed experts of the others."""
    out: dict[str, Any] = {key: config.get(key) for key in MOE_KEYS if key in config.values}
    layers, dense = config.get("num_hidden_layers"), config.get("first_k_dense_replace")
    if family == "glm4_moe_lite" and (kinds := config.get("mlp_layer_types")) is not None:
        prefix = len(kinds) if isinstance(kinds, list) else 0
        while prefix and isinstance(kinds, list) and kinds[prefix - 1] == "sparse":
            prefix -= 1
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind != "dense" for kind in kinds[:prefix]):
            config.bad("mlp_layer_types", "must name dense layers, then sparse ones, num_hidden_layers in all")
        elif dense is not None and dense != prefix:
            config.bad("first_k_dense_replace", f"contradicts mlp_layer_types, which has {prefix} dense layers")
        dense = prefix
        origins.note("first_k_dense_replace", config.full("mlp_layer_types"))
    elif family == "glm4_moe_lite" and dense is None:
        dense = 1
    if dense is not None:
        out["first_k_dense_replace"] = dense
    if (alias := config.get("num_local_experts")) is not None:
        if "n_routed_experts" not in out:
            origins.note("n_routed_experts", config.full("num_local_experts"))
        if out.setdefault("n_routed_experts", alias) != alias:
            config.bad("num_local_experts", "contradicts n_routed_experts")
    if out.get("n_routed_experts", 0) is None:
        out["first_k_dense_replace"] = dense = layers
    if isinstance(dense, int) and isinstance(layers, int) and not isinstance(dense, bool) and dense >= layers > 0:
        # A dense model: routing keys may linger in its config and mean nothing.
        return {"first_k_dense_replace": layers, "n_routed_experts": None}
    return out | _router(config, family)


def _router(config: Reader, family: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if "n_shared_experts" not in config.values:
        config.bad("n_shared_experts", "missing, and families differ in what they take for it; null or 0 says that there are none")
    if family == "deepseek_v2":
        config.must("scoring_func", None, "softmax", reason="deepseek_v2 knows softmax alone")
        method = config.values.get("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            config.bad("topk_method", "deepseek_v2 knows greedy and group_limited_greedy")
        out |= {"scoring_func": "softmax", "topk_method": method, "norm_topk_prob": False}
    else:
        config.must("scoring_func", None, "sigmoid", reason=f"{family} knows sigmoid alone")
        config.must("topk_method", None, "noaux_tc", reason=f"{family} knows noaux_tc alone")
        out |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    if out["topk_method"] != "greedy":  # greedy ignores whatever groups are given
        for key in ("n_group", "topk_group"):
            if config.get(key) is not None:
                out[key] = config.get(key)
            elif family != "glm4_moe_lite" or key in config.values:
                reason = "must be a number" if key in config.values else "missing"
                config.bad(key, f"{reason}, and the choice of experts depends on it")
    return out


def _text(config: Reader, outer: Reader | None, name: str) -> Spec:
    family = config.get("model_type")
    if outer is not None and "model_type" not in config.values:
        family = "deepseek_v3"  # as transformers' wrapper has it
    origins = Origins(config.path)
    if family not in FAMILIES:
        config.bad("model_type", f"not supported; supported are {', '.join((*FAMILIES, *WRAPPERS))}")
        raise SpecError(config.findings)
    config.only(known_keys(), "config")
    for key, (supported, fine) in FIXED.items():
        if config.get(key) is not None and not fine(config.get(key)):
            config.bad(key, f"not supported; supported is {supported}")
    out: dict[str, Any] = {"name": name, "model_type": family}
    out |= {key: config.get(key) for key in _COPIED if key in config.values}
    out = {"hidden_act": "silu", "attention_bias": False, "rope_interleave": True} | out
    if outer is not None:  # the wrapper's class owns the head, and ties it unless the config says otherwise
        out["tie_word_embeddings"] = outer.values.get("tie_word_embeddings", True)
        origins.note("tie_word_embeddings", outer.full("tie_word_embeddings"))
    if family != "deepseek_v2" and config.get("head_dim") not in (None, config.get("qk_rope_head_dim")):
        config.bad("head_dim", "must equal qk_rope_head_dim: transformers rotates so many elements")
    if family == "deepseek_v2" and out["rope_interleave"] is not True:
        config.bad("rope_interleave", "deepseek_v2 knows interleaved pairs alone")
    out |= read_rope(config, origins) | _layers(config, family, origins)

    if config.get("num_key_value_heads") not in (None, config.get("num_attention_heads")):
        config.bad("num_key_value_heads", "must equal num_attention_heads: MLA has one latent for all heads")
    nope, rope = config.get("qk_nope_head_dim"), config.get("qk_rope_head_dim")
    if isinstance(nope, int) and isinstance(rope, int) and config.get("qk_head_dim") not in (None, nope + rope):
        config.bad("qk_head_dim", "must be qk_nope_head_dim + qk_rope_head_dim")

    both = [c for c in (config, outer) if c is not None]
    out["dtype"] = read_dtype(both, origins)
    quantizations = [_quantization(c, origins) for c in reversed(both) if c.get("quantization_config") is not None]
    if quantizations:
        out["quantization"] = quantizations[-1]
        if any(q != quantizations[-1] for q in quantizations):
            config.bad("quantization_config", "contradicts quantization_config")

    out |= _end_tokens(config, outer, origins)
    try:
        spec = Spec.from_mapping(out, config.file)
    except SpecError as error:
        raise origins.refusal(config, error) from None
    if config.findings:
        raise SpecError(config.findings)
    return spec


def _end_tokens(config: Reader, outer: Reader | None, origins: Origins) -> dict[str, Any]:
    """The tokens that begin and end a text. An id outside the vocabulary can neither be given nor produced, so it is dropped rather than
    refused."""
    vocabulary = config.get("vocab_size")

    def inside(token: Any) -> bool:
        return not (isinstance(token, int) and isinstance(vocabulary, int) and not 0 <= token < vocabulary)

    eos: list[Any] = []
    for c in (config, outer):
        value = c.get("eos_token_id") if c is not None else None
        if c is not None and value is not None and not eos:
            origins.note("eos_token_id", c.full("eos_token_id"))
        if c is not None and not isinstance(value, list) and value is not None and type(value) is not int:
            c.bad("eos_token_id", "must be a token id or a list of them")
            continue
        eos += [token for token in (value if isinstance(value, list) else [value]) if token is not None and token not in eos]
    bos = config.get("bos_token_id")
    return {"eos_token_id": [token for token in eos if inside(token)], "bos_token_id": bos if inside(bos) else None}


def parse_config(text: str, name: str = "model", file: str = "config.json") -> Spec:
    """A Spec from the text of a published ``config.json``; ``name`` becomes the spec's. Raises SpecError with every finding."""
    config = read_json(text, file)
    if config.get("model_type") in WRAPPERS:
        config.only(WRAPPER_HARMLESS | _WRAPPER_READ, "wrapper")
        inner = config.inside("text_config")
        if not isinstance(config.get("text_config"), dict):  # nothing is said about keys that should be in it
            raise SpecError(config.findings)
        return _text(inner, config, name)
    return _text(config, None, name)


def spec_name(folder: str) -> str:
    """A spec name for a model folder: lower case, with a dash for each character that names may not hold."""
    name = re.sub(r"[^a-z0-9_.-]+", "-", folder.lower()).strip("-._")[:64].rstrip("-._")
    if is_reserved(name):
        name = f"model-{name}"
    return name if name and name[0].isalnum() else "model"


def _model_name(folder: Path) -> str:
    """What a model in ``folder`` is called: as the folder is, or as the model is that a hub's cache keeps in
    ``models--organisation--name/snapshots/revision``. The files there are links into a folder of blobs."""
    place = folder.resolve()
    kept = place.parent.parent.name
    return kept.split("--")[-1] if place.parent.name == "snapshots" and kept.startswith("models--") else place.name


def load_config(path: str | Path) -> Spec:
    """A Spec from a published model: its ``config.json``, or the folder that holds it. The spec is named after the folder, or as the model
    is called whose revision a hub's cache keeps in it.

    Reads ``deepseek_v3``, ``kimi_k2``, ``kimi_k25`` (its text model), ``deepseek_v2`` and ``glm4_moe_lite``, with old or new
    RoPE keys, unquantized or with compressed-tensors INT4 experts. Raises SpecError with every finding, each with file,
    key, value and reason, and naming what is supported.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    return parse_config(read_text(file, MAX_JSON_BYTES), spec_name(_model_name(file.parent)), str(file))
