"""Keys that a config may leave out: absent, null, at their default and at another value, kdgen and its reference against transformers.

Values are compared for all keys. Where transformers makes other tokens of a value, or cannot make a model, kdgen must have said so by the
key's name. Logits are compared for values that change what is computed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdgen.errors import SpecError
from kdgen.reference.model import ReferenceModel
from kdgen.reference.published import Published, read
from kdgen.spec.published import parse_config
from kdgen.verify.published import check_numbers
from kdgen.weights.checkpoint import Checkpoint

theirs = pytest.importorskip(
    "transformers_models", reason="needs torch, transformers and compressed-tensors: install the oracle extra", exc_type=ImportError
)

ABSENT = object()  #: the key is not there
YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0.7}
TOLERANCE = 2e-5  #: of the largest logit's magnitude, float64 against float32


@dataclass(frozen=True)
class Key:
    """An optional key. Its values are tried in the order given, absence and null before them; ``inside`` YaRN's mapping."""

    name: str
    values: tuple[Any, ...]
    inside: bool = False
    kinds: tuple[str, ...] = ("deepseek_v3", "deepseek_v2", "glm4_moe_lite")


V3, V2, GLM = ("deepseek_v3",), ("deepseek_v2",), ("glm4_moe_lite",)
KEYS = (
    Key("attention_bias", (False, True)),
    Key("rope_interleave", (True, False), kinds=V3 + GLM),
    Key("tie_word_embeddings", (False, True)),
    Key("norm_topk_prob", (True, False), kinds=V3 + GLM),
    Key("norm_topk_prob", (False,), kinds=V2),
    Key("routed_scaling_factor", (1.0, 2.5)),
    Key("n_shared_experts", (1, 2)),
    Key("n_group", (1, 2)),
    Key("topk_group", (1, 2)),
    Key("first_k_dense_replace", (0, 1, 3), kinds=V3 + V2),
    Key("mlp_layer_types", (["dense", "sparse", "sparse"], ["sparse"] * 3, ["dense", "dense", "sparse"]), kinds=GLM),
    Key("moe_layer_freq", (1,)),
    Key("topk_method", ("noaux_tc",), kinds=V3 + GLM),
    Key("topk_method", ("greedy", "group_limited_greedy"), kinds=V2),
    Key("scoring_func", ("sigmoid",), kinds=V3 + GLM),
    Key("scoring_func", ("softmax",), kinds=V2),
    Key("rms_norm_eps", (1e-6, 1e-2)),
    Key("q_lora_rank", (48,)),
    Key("num_key_value_heads", (4,)),
    Key("head_dim", (16, 24, 40)),
    Key("qk_head_dim", (40,)),
    Key("hidden_act", ("silu",)),
    Key("rope_theta", (10000.0, 500.0)),
    Key("rope_scaling", (YARN,)),
    Key("factor", (8.0, 1.0, 2), inside=True),
    Key("original_max_position_embeddings", (32, 16), inside=True),
    Key("mscale", (0, 1.0, 0.3), inside=True),
    Key("mscale_all_dim", (0, 1.0, 0.3), inside=True),
    Key("beta_fast", (32, 8.0), inside=True),
    Key("beta_slow", (1, 0.25), inside=True),
    Key("attention_factor", (1.0, 1.3), inside=True),
    Key("truncate", (True, False), inside=True),
)


def config_of(kind: str, key: Key, value: Any) -> dict[str, Any]:
    """A published config of ``kind``, whose ``key`` has ``value``."""
    config = {**theirs.BASE, "model_type": kind, "rope_theta": 10000.0, "rope_scaling": dict(YARN) if key.inside else None}
    del config["rope_parameters"], config["pad_token_id"]
    if kind == "glm4_moe_lite":
        del config["first_k_dense_replace"]
    if kind == "deepseek_v2":
        config |= {"norm_topk_prob": False, "topk_method": "group_limited_greedy"}
    if key.name == "topk_group":
        config["n_group"] = 2
    place = config["rope_scaling"] if key.inside else config
    place.pop(key.name, None)
    if value is not ABSENT:
        place[key.name] = value
    return config


#: What transformers cannot make or run, and the families' own published modelling files can: they ask whether there are shared experts, and
#: read neither of the other two keys.
NOT_READ_BY_THE_VENDORS = (("n_shared_experts", None), ("num_key_value_heads", ABSENT), ("num_key_value_heads", None), ("head_dim", None))


SITUATIONS = [(kind, key, value) for key in KEYS for kind in key.kinds for value in (ABSENT, None, *key.values)]


def shown(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(value)
    return value.name if isinstance(value, Key) else "absent" if value is ABSENT else str(value)[:24].replace(" ", "")


def judged(config: Mapping[str, Any]) -> Any:
    """transformers' config and random model of a published config; None where it refuses or cannot make it."""
    config_class, model_class = theirs.CLASSES[config["model_type"]]
    try:
        made = config_class.from_dict({name: value for name, value in json.loads(json.dumps(config)).items() if name != "model_type"})
        made._attn_implementation, made._experts_implementation = "eager", "eager"
        model = model_class(made)
    except Exception:  # whatever it makes of a config that it does not check
        return None
    theirs._fill(model, made, theirs.torch.Generator().manual_seed(5))
    return model.to(theirs.torch.float32).eval()


def logits_of(model: Any, prompt: list[int]) -> Any:
    try:
        with theirs.torch.no_grad():
            return model(theirs.torch.tensor([prompt]), use_cache=False).logits[0].numpy()
    except Exception:  # shapes that do not fit
        return None


@pytest.mark.parametrize(("kind", "key", "value"), SITUATIONS, ids=shown)
def test_a_key_means_what_it_means_to_transformers(kind: str, key: Key, value: Any, tmp_path: Path) -> None:
    config = config_of(kind, key, value)
    try:
        spec = parse_config(json.dumps(config))
    except SpecError as error:
        assert any(finding.key.split(".")[-1] == key.name for finding in error.findings), str(error)
        return
    assert not check_numbers(spec, config).problems
    prompt, model = list(range(3, 60, 5)), judged(config)
    expected = None if model is None else logits_of(model, prompt)
    if expected is None:
        assert (key.name, value) in NOT_READ_BY_THE_VENDORS, "kdgen accepts what transformers cannot run"
        assert read(config).shared_width == (0 if key.name == "n_shared_experts" else 64)
        return
    agree(read(config), model)
    model.save_pretrained(tmp_path)
    got = ReferenceModel(config, Checkpoint(tmp_path)).forward(prompt).logits
    assert np.abs(got - expected).max() <= TOLERANCE * np.abs(expected).max()


def agree(published: Published, model: Any) -> None:
    """Numbers that transformers' modules hold."""
    attention = model.model.layers[0].self_attn
    assert published.softmax_scale == pytest.approx(attention.scaling, rel=1e-12)
    assert published.inner_eps == attention.kv_a_layernorm.variance_epsilon
    assert published.eps == model.model.norm.variance_epsilon == model.model.layers[1].input_layernorm.variance_epsilon
    assert published.rope.amplitude == pytest.approx(model.model.rotary_emb.attention_scaling, rel=1e-12)
    np.testing.assert_allclose(published.rope.frequencies(), model.model.rotary_emb.inv_freq.numpy(), rtol=2e-6)
    dense = [not hasattr(layer.mlp, "experts") for layer in model.model.layers]
    assert dense == [layer < published.dense_layers for layer in range(published.layers)]
    assert published.tied == (model.lm_head.weight is model.model.embed_tokens.weight)
    assert published.biased == (attention.o_proj.bias is not None)
