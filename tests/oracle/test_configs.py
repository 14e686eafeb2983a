"""Configs as transformers understands them: which keys are its own bookkeeping, and what a wrapper decides."""

from __future__ import annotations

import json

import pytest

transformers = pytest.importorskip("transformers", reason="transformers' classes are the oracle; install the oracle extra")

from kdgen.config import known_keys, parse_config, published_config  # noqa: E402
from kdgen.spec import load_spec  # noqa: E402


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
