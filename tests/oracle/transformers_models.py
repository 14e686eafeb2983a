"""Fresh random models of every supported family, made, saved and run by Hugging Face transformers (float32, eager attention).

Importing this needs torch, transformers and compressed-tensors: the ``oracle`` extra.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import transformers
from checkpoints import write_safetensors
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from numpy.typing import NDArray

from kdgen.weights.checkpoint import Checkpoint

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)

CLASSES = {
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    "deepseek_v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM),
    "glm4_moe_lite": (transformers.Glm4MoeLiteConfig, transformers.Glm4MoeLiteForCausalLM),
}
BASE: Mapping[str, Any] = {
    "vocab_size": 131, "hidden_size": 96, "intermediate_size": 160, "moe_intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16, "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False,
    "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 50000.0, "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A model to be made: which classes, what differs from ``BASE``, and how it is published."""

    name: str
    kind: str = "deepseek_v3"
    changes: Mapping[str, Any] = field(default_factory=dict)
    prompt: int = 9
    new_tokens: int = 12
    dtype: str = "bfloat16"
    shards: bool = False
    published_as: str = ""  #: another ``model_type`` in config.json: kimi_k2, or the wrapper kimi_k25
    old_rope_keys: bool = False
    int4_group: int = 0


@dataclass(frozen=True)
class Answer:
    """What transformers says: ``logits`` [P + G − 1, V] over prompt + tokens[:−1]."""

    prompt: list[int]
    tokens: list[int]
    logits: NDArray[np.float32]


def make(family: Family, folder: Path) -> Answer:
    """Publish the family's model in ``folder`` and run it."""
    config_class, model_class = CLASSES[family.kind]
    seed = zlib.crc32(family.name.encode())
    config = config_class(**(dict(BASE) | dict(family.changes)))
    model = model_class(config)
    _fill(model, config, torch.Generator().manual_seed(seed))
    model.to(getattr(torch, family.dtype)).save_pretrained(folder, max_shard_size="100KB" if family.shards else "1GB")
    if family.old_rope_keys:
        _old_rope_keys(folder / "config.json")
    loaded = model_class.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", local_files_only=True
    )
    loaded.eval()
    if family.int4_group:
        _quantize(folder, loaded, family.int4_group)
    if family.published_as:
        _publish_as(folder, family.published_as)
    return _run(loaded, np.random.default_rng(seed).integers(0, config.vocab_size, family.prompt).tolist(), family.new_tokens)


def _fill(model: Any, config: Any, generator: torch.Generator) -> None:
    """Values that keep activations of order one and spread the logits; each is exactly a bfloat16."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("norm.weight"):
                values = 1 + 0.1 * noise
            elif name.endswith("e_score_correction_bias"):
                values = 0.05 * noise
            elif name.endswith(".bias"):
                values = 0.1 * noise
            elif "embed_tokens" in name:
                values = noise * (2 / math.sqrt(config.hidden_size) if config.tie_word_embeddings else 1)
            else:
                gain = 2.0 if "lm_head" in name else 1.5 if "o_proj" in name or "down_proj" in name else 1.0
                values = noise * (gain / math.sqrt(tensor.shape[-1]))
            tensor.copy_(values.to(torch.bfloat16))


def _run(model: Any, prompt: list[int], new_tokens: int) -> Answer:
    tokens: list[int] = []
    with torch.no_grad():
        while len(tokens) < new_tokens:
            logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
            tokens.append(int(logits[-1].argmax()))
    return Answer(prompt, tokens, logits.float().numpy())


def _old_rope_keys(file: Path) -> None:
    """``rope_theta`` and ``rope_scaling`` instead of ``rope_parameters``, as configs had it before transformers 5."""
    values = json.loads(file.read_text())
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    values["rope_scaling"] = None if kind == "default" else rope | {"type": kind}
    values["torch_dtype"] = values.pop("dtype")
    file.write_text(json.dumps(values))


def int4_scheme(group: int) -> QuantizationScheme:
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
    return QuantizationScheme(targets=["Linear"], weights=weights)


def decompressed(words: NDArray[Any], scales: NDArray[Any], shape: NDArray[Any], group: int) -> torch.Tensor:
    """Published INT4 tensors to float32, by compressed-tensors; float32 holds a scale times four bits exactly."""
    state = {
        "weight_packed": torch.from_numpy(np.array(words)),
        "weight_scale": torch.from_numpy(scales.astype(np.float32)),
        "weight_shape": torch.from_numpy(np.array(shape)),
    }
    return PackedQuantizationCompressor.decompress(state, int4_scheme(group))["weight"]


def _quantize(folder: Path, model: Any, group: int) -> None:
    """Replace the experts of ``folder`` by what compressed-tensors makes of them, and those of ``model`` by what it reads back."""
    scheme = int4_scheme(group)
    tensors: dict[str, NDArray[Any]] = {}
    checkpoint = Checkpoint(folder)
    for key in checkpoint:
        if ".mlp.experts." not in key:
            tensors[key] = np.array(checkpoint[key])
            continue
        weight = torch.from_numpy(checkpoint[key].astype(np.float32))
        groups = weight.reshape(len(weight), -1, group)
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
        scale = scale.to(torch.bfloat16)
        state = {"weight": weight, "weight_scale": scale.float(), "weight_zero_point": zero}
        words = PackedQuantizationCompressor.compress(state, scheme)["weight_packed"].numpy()
        scales, shape = scale.float().numpy().astype(ml_dtypes.bfloat16), np.array(weight.shape, np.int64)
        tensors |= {f"{key}_packed": words, f"{key}_scale": scales, f"{key}_shape": shape}
        _, _, layer, _, _, expert, name, _ = key.split(".")
        experts = model.model.layers[int(layer)].mlp.experts
        half = weight.shape[0]
        target = {"gate_proj": experts.gate_up_proj[int(expert), :half], "up_proj": experts.gate_up_proj[int(expert), half:]}.get(
            name, experts.down_proj[int(expert)]
        )
        with torch.no_grad():
            target.copy_(decompressed(words, scales, shape, group))
    write_safetensors(folder / "model.safetensors", tensors)
    file = folder / "config.json"
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))


def _publish_as(folder: Path, model_type: str) -> None:
    file = folder / "config.json"
    values = json.loads(file.read_text()) | {"model_type": "kimi_k2"}
    if model_type == "kimi_k25":
        values = {"model_type": "kimi_k25", "text_config": values, "vision_config": {"patch_size": 14}, "tie_word_embeddings": False}
        tensors = {f"language_model.{key}": np.array(array) for key, array in Checkpoint(folder).items()}
        tensors["vision_tower.patch_embed.proj.weight"] = np.zeros((4, 4), np.float32)
        for old in folder.glob("*.safetensors*"):
            old.unlink()
        write_safetensors(folder / "model.safetensors", tensors)
    file.write_text(json.dumps(values))
