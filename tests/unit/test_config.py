"""Published configs: each family and the wrapper, old keys and new, and every refusal by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kdgen.errors import SpecError
from kdgen.spec.model import Spec, load_spec
from kdgen.spec.published import load_config, parse_config, spec_name
from kdgen.spec.publishing import published_config

#: What Kimi K2.5's hub page holds, without the vision tower's own keys.
KIMI: dict[str, Any] = json.loads(
    """{
    "architectures": ["KimiK25ForConditionalGeneration"], "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    "bos_token_id": 163584, "dtype": "bfloat16", "eos_token_id": 163586, "ignore_index": -100, "media_placeholder_token_id": 163605,
    "model_type": "kimi_k25", "pad_token_id": 163839, "tie_word_embeddings": false, "use_unified_vision_chunk": true,
    "video_placeholder": "<|kimi_k25_video_placeholder|>", "vision_config": {"patch_size": 14, "sliding_window": 7},
    "text_config": {
        "_name_or_path": "", "add_cross_attention": false, "attention_bias": false, "attention_dropout": 0.0, "aux_loss_alpha": 0.001,
        "bos_token_id": 163584, "chunk_size_feed_forward": 0, "dtype": "bfloat16", "eos_token_id": 163585, "ep_size": 1,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168, "id2label": {"0": "LABEL_0"}, "initializer_range": 0.02,
        "intermediate_size": 18432, "is_decoder": false, "kv_lora_rank": 512, "max_position_embeddings": 262144,
        "model_type": "kimi_k2", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384,
        "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
        "quantization_config": {
            "config_groups": {"group_0": {
                "input_activations": null, "output_activations": null, "targets": ["Linear"],
                "weights": {"actorder": null, "block_structure": null, "dynamic": false, "group_size": 32, "num_bits": 4,
                            "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": true, "type": "int"}}},
            "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*"], "kv_cache_scheme": null,
            "quant_method": "compressed-tensors", "quantization_status": "compressed"},
        "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                            "original_max_position_embeddings": 4096, "rope_theta": 50000.0, "rope_type": "yarn", "type": "yarn"},
        "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": true,
        "tie_word_embeddings": false, "topk_group": 1, "topk_method": "noaux_tc", "use_cache": true, "v_head_dim": 128,
        "vocab_size": 163840}}"""
)
#: DeepSeek V2 Lite's, with the old RoPE keys.
V2_LITE: dict[str, Any] = json.loads(
    """{
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": false, "aux_loss_alpha": 0.001, "bos_token_id": 100000,
    "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": false,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": null,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": true, "tie_word_embeddings": false, "topk_group": 1,
    "topk_method": "greedy", "torch_dtype": "bfloat16", "use_cache": true, "v_head_dim": 128, "vocab_size": 102400}"""
)
#: GLM-4.7-Flash's.
GLM: dict[str, Any] = json.loads(
    """{
    "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829], "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202752, "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": true,
    "num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1, "pad_token_id": 154820, "partial_rotary_factor": 1.0, "q_lora_rank": 768,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 1000000,
    "routed_scaling_factor": 1.8, "tie_word_embeddings": false, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256,
    "vocab_size": 154880}"""
)


def read(config: dict[str, Any], name: str = "model") -> Spec:
    return parse_config(json.dumps(config), name)


def same(a: Spec, b: Spec) -> bool:
    return a.sha256 == b.sha256


def test_published_configs_are_the_shipped_specs() -> None:
    assert same(read(KIMI), load_spec("k26").model_copy(update={"eos_token_id": (163585, 163586), "draft": None}))
    assert same(read(V2_LITE), load_spec("deepseek-v2-lite"))
    assert same(read(GLM), load_spec("glm-4.7-flash"))


@pytest.mark.parametrize("name", ["tiny", "k26", "deepseek-v3", "deepseek-v2-lite", "moonlight-16b-a3b", "glm-4.7-flash"])
def test_what_is_published_is_read_back(name: str) -> None:
    assert read(published_config(load_spec(name)), name) == load_spec(name).with_draft(None)


def test_a_spec_that_no_family_publishes_is_not_written() -> None:
    with pytest.raises(ValueError, match="can publish"):
        published_config(load_spec("tiny").model_copy(update={"scoring_func": "softmax"}))


def changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A config with changes; a key changed to ``...`` is left out, and ``a__b`` reaches inside."""
    config = copy.deepcopy(base)
    for path, value in changes.items():
        *folders, key = path.split("__")
        place = config
        for folder in folders:
            place = place[folder]
        if value is ...:
            del place[key]
        else:
            place[key] = value
    return config


