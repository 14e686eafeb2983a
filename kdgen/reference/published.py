"""The numbers that a published ``config.json`` stands for, by code of the reference's own.

Engine and reference would share a mistake in a property that both read, so this reads the file's keys by itself: it knows nothing of
``kdgen.spec.model``, ``kdgen.spec.published`` or ``kdgen.spec.rope``. A spec's own file has the same keys. An absent key and a
null have the meaning that the models' published code (transformers' config classes) gives them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

#: The norms inside the projections are made without the config's epsilon.
INNER_EPS = 1e-6


@dataclass(frozen=True)
class Yarn:
    """Stretching of RoPE from ``original`` positions by ``factor``; pairs that turn ``fast`` times or more in them stay."""

    factor: float
    original: float
    fast: float
    slow: float


@dataclass(frozen=True)
class Rope:
    """How ``width`` elements of a head turn; cos and sin are multiplied by ``amplitude``."""

    width: int
    theta: float
    yarn: Yarn | None
    amplitude: float

    def frequencies(self) -> F64:
        """Radians a position of each pair, [width / 2], as the formulas have them."""
        pairs = np.arange(self.width // 2)
        plain: F64 = self.theta ** (-2 * pairs / self.width)
        return plain if self.yarn is None else self._blend(plain, plain / self.yarn.factor)

    def tables(self, positions: NDArray[np.int64]) -> tuple[F64, F64]:
        """(cos, sin) [T, width / 2] of angles that are float32 products of float32 frequencies, as the published code has them: far from
        the start the rounding of an angle is more than any of a table."""
        powers = (np.float64(np.float32(self.theta)) ** (np.arange(0, self.width, 2) / self.width)).astype(np.float32)
        plain = np.float32(1) / powers
        turns = plain if self.yarn is None else self._blend32(plain, powers)
        angles = (positions.astype(np.float32)[:, None] * turns).astype(np.float64)
        return self.amplitude * np.cos(angles), self.amplitude * np.sin(angles)

    def _ramp(self) -> F64:
        """How much of each pair is stretched, from 0 to 1; the ends of the ramp are whole pairs."""
        assert self.yarn is not None

        def pair(turns: float, yarn: Yarn) -> float:
            return self.width / 2 * math.log(yarn.original / (2 * math.pi * turns), self.theta)

        first, last = max(math.floor(pair(self.yarn.fast, self.yarn)), 0), min(math.ceil(pair(self.yarn.slow, self.yarn)), self.width - 1)
        ramp: F64 = np.clip((np.arange(self.width // 2) - first) / (last - first if last != first else 0.001), 0, 1)
        return ramp

    def _blend(self, plain: F64, stretched: F64) -> F64:
        ramp = self._ramp()
        return plain + (stretched - plain) * ramp

    def _blend32(self, plain: F32, powers: F32) -> F32:
        assert self.yarn is not None
        ramp = self._ramp().astype(np.float32)
        kept = np.float32(1) - ramp
        with np.errstate(over="ignore"):
            stretched = np.float32(1) / (np.float32(self.yarn.factor) * powers)
        return stretched * (np.float32(1) - kept) + plain * kept


@dataclass(frozen=True)
class Router:
    """``best`` expert scores of a group add up to the group's; 0: there are no groups to choose from."""

    experts: int
    chosen: int
    softmax: bool
    bias: bool
    groups: int
    kept_groups: int
    best: int
    normalise: bool
    factor: float


@dataclass(frozen=True)
class Published:
    """What a decode computes with. ``query_rank`` None: queries have no low-rank form; ``router`` None: every layer is dense."""

    vocabulary: int
    hidden: int
    layers: int
    dense_layers: int
    heads: int
    query_rank: int | None
    latent: int
    nope: int
    value: int
    eps: float
    inner_eps: float
    biased: bool
    tied: bool
    interleaved: bool
    softmax_scale: float
    rope: Rope
    router: Router | None
    dense_width: int
    expert_width: int
    shared_width: int


