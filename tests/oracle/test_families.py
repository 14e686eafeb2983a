"""Every family and variant that kdgen claims to read, as a fresh random model, against Hugging Face transformers.

Needs the ``oracle`` extra (torch, transformers, compressed-tensors), and says so where it is not installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_safetensors
from numpy.typing import NDArray

from kdgen.backends.base import Backend
from kdgen.drafters.ngram import NgramDrafter
from kdgen.drafters.synthetic import ReplayDrafter
from kdgen.reference.model import ReferenceModel
from kdgen.runtime.decode import decode_plain, decode_tree
from kdgen.runtime.model import open_model
from kdgen.runtime.pipeline import open_engine
from kdgen.runtime.request import Request
from kdgen.verify.decoding.recording import RecordingEngine, differing_bits
from kdgen.verify.published import reference_of
from kdgen.weights.checkpoint import Checkpoint
from kdgen.weights.quantize import quantize_model

theirs = pytest.importorskip(
    "transformers_models", reason="needs torch, transformers and compressed-tensors: install the oracle extra", exc_type=ImportError
)
Family, YARN = theirs.Family, theirs.YARN

#: Of the largest logit's magnitude. Here both sides' float32 rounding is about 1e-6, in equal shares when float64 is asked.
RELATIVE_TOLERANCE = 1e-5

V2 = {"norm_topk_prob": False, "rms_norm_eps": 1e-6}
GROUPED = {"n_routed_experts": 12, "n_group": 4, "topk_group": 2}
FAMILIES = [
    Family("v3"),
    Family("v3-float32", dtype="float32"),
    Family("no-q-lora", changes={"q_lora_rank": None}),
    Family("grouped", changes=GROUPED | {"num_experts_per_tok": 4}),
    Family("no-norm-topk", changes={"norm_topk_prob": False}),
    Family("top-1", changes={"num_experts_per_tok": 1}),
    Family("all-experts", changes={"num_experts_per_tok": 8}),
    Family("no-dense-layers", changes={"first_k_dense_replace": 0}),
    Family("all-dense", changes={"first_k_dense_replace": 3}),
    Family("attention-bias", changes={"attention_bias": True}),
    Family("attention-bias-no-q-lora", changes={"attention_bias": True, "q_lora_rank": None}),
    Family("tied", changes={"tie_word_embeddings": True}),
    Family("one-head", changes={"num_attention_heads": 1, "num_key_value_heads": 1}),
    Family("neox", changes={"rope_interleave": False}),
    Family("yarn", changes={"rope_parameters": YARN}, prompt=70),
    Family("yarn-old-keys", changes={"rope_parameters": YARN | {"mscale": 0.707}}, old_rope_keys=True, prompt=40),
    Family("old-keys", old_rope_keys=True),
    Family("two-shared-experts", changes={"n_shared_experts": 2}),
    Family("kimi-k2", changes={"rope_parameters": YARN}, published_as="kimi_k2"),
    Family("kimi-k25-int4", published_as="kimi_k25", int4_group=32),
    Family("int4-group-64", changes={"hidden_size": 128}, int4_group=64),
    Family("v2", "deepseek_v2", V2),
    Family("v2-asks-for-norm-topk", "deepseek_v2", V2 | {"norm_topk_prob": True}),
    Family("v2-grouped", "deepseek_v2", V2 | GROUPED | {"topk_method": "group_limited_greedy", "num_experts_per_tok": 4}),
    Family("v2-yarn-no-q-lora", "deepseek_v2", V2 | {"rope_parameters": YARN | {"mscale": 0.5}, "q_lora_rank": None}, prompt=50),
    Family("glm", "glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "sparse"]}),
    Family("glm-grouped", "glm4_moe_lite", GROUPED | {"mlp_layer_types": ["sparse"] * 3, "first_k_dense_replace": 0}),
    Family("shards", shards=True),
    Family("long-prompt", prompt=200, new_tokens=4),
    Family("one-token-prompt", prompt=1),
    Family("odd-vocabulary", changes={"vocab_size": 97}),
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_family(family: Any, tmp_path: Path, cpu_backend: Backend) -> None:
    answer = theirs.make(family, tmp_path / "model")
    model = open_model(tmp_path / "model")
    context = len(answer.prompt) + len(answer.tokens)
    target = RecordingEngine(open_engine(model, context, "f32", "cpu").engine)
    plain = decode_plain(target, Request(answer.prompt, len(answer.tokens)))
    logits = np.stack(target.logits)
    assert list(plain.tokens) == answer.tokens
    assert np.abs(logits - answer.logits).max() <= RELATIVE_TOLERANCE * np.abs(answer.logits).max()
    check_drafts(target, answer, logits)


def check_drafts(target: RecordingEngine, answer: Any, logits: NDArray[np.float32]) -> None:
    vocabulary = target.engine.spec.vocab_size
    for drafter in (NgramDrafter(), *(ReplayDrafter([*answer.prompt, *answer.tokens], vocabulary, rate) for rate in (0.0, 0.3))):
        tree = decode_tree(target, Request(answer.prompt, len(answer.tokens), drafter=drafter, budget=15))
        assert list(tree.tokens) == answer.tokens
        assert differing_bits(np.stack(target.logits), logits) == 0


@pytest.mark.parametrize("same", [False, True], ids=["another head", "the embedding again"])
def test_a_stored_head_beside_tied_embeddings(tmp_path: Path, same: bool) -> None:
    """transformers ties only what is equal, and warns; so does kdgen."""
    import torch

    folder = tmp_path / "model"
    theirs.make(Family("v3", changes={"tie_word_embeddings": False}), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    if same:
        tensors = {key: np.array(array) for key, array in Checkpoint(folder).items()}
        write_safetensors(folder / "model.safetensors", tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    loaded = theirs.CLASSES["deepseek_v3"][1].from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", local_files_only=True
    )
    answer = theirs._run(loaded.eval(), [3, 5, 7], 2)
    model = open_model(folder)
    assert model.spec.tie_word_embeddings is same and bool(model.notes) is not same
    logits = ReferenceModel(model.spec.model_dump(mode="json"), Checkpoint(folder)).forward([*answer.prompt, *answer.tokens[:-1]]).logits
    assert np.abs(logits - answer.logits).max() <= RELATIVE_TOLERANCE * np.abs(answer.logits).max()


def test_what_kdgen_quantizes_is_what_compressed_tensors_reads(tmp_path: Path) -> None:
    theirs.make(Family("to-quantize"), tmp_path / "model")
    spec, matrices = quantize_model(tmp_path / "model", tmp_path / "int4", lambda done, total: None)
    written, plain = Checkpoint(tmp_path / "int4"), reference_of(spec, Checkpoint(tmp_path / "int4"))
    keys = [key.removesuffix("_packed") for key in written if key.endswith("_packed")]
    assert len(keys) == matrices == 2 * 8 * 3
    for key in keys:
        read = theirs.decompressed(written[f"{key}_packed"], written[f"{key}_scale"], written[f"{key}_shape"], 32)
        np.testing.assert_array_equal(read.numpy().astype(np.float64), plain.weight(key))