@pytest.mark.parametrize(
    ("base", "changes", "field", "value"),
    [
        (KIMI, {"text_config__model_type": "deepseek_v3"}, "model_type", "deepseek_v3"),
        (KIMI, {"text_config__quantization_config": ...}, "quantization", None),
        (KIMI, {"quantization_config": KIMI["text_config"]["quantization_config"]}, "dtype", "bfloat16"),
        (KIMI, {"text_config__tie_word_embeddings": ..., "tie_word_embeddings": True}, "tie_word_embeddings", True),
        (KIMI, {"text_config__vocab_size": 100}, "eos_token_id", ()),
        (KIMI, {"text_config__dtype": ..., "dtype": "float32"}, "dtype", "float32"),
        (V2_LITE, {"torch_dtype": ...}, "dtype", "bfloat16"),
        (V2_LITE, {"n_group": 8, "topk_group": 3}, "n_group", 1),  # greedy knows no groups
        (V2_LITE, {"n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"}, "topk_group", 3),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob", False),
        (V2_LITE, {"n_shared_experts": None}, "n_shared_experts", 0),
        (V2_LITE, {"n_routed_experts": None}, "first_k_dense_replace", 27),
        (V2_LITE, {"first_k_dense_replace": 27}, "n_routed_experts", None),
        (V2_LITE, {"rope_scaling": {"type": "default"}}, "rope_scaling", None),
        (V2_LITE, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000, **V2_LITE["rope_scaling"]}}, "rope_theta", 10000.0),
        (V2_LITE, {"attention_bias": ...}, "attention_bias", False),
        (V2_LITE, {"sliding_window": None, "use_sliding_window": False, "layer_types": ["full_attention"] * 27}, "kv_lora_rank", 512),
        (GLM, {"n_group": ..., "topk_group": ..., "topk_method": ...}, "n_group", 1),
        (GLM, {"first_k_dense_replace": ...}, "first_k_dense_replace", 1),
        (GLM, {"first_k_dense_replace": ..., "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 45}, "first_k_dense_replace", 2),
        (GLM, {"first_k_dense_replace": ..., "mlp_layer_types": ["sparse"] * 47}, "first_k_dense_replace", 0),
        (GLM, {"first_k_dense_replace": ..., "mlp_layer_types": ["dense"] * 47}, "n_routed_experts", None),
        (GLM, {"n_routed_experts": ..., "num_local_experts": 64}, "n_routed_experts", 64),
        (GLM, {"rope_interleave": False}, "rope_interleave", False),
    ],
)
def test_variants(base: dict[str, Any], changes: dict[str, Any], field: str, value: object) -> None:
    assert getattr(read(changed(base, **changes)), field) == value