def read(config: Mapping[str, Any]) -> Published:
    """The numbers of a config's mapping, a wrapper's text model among them. The config must be one that ``load_config`` accepts."""
    text: Mapping[str, Any] = config["text_config"] if config.get("text_config") else config
    family = text.get("model_type", "deepseek_v3")
    layers = int(text["num_hidden_layers"])
    nope, rotated = int(text["qk_nope_head_dim"]), int(text["qk_rope_head_dim"])
    rope = read_rope(text, rotated)
    dense = _dense_layers(text, family, layers)
    shared = int(_given(text, "n_shared_experts", 0)) if dense < layers else 0
    tied = (
        text.get("tie_word_embeddings", False) if text is config else config.get("tie_word_embeddings", True)
    )  # a wrapper's head is its own
    expert_width = int(_given(text, "moe_intermediate_size", 0))
    return Published(
        vocabulary=int(text["vocab_size"]), hidden=int(text["hidden_size"]), layers=layers, dense_layers=dense,
        heads=int(text["num_attention_heads"]), query_rank=text.get("q_lora_rank"), latent=int(text["kv_lora_rank"]), nope=nope,
        value=int(text["v_head_dim"]), eps=float(text["rms_norm_eps"]), inner_eps=INNER_EPS, biased=bool(text.get("attention_bias")),
        tied=bool(tied), interleaved=bool(text.get("rope_interleave", True)),
        softmax_scale=(nope + rotated) ** -0.5 * _scale_of_yarn(text), rope=rope,
        router=_router(text, family) if dense < layers else None, dense_width=int(text["intermediate_size"]),
        expert_width=expert_width, shared_width=shared * expert_width,
    )  # fmt: skip


def read_rope(text: Mapping[str, Any], width: int) -> Rope:
    """RoPE over ``width`` elements as a config or a drafter's config has it, by the old keys or the new ones."""
    rope = _rope_keys(text)
    theta = float(_given(rope, "rope_theta", _given(text, "rope_theta", 10000.0)))
    if not _stretched(rope):
        return Rope(width, theta, None, 1.0)
    factor = float(rope["factor"])
    yarn = Yarn(
        factor, float(rope["original_max_position_embeddings"]), float(_given(rope, "beta_fast", 32)), float(_given(rope, "beta_slow", 1))
    )
    mscale, all_dim = _given(rope, "mscale", 0), _given(rope, "mscale_all_dim", 0)
    if rope.get("attention_factor") is not None:
        amplitude = float(rope["attention_factor"])
    elif mscale and all_dim:
        amplitude = _magnitude(factor, mscale) / _magnitude(factor, all_dim)
    else:
        amplitude = _magnitude(factor, 1)
    return Rope(width, theta, yarn, amplitude)


def _given(values: Mapping[str, Any], key: str, otherwise: Any) -> Any:
    """A key that is absent and one that is null mean the same."""
    return otherwise if values.get(key) is None else values[key]


def _rope_keys(text: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = text.get("rope_scaling") or text.get("rope_parameters") or {}
    return found


def _stretched(rope: Mapping[str, Any]) -> bool:
    return "yarn" in (rope.get("rope_type"), rope.get("type"))


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 1 + 0.1 * weight * math.log(factor)


def _scale_of_yarn(text: Mapping[str, Any]) -> float:
    """What YaRN multiplies the softmax scale by: the square of a magnitude, by the weight for all dims alone."""
    rope = _rope_keys(text)
    all_dim = rope.get("mscale_all_dim")
    return _magnitude(float(rope["factor"]), float(all_dim)) ** 2 if _stretched(rope) and all_dim else 1.0


def _dense_layers(text: Mapping[str, Any], family: str, layers: int) -> int:
    if _given(text, "n_routed_experts", text.get("num_local_experts")) is None:
        return layers
    kinds = text.get("mlp_layer_types")
    if family == "glm4_moe_lite" and kinds is not None:
        return sum(kind == "dense" for kind in kinds)
    return min(int(_given(text, "first_k_dense_replace", 1 if family == "glm4_moe_lite" else 0)), layers)


def _router(text: Mapping[str, Any], family: str) -> Router:
    older = family == "deepseek_v2"
    method = _given(text, "topk_method", "greedy" if older else "noaux_tc")
    groups = int(_given(text, "n_group", 1))
    best = {"noaux_tc": 2, "group_limited_greedy": 1, "greedy": 0}[method] if groups > 1 else 0
    return Router(
        experts=int(_given(text, "n_routed_experts", text.get("num_local_experts"))), chosen=int(text["num_experts_per_tok"]),
        softmax=_given(text, "scoring_func", "softmax" if older else "sigmoid") == "softmax", bias=method == "noaux_tc",
        groups=groups if best else 1, kept_groups=int(_given(text, "topk_group", 1)) if best else 1, best=best,
        normalise=not older and bool(text["norm_topk_prob"]), factor=float(text["routed_scaling_factor"]),
    )  # fmt: skip
