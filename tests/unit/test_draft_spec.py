"""DraftSpec and published DFlash configs: what is read, derived and refused, and that a drafter fits its target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kdgen.errors import SpecError
from kdgen.spec.drafter import DraftSpec
from kdgen.spec.model import load_spec, parse_spec
from kdgen.spec.published_drafter import load_draft_config, parse_draft_config

CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 509, "target_layer_ids": [0, 2]},
    "dtype": "bfloat16",
    "head_dim": 48,
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 384,
    "layer_types": ["full_attention", "full_attention"],
    "max_window_layers": 99,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 512,
}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}
SLIDING = {"use_sliding_window": True, "sliding_window": 12}


def read(**changes: Any) -> DraftSpec:
    values = {key: value for key, value in (CONFIG | changes).items() if value is not ...}
    return parse_draft_config(json.dumps(values))


def refused(**changes: Any) -> str:
    with pytest.raises(SpecError) as error:
        read(**changes)
    return str(error.value)


def test_a_published_config() -> None:
    draft = read()
    assert draft.target_layer_ids == (0, 2) and draft.mask_token_id == 509 and draft.block_size == 8
    assert draft.feature_width == 512 and draft.query_width == 192 and draft.key_width == 96 and draft.group_heads == 2
    assert [draft.window(layer) for layer in range(2)] == [0, 0]
    shapes = {name: group.shape for group in draft.tensors() for name in group.names()}
    assert shapes["fc.weight"] == (256, 512) and shapes["layers.1.self_attn.k_proj.weight"] == (96, 256)
    assert "layers.0.self_attn.q_proj.bias" not in shapes
    assert "layers.0.self_attn.q_proj.bias" in {group.key for group in read(attention_bias=True).tensors()}


def test_old_and_new_rope_keys() -> None:
    new = read(rope_theta=..., rope_scaling=..., rope_parameters=YARN | {"rope_theta": 10000.0})
    assert new == read(rope_scaling=YARN)
    assert new.rope_scaling is not None and new.rope_scaling.cos_sin_factor == pytest.approx(1.2772588722)
    equal = read(rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}).rope_scaling
    assert equal is not None and equal.cos_sin_factor == 1
    chosen = read(rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.4}).rope_scaling
    assert chosen is not None and chosen.cos_sin_factor == 1.4


def test_which_layers_slide() -> None:
    kinds = ["sliding_attention", "full_attention"]
    draft = read(layer_types=kinds, **SLIDING)
    assert draft.sliding_mask == "causal" and [draft.window(layer) for layer in range(2)] == [12, 0]
    assert draft.model_copy(update={"sliding_mask": "none"}).window(0) == 0
    # without layer_types, those from max_window_layers on; and a window that is not used is none
    assert [read(layer_types=..., max_window_layers=1, **SLIDING).window(layer) for layer in range(2)] == [0, 12]
    assert read(layer_types=..., max_window_layers=0, sliding_window=12).window(0) == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "is no DFlash drafter; supported is DFlashDraftModel"),
        ({"architectures": ["DFlash2DraftModel"]}, "is no DFlash drafter"),
        ({"dflash_config": ...}, "dflash_config: must be a mapping"),
        ({"dflash_config": {"target_layer_ids": [0]}}, "mask_token_id: missing"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0], "fc_norm": True}}, "fc_norm = True: unknown drafter key"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0], "causal": True}}, "a causal block is not supported"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [2, 1]}}, "target_layer_ids = [2, 1]: must ascend"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": []}}, "target_layer_ids"),
        ({"block_size": 17}, "block_size = 17: must be less than or equal to 16"),
        ({"block_size": True}, "block_size = True: must be a valid integer"),
        ({"head_dim": 47}, "head_dim = 47: must be even"),
        ({"head_dim": 1024}, "head_dim = 1024: must be less than or equal to 512"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3: does not divide num_attention_heads 4"),
        ({"layer_types": ["full_attention"]}, "layer_types = ['full_attention']: names 1 layers of num_hidden_layers 2"),
        ({"layer_types": ["sliding_attention"] * 2}, "missing, or not in use, and layer_types has layers that slide"),
        ({"num_hidden_layers": 2**31 - 1, "layer_types": ...}, "num_hidden_layers = 2147483647: must be less than or equal to 4096"),
        ({"layer_types": ""}, "layer_types = '': must be a valid tuple"),
        ({"use_sliding_window": "false"}, "use_sliding_window = 'false': must be true or false"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': not supported; supported is silu"),
        ({"attention_sinks": True}, "attention_sinks = True: unknown config key"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "supported are default and yarn"),
        ({"rope_theta": 1.0, "rope_scaling": YARN}, "must exceed 1"),
    ],
)  # fmt: skip
def test_refusals(changes: dict[str, Any], said: str) -> None:
    assert said in refused(**changes)


def test_everything_wrong_is_named_at_once() -> None:
    text = refused(block_size=1, hidden_act="gelu", head_dim="48")
    assert all(key in text for key in ("block_size", "hidden_act", "head_dim"))


def test_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert load_draft_config(tmp_path) == load_draft_config(tmp_path / "config.json") == read()
    with pytest.raises(SpecError, match="cannot be read"):
        load_draft_config(tmp_path / "nowhere.json")


# ---- with a target ------------------------------------------------------------------------------------------------------


def test_a_spec_with_a_drafter_is_read_back() -> None:
    for name in ("tiny-dflash", "k26"):
        spec = load_spec(name)
        assert spec.draft is not None and parse_spec(spec.to_yaml()) == spec


def test_the_hash_tells_drafters_apart_and_knows_a_target_without_one() -> None:
    spec, tiny = load_spec("tiny-dflash"), load_spec("tiny")
    assert spec.sha256 != tiny.sha256 == spec.with_draft(None).sha256
    assert spec.with_draft(read()).sha256 != spec.sha256


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 128}, "draft.hidden_size = 128: must be the target's hidden_size 256"),
        ({"dflash_config": {"mask_token_id": 512, "target_layer_ids": [0]}}, "draft.mask_token_id = 512: is not below vocab_size 512"),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 4]}},
            "draft.target_layer_ids = [0, 4]: is not below num_hidden_layers 4",
        ),
    ],
)
def test_drafters_that_do_not_fit(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as error:
        load_spec("tiny").with_draft(read(**changes))
    assert said in str(error.value)


def test_a_draft_section_is_checked_like_the_rest() -> None:
    text = load_spec("tiny-dflash").to_yaml()
    for right, wrong, said in (
        ("  block_size: 8", "  blocksize: 8", "draft.blocksize = 8: unknown key; did you mean block_size?"),
        ("  head_dim: 48", "  head_dim: 47", "draft.head_dim = 47: must be even"),
        ("  num_key_value_heads: 2", "  num_key_value_heads: 0", "draft.num_key_value_heads = 0: must be greater than 0"),
        ("    factor: 8.0", "    factors: 8.0", "draft.rope_scaling.factors = 8.0: unknown key; did you mean factor?"),
    ):
        assert right in text
        with pytest.raises(SpecError) as error:
            parse_spec(text.replace(right, wrong))
        assert said in str(error.value)