INT4 = "text_config__quantization_config"
GROUP = f"{INT4}__config_groups__group_0"
REFUSALS: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    (GLM, {"model_type": "llama"}, "model_type", "supported are deepseek_v3, kimi_k2, deepseek_v2, glm4_moe_lite, kimi_k25"),
    (GLM, {"model_type": ...}, "model_type", "supported are"),
    (GLM, {"index_topk": 2048}, "index_topk", "unknown config key"),
    (KIMI, {"audio_config": {}}, "audio_config", "unknown wrapper key"),
    (KIMI, {"text_config__clip_qkv": 8}, "text_config.clip_qkv", "unknown config key"),
    (GLM, {"sliding_window": 4096}, "sliding_window", "supported is null"),
    (GLM, {"use_sliding_window": True}, "use_sliding_window", "supported is false"),
    (GLM, {"layer_types": ["sliding_attention"]}, "layer_types", "full_attention"),
    (GLM, {"partial_rotary_factor": 0.5}, "partial_rotary_factor", "supported is 1"),
    (GLM, {"moe_layer_freq": 2}, "moe_layer_freq", "supported is 1"),
    (GLM, {"mlp_bias": True}, "mlp_bias", "supported is false"),
    (GLM, {"hidden_act": "gelu"}, "hidden_act", "'silu'"),
    (GLM, {"dtype": "float16"}, "dtype", "'bfloat16' or 'float32'"),
    (GLM, {"num_key_value_heads": 4}, "num_key_value_heads", "must equal num_attention_heads"),
    (GLM, {"qk_head_dim": 7}, "qk_head_dim", "qk_nope_head_dim + qk_rope_head_dim"),
    (GLM, {"scoring_func": "softmax"}, "scoring_func", "sigmoid alone"),
    (GLM, {"topk_method": "greedy"}, "topk_method", "noaux_tc alone"),
    (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func", "softmax alone"),
    (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method", "greedy and group_limited_greedy"),
    (V2_LITE, {"rope_interleave": False}, "rope_interleave", "interleaved pairs alone"),
    (V2_LITE, {"topk_method": "group_limited_greedy", "n_group": ...}, "n_group", "missing"),
    (V2_LITE, {"q_lora_rank": ...}, "q_lora_rank", "missing"),
    (V2_LITE, {"routed_scaling_factor": ...}, "routed_scaling_factor", "missing"),
    (GLM, {"mlp_layer_types": ["dense", "sparse", "dense"]}, "mlp_layer_types", "dense layers, then sparse"),
    (GLM, {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 45}, "first_k_dense_replace", "contradicts mlp_layer_types"),
    (GLM, {"num_local_experts": 8}, "num_local_experts", "contradicts"),
    (GLM, {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.type", "supported are default and yarn"),
    (GLM, {"rope_scaling": {"rope_type": "llama3", "type": "yarn"}}, "rope_scaling.rope_type", "supported are default and yarn"),
    (GLM, {"rope_scaling": {"factor": 2}}, "rope_scaling.rope_type", "missing or default"),
    (GLM, {"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_scaling.original_max_position_embeddings", "missing"),
    (GLM, {"rope_parameters": {"rope_type": "default", "rope_theta": 5}}, "rope_parameters.rope_theta", "contradicts"),
    (V2_LITE, {"rope_parameters": {"rope_type": "default"}}, "rope_parameters", "contradicts rope_scaling"),
    (V2_LITE, {"rope_scaling__truncate": False}, "rope_scaling.truncate", "not supported"),
    (V2_LITE, {"rope_scaling__long_factor": []}, "rope_scaling.long_factor", "unknown RoPE key"),
    (GLM, {"rope_theta": ...}, "rope_theta", "missing"),
    (GLM, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config.quant_method", "compressed-tensors pack-quantized"),
    (GLM, {"quantization_config": []}, "quantization_config", "mapping"),
    (KIMI, {"text_config": 3}, "text_config", "mapping"),
    (KIMI, {f"{INT4}__format": "float-quantized"}, f"{INT4}__format", "not supported"),
    (KIMI, {f"{INT4}__kv_cache_scheme": {"num_bits": 8}}, f"{INT4}__kv_cache_scheme", "cache"),
    (KIMI, {f"{INT4}__sparsity_config": {"a": 1}}, f"{INT4}__sparsity_config", "dense"),
    (KIMI, {f"{INT4}__config_groups__b": {}}, f"{INT4}__config_groups", "one group"),
    (KIMI, {f"{GROUP}__input_activations": {"num_bits": 8}}, f"{GROUP}__input_activations", "activations"),
    (KIMI, {f"{GROUP}__weights__num_bits": 8}, f"{GROUP}__weights__num_bits", "4-bit"),
    (KIMI, {f"{GROUP}__weights__type": "float"}, f"{GROUP}__weights__type", "4-bit int"),
    (KIMI, {f"{GROUP}__weights__symmetric": False}, f"{GROUP}__weights__symmetric", "asymmetric is not supported"),
    (KIMI, {f"{GROUP}__weights__symmetric": 1}, f"{GROUP}__weights__symmetric", "asymmetric is not supported"),
    (KIMI, {f"{GROUP}__weights__actorder": "group"}, f"{GROUP}__weights__actorder", "act-order is not supported"),
    (KIMI, {f"{GROUP}__weights__strategy": "channel"}, f"{GROUP}__weights__strategy", "group 32"),
    (KIMI, {f"{GROUP}__weights__group_size": 16}, f"{GROUP}__weights__group_size", "group 32, 64 or 128"),
    (KIMI, {f"{GROUP}__weights__zero_point": 1}, f"{GROUP}__weights__zero_point", "unknown quantization key"),
    (KIMI, {"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method", "compressed-tensors"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "changes", "key", "reason"), REFUSALS, ids=[str(i) for i in range(len(REFUSALS))])
def test_refusals(base: dict[str, Any], changes: dict[str, Any], key: str, reason: str) -> None:
    with pytest.raises(SpecError) as error:
        read(changed(base, **changes))
    found = {finding.key: finding.reason for finding in error.value.findings}
    assert key.replace("__", ".") in found, found
    assert reason in found[key.replace("__", ".")]


@pytest.mark.parametrize(
    ("base", "changes", "said"),
    [
        (KIMI, {"text_config__hidden_size": "7168"}, {"text_config.hidden_size = '7168': must be a valid integer"}),
        (KIMI, {"text_config__rope_parameters__factor": ...}, {"text_config.rope_parameters.factor: missing"}),
        (KIMI, {f"{GROUP}__weights__group_size": 128, "text_config__moe_intermediate_size": 160},
         {f"{GROUP}__weights__group_size = 128: does not divide moe_intermediate_size 160".replace("__", ".")}),
        (KIMI, {"text_config__dtype": ..., "dtype": "float16"}, {"dtype = 'float16': must be 'bfloat16' or 'float32'"}),
        (KIMI, {"tie_word_embeddings": None}, {"tie_word_embeddings = None: must be a valid boolean"}),
        (KIMI, {"text_config__eos_token_id": None, "eos_token_id": "x"}, {"eos_token_id = 'x': must be a token id or a list of them"}),
        (GLM, {"eos_token_id": True}, {"eos_token_id = True: must be a token id or a list of them"}),
        (KIMI, {"text_config__eos_token_id": 1.5}, {"text_config.eos_token_id = 1.5: must be a token id or a list of them"}),
        (GLM, {"eos_token_id": [1, True]}, {"eos_token_id.1 = True: must be a valid integer"}),
        (KIMI, {"text_config": None}, {"text_config = None: must be a mapping"}),
        (KIMI, {"text_config": ...}, {"text_config: must be a mapping"}),
        (V2_LITE, {"rope_scaling__factor": 0.5}, {"rope_scaling.factor = 0.5: must be greater than or equal to 1"}),
        (V2_LITE, {"rope_theta": -1}, {"rope_theta = -1: must be greater than 0"}),
        (V2_LITE, {"rope_theta": ..., "rope_scaling": ..., "rope_parameters": {"rope_type": "x", "rope_theta": 5}},
         {"rope_parameters.rope_type = 'x': not supported; supported are default and yarn"}),
        (V2_LITE, {"rope_theta": ..., "rope_scaling": ..., "rope_parameters": {"rope_type": "default", "rope_theta": "5"}},
         {"rope_parameters.rope_theta = '5': must be a valid number"}),
        (V2_LITE, {"rope_theta": ..., "rope_scaling": ..., "rope_parameters": {"rope_type": "default"}},
         {"rope_parameters.rope_theta: missing"}),
        (V2_LITE, {"torch_dtype": "float16"}, {"torch_dtype = 'float16': must be 'bfloat16' or 'float32'"}),
        (GLM, {"n_routed_experts": ..., "num_local_experts": -1}, {"num_local_experts = -1: must be greater than 0"}),
        (GLM, {"rope_parameters": [1], "rope_theta": ..., "rope_scaling": ...},
         {"rope_parameters = [1]: must be a mapping", "rope_theta: missing"}),
        (GLM, {"atention_bias": True},
         {"atention_bias = True: unknown config key: it may change what the model computes; did you mean attention_bias?"}),
    ],
)  # fmt: skip
def test_messages_name_the_keys_that_the_file_has(base: dict[str, Any], changes: dict[str, Any], said: set[str]) -> None:
    with pytest.raises(SpecError) as error:
        read(changed(base, **changes))
    assert {str(finding).removeprefix("config.json: ") for finding in error.value.findings} == said


@pytest.mark.parametrize(
    ("base", "changes", "field", "value"),
    [
        (KIMI, {"tie_word_embeddings": ...}, "tie_word_embeddings", True),
        (KIMI, {"text_config__tie_word_embeddings": True}, "tie_word_embeddings", False),
        (KIMI, {"tie_word_embeddings": True}, "tie_word_embeddings", True),
        (KIMI, {"text_config__model_type": ...}, "model_type", "deepseek_v3"),
        (KIMI, {f"{GROUP}__weights__actorder": "static"}, "dtype", "bfloat16"),
        (KIMI, {f"{GROUP}__weights__actorder": "weight"}, "dtype", "bfloat16"),
        (KIMI, {f"{GROUP}__weights__strategy": ...}, "dtype", "bfloat16"),
        (KIMI, {f"{INT4}__sparsity_config": {"format": "dense", "global_sparsity": 0.14, "ignore": []}}, "dtype", "bfloat16"),
        (KIMI, {f"{INT4}__transform_config": {"config_groups": {}}, f"{INT4}__run_compressed": True}, "dtype", "bfloat16"),
        (GLM, {"_attn_implementation_autoset": True, "_experts_implementation": "eager", "unk_token_id": 0}, "n_group", 1),
        (GLM, {"model_max_length": 4096, "cache_implementation": None, "keys_to_ignore_at_inference": ["past_key_values"]}, "n_group", 1),
        (GLM, {"transformers.js_config": {"dtype": "q4"}, "add_bos_token": True}, "n_group", 1),
        (GLM, {"eos_token_id": -1}, "eos_token_id", ()),
    ],
)
def test_what_others_read_is_read(base: dict[str, Any], changes: dict[str, Any], field: str, value: object) -> None:
    assert getattr(read(changed(base, **changes)), field) == value


def test_every_finding_comes_at_once() -> None:
    with pytest.raises(SpecError) as error:
        read(
            changed(
                GLM, sliding_window=1, hidden_size="x", quantization_config={"quant_method": "gptq"}, new_thing=1, num_experts_per_tok=65
            )
        )
    assert {f.key for f in error.value.findings} == {
        "sliding_window", "hidden_size", "quantization_config.quant_method", "new_thing", "num_experts_per_tok",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "valid JSON"), ("[]", "mapping"), ('{"a": NaN}', "NaN"), ('{"a": 1, "a": 2}', "given twice"), ("[" * 99999, "nested too deeply"),
     ('{"a": ' + "9" * 5000 + "}", "valid JSON")],
)  # fmt: skip
def test_text_that_is_refused(text: str, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        parse_config(text)


def test_files(tmp_path: Path) -> None:
    folder = tmp_path / "Kimi K2.5 (Instruct)"
    folder.mkdir()
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: load_config(folder), "config.json: file: cannot be read: No such file"),
        (lambda: load_config(tmp_path / "none"), "cannot be read"),
    ]
    for attempt, message in refused:
        with pytest.raises(SpecError, match=message):
            attempt()
    (folder / "config.json").write_text(json.dumps(KIMI))
    assert load_config(folder) == load_config(folder / "config.json")
    assert load_config(folder).name == "kimi-k2.5-instruct"


def test_a_model_in_a_hubs_cache_has_its_own_name(tmp_path: Path) -> None:
    kept = tmp_path / "models--moonshotai--Kimi-K2.5"
    (kept / "blobs").mkdir(parents=True)
    (kept / "blobs" / "0f3a").write_text(json.dumps(KIMI))
    revision = kept / "snapshots" / "4e22ff"
    revision.mkdir(parents=True)
    (revision / "config.json").symlink_to("../../blobs/0f3a")
    (tmp_path / "link").symlink_to(revision)
    elsewhere = tmp_path / "Mine"
    elsewhere.mkdir()
    (elsewhere / "config.json").symlink_to(kept / "blobs" / "0f3a")
    assert load_config(revision).name == load_config(revision / "config.json").name == load_config(tmp_path / "link").name == "kimi-k2.5"
    assert load_config(elsewhere).name == "mine"


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("", "model"),
        ("...", "model"),
        ("漢", "model"),
        ("A_b.C", "a_b.c"),
        ("x" * 99, "x" * 64),
        ("CON", "model-con"),
        ("lpt1.x", "model-lpt1.x"),
    ],
)
def test_names_from_folders(folder: str, name: str) -> None:
    assert spec_name(folder) == name
