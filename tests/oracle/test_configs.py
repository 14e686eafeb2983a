"""Configs as transformers understands them: which keys are its own bookkeeping, and what a wrapper decides."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from checkpoints import write_model

transformers = pytest.importorskip("transformers", reason="transformers' classes are the oracle; install the oracle extra")

from kdgen.spec.model import load_spec  # noqa: E402
from kdgen.spec.published import known_keys, parse_config  # noqa: E402
from kdgen.spec.publishing import published_config  # noqa: E402
from kdgen.weights.checkpoint import Checkpoint  # noqa: E402
from kdgen.weights.quantize import quantize_model  # noqa: E402
from kdgen.weights.random import random_weights  # noqa: E402


@pytest.mark.parametrize("name", ["PreTrainedConfig", "GenerationConfig", "DeepseekV3Config", "DeepseekV2Config", "Glm4MoeLiteConfig"])
def test_keys_that_transformers_writes_are_known(name: str) -> None:
    assert getattr(transformers, name)().to_dict().keys() <= known_keys()


@pytest.mark.parametrize("outer", [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
@pytest.mark.parametrize("inner", [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
def test_the_wrapper_ties_the_head(outer: dict[str, bool], inner: dict[str, bool]) -> None:
    text = {key: value for key, value in published_config(load_spec("tiny")).items() if key != "tie_word_embeddings"} | inner
    config = transformers.Kimi_K25Config(text_config=dict(text), **outer)
    spec = parse_config(json.dumps({"model_type": "kimi_k25", "text_config": text} | outer))
    assert spec.tie_word_embeddings is config.tie_word_embeddings


def test_what_a_quantized_model_has_plain_is_what_compressed_tensors_leaves_plain(tmp_path: Path) -> None:
    """Experts of a layer that predicts several tokens among it: they are copied as they are, so ``ignore`` must name them."""
    match = pytest.importorskip("compressed_tensors.utils.match", reason="compressed-tensors is the oracle; install the oracle extra")
    spec = load_spec("tiny").model_copy(update={"num_hidden_layers": 2, "vocab_size": 40, "n_routed_experts": 2, "hidden_size": 64})
    whole = dict(random_weights(spec, 5))
    beyond = {key.replace(".layers.1.", ".layers.2."): value for key, value in whole.items() if ".layers.1." in key}
    beyond["model.layers.2.eh_proj.weight"] = whole["lm_head.weight"]
    quantize_model(write_model(tmp_path / "model", spec, whole | beyond), tmp_path / "out", lambda done, total: None)
    ignore = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    seen = {True: 0, False: 0}
    for key in Checkpoint(tmp_path / "out"):
        if re.search(r"(_proj|lm_head)\.weight(_packed)?$", key) and "eh_proj" not in key:
            plain, module = key.endswith(".weight"), key.partition(".weight")[0]
            assert any(match.match_name(module, pattern) for pattern in ignore) is plain, key
            seen[plain] += 1
    assert seen[True] > 6 and seen[False] == 6
