"""Published DFlash drafters (z-lab's layout) to DraftSpecs: ``config.json`` of a ``DFlashDraftModel``, a Qwen3 config with
``block_size`` and ``dflash_config``.

As with a target's config, every key is read, known to mean nothing for drafting, or refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kdgen.errors import SpecError
from kdgen.spec.drafter import DraftSpec
from kdgen.spec.fields import MAX_LAYERS, keys
from kdgen.spec.model import MAX_JSON_BYTES
from kdgen.spec.published import HARMLESS, read_dtype, read_rope
from kdgen.spec.published_reader import Origins, Reader, read_json
from kdgen.spec.yaml_text import read_text

ARCHITECTURE = "DFlashDraftModel"
_COPIED = keys(
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size rms_norm_eps attention_bias",
    "block_size",
)
#: Keys that the target decides, or that follow from other keys.
_HARMLESS = HARMLESS | keys(
    "bos_token_id eos_token_id model_type num_target_layers vocab_size tie_word_embeddings max_position_embeddings max_window_layers"
)
_READ = _COPIED | keys("dflash_config dtype torch_dtype hidden_act rope_theta rope_scaling rope_parameters architectures")
_DFLASH = ("mask_token_id", "target_layer_ids")
_SLIDING = keys("layer_types sliding_window use_sliding_window")


def _layer_types(config: Reader) -> dict[str, Any]:
    """Which layers slide, as transformers' Qwen3Config has it: a window counts only with ``use_sliding_window``, and then slides the
    layers from ``max_window_layers`` on, unless ``layer_types`` says which."""
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    layers, first = config.get("num_hidden_layers"), config.get("max_window_layers")
    kinds = config.get("layer_types")
    if kinds is None and isinstance(layers, int) and layers <= MAX_LAYERS:
        first = layers if window is None or not isinstance(first, int) else first
        kinds = ["sliding_attention" if window is not None and layer >= first else "full_attention" for layer in range(layers)]
    return {"layer_types": () if kinds is None else kinds, "sliding_window": window}


def draft_origins() -> Origins:
    """Where a drafter's file has the fields of a ``DraftSpec``."""
    origins = Origins()
    for key in _DFLASH:
        origins.note(key, f"dflash_config.{key}")
    return origins


def parse_draft_config(text: str, file: str = "config.json") -> DraftSpec:
    """A DraftSpec from the text of a drafter's ``config.json``. Raises SpecError with every finding."""
    config = read_json(text, file)
    if config.get("architectures") != [ARCHITECTURE]:
        config.bad("architectures", f"is no DFlash drafter; supported is {ARCHITECTURE}")
        raise SpecError(config.findings)
    config.only(_HARMLESS | _READ | _SLIDING, "config")
    config.must("hidden_act", None, "silu", reason="not supported; supported is silu")
    config.must("use_sliding_window", None, True, False, reason="must be true or false")
    dflash = config.inside("dflash_config")
    dflash.only(keys("mask_token_id target_layer_ids causal"), "drafter")
    dflash.must("causal", None, False, reason="a causal block is not supported: every row sees the whole block")
    out: dict[str, Any] = {key: config.get(key) for key in _COPIED if key in config.values}
    out |= {key: dflash.get(key) for key in _DFLASH if key in dflash.values}
    origins = draft_origins()
    out |= read_rope(config, origins) | _layer_types(config)
    out["dtype"] = read_dtype([config], origins)
    try:
        draft = DraftSpec.from_mapping(out, file)
    except SpecError as error:
        raise origins.refusal(config, error) from None
    if config.findings:
        raise SpecError(config.findings)
    return draft


def load_draft_config(path: str | Path) -> DraftSpec:
    """A DraftSpec from a published drafter: its ``config.json``, or the folder that holds it. Raises SpecError with every finding.

    The mask of sliding layers is ``causal``, as serving engines run them; ``model_copy`` another ``sliding_mask`` in.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    return parse_draft_config(read_text(file, MAX_JSON_BYTES), str(file))


def published_draft_config(draft: DraftSpec) -> dict[str, Any]:
    """The ``config.json`` of a drafter's folder, which ``load_draft_config`` reads back as the same, but for the mask of sliding layers."""
    values = draft.essential(exclude={"mask_token_id", "target_layer_ids", "sliding_mask", "rope_theta", "rope_scaling"})
    scaling = draft.rope_scaling.given() if draft.rope_scaling else {}
    return values | {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "dflash_config": {"mask_token_id": draft.mask_token_id, "target_layer_ids": list(draft.target_layer_ids)},
        "layer_types": list(draft.layer_types or ["full_attention"] * draft.num_hidden_layers),
        "use_sliding_window": draft.sliding_window is not None,
        "rope_parameters": {**scaling, "rope_theta": draft.rope_theta, "rope_type": scaling.pop("type", "default")},
    }
