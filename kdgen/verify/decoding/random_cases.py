"""Random models and decoding situations, valid by construction, drawn from whatever makes the choices.

Hypothesis makes the choices in tests, a seed makes them for ``kdgen verify --fuzz``. Every choice has a name. A seed's choice depends on
its name and not on the choices before it, so that a new choice leaves all others as they are. Options stand simplest first, so that taking
an earlier one shrinks. Dimensions are 1, odd, and on both sides of tile edges; tensor cores take the ``TILED`` ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from kdgen.plan.ir import Compute
from kdgen.spec.model import Spec
from kdgen.spec.sampling import GREEDY, Sampling

T = TypeVar("T")

#: Odd, one, and beside the edges of tiles of 8, 16, 32 and 64.
ODD = (1, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96)
TILED = (16, 32, 48, 64, 80, 128)
SEEDS = 2**32
PROMPTS, NEW_TOKENS, SPARES = (1, 2, 7, 31, 33, 64, 70), (1, 2, 9, 16, 20, 20), (0, 1, 70)
#: No situation needs a longer context.
MOST_CONTEXT = max(PROMPTS) + max(NEW_TOKENS) + max(SPARES)
VOCABULARIES = (2, 5, 17, 64, 100, 257)


class Choices(Protocol):
    """Who chooses: Hypothesis, or a seed. No two choices of a model or situation have the same name."""

    def one_of(self, name: str, options: Sequence[T]) -> T: ...

    def integer(self, name: str, low: int, high: int) -> int:
        """Between ``low`` and ``high``, both included."""


class SeededChoices:
    """Choices from a seed. ``taken`` has the number of the option that each choice took; the numbers in ``forced`` are taken instead of
    drawn ones, and a number beyond the options takes the last.
    """

    def __init__(self, seed: int, stream: int = 0, forced: Mapping[str, int] | None = None) -> None:
        self._seed, self._stream, self._forced = seed, stream, forced or {}
        self.taken: dict[str, int] = {}

    def one_of(self, name: str, options: Sequence[T]) -> T:
        return options[self._take(name, len(options))]

    def integer(self, name: str, low: int, high: int) -> int:
        return low + self._take(name, high - low + 1)

    def _take(self, name: str, count: int) -> int:
        assert name not in self.taken, f"two choices are named {name}"
        if name in self._forced:
            number = min(self._forced[name], count - 1)
        else:
            key = [self._seed, self._stream, int.from_bytes(name.encode(), "little")]
            number = int(np.random.default_rng(key).integers(count))
        self.taken[name] = number
        return number


# ---- models -------------------------------------------------------------------------------------------------------------


def draw_model(choices: Choices) -> tuple[Spec, Compute]:
    """A model and a type to compute it in: float32 of any dims, or bf16 on tensor cores."""
    if choices.one_of("tensor_cores", (False, True)):
        return draw_spec(choices, sizes=TILED, quantized=None, dtypes=("bfloat16",)), "bf16"
    return draw_spec(choices, quantized=None), "f32"


def draw_spec(
    choices: Choices,
    sizes: tuple[int, ...] = ODD,
    max_layers: int = 3,
    quantized: bool | None = False,
    dtypes: tuple[str, ...] = ("bfloat16", "float32"),
) -> Spec:
    """A small valid Spec; ``quantized`` None draws either. Families differ as published ones do (V2 routes by softmax, …)."""
    one_of = choices.one_of
    rope_dims = tuple(n for n in (2, 4, 6, 16, 30, 32, 34) if sizes is ODD or n % 16 == 0)
    layers = choices.integer("num_hidden_layers", 1, max_layers)
    family = one_of("model_type", ("deepseek_v3", "kimi_k2", "deepseek_v2", "glm4_moe_lite"))
    vocab = one_of("vocab_size", VOCABULARIES)
    dense = one_of("first_k_dense_replace", sorted({0, 1, layers}, reverse=True))
    values: dict[str, Any] = {
        "name": "drawn",
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": one_of("hidden_size", sizes),
        "num_hidden_layers": layers,
        "num_attention_heads": one_of("num_attention_heads", (1, 2, 3, 4, 5, 17)),
        "q_lora_rank": one_of("q_lora_rank", (None, *sizes)),
        "kv_lora_rank": one_of("kv_lora_rank", sizes),
        "qk_nope_head_dim": one_of("qk_nope_head_dim", sizes),
        "qk_rope_head_dim": one_of("qk_rope_head_dim", rope_dims),
        "v_head_dim": one_of("v_head_dim", sizes),
        "attention_bias": one_of("attention_bias", (False, True)),
        "intermediate_size": one_of("intermediate_size", sizes),
        "first_k_dense_replace": dense,
        "n_routed_experts": None,
        "rms_norm_eps": one_of("rms_norm_eps", (1e-6, 1e-5)),
        "rope_theta": one_of("rope_theta", (10000.0, 50000.0, 1e6)),
        "rope_interleave": family == "deepseek_v2" or one_of("rope_interleave", (True, False)),
        "rope_scaling": _draw_yarn(choices, "") if one_of("rope_scaling", (False, True)) else None,
        "max_position_embeddings": 512,
        "tie_word_embeddings": one_of("tie_word_embeddings", (False, True)),
        "bos_token_id": 0,
        "eos_token_id": one_of("eos_token_id", ([], [1], [0, vocab - 1])),
        "dtype": one_of("dtype", dtypes),
    }
    if dense < layers:
        values |= _draw_routing(choices, family)
        values["moe_intermediate_size"] = one_of("moe_intermediate_size", sizes)
        if quantized or (quantized is None and one_of("quantization", (False, True))):
            group = one_of("group_size", (32, 64))
            values["quantization"] = {"num_bits": 4, "group_size": group, "symmetric": True}
            values |= {key: group * choices.integer(f"groups of {key}", 1, 3) for key in ("hidden_size", "moe_intermediate_size")}
    if one_of("draft", (False, False, True)):
        values["draft"] = _draw_drafter(choices, values, sizes)
    return Spec.from_mapping(values)


def _draw_drafter(choices: Choices, target: dict[str, Any], sizes: tuple[int, ...]) -> dict[str, Any]:
    """A DFlash drafter of a target: any part of its layers read, any mix of layers that slide."""
    one_of, layers = choices.one_of, choices.integer("draft.num_hidden_layers", 1, 2)
    read = sorted({choices.integer(f"draft.target_layer_ids.{i}", 0, target["num_hidden_layers"] - 1) for i in range(3)})
    key_heads = one_of("draft.num_key_value_heads", (1, 2, 3))
    return {
        "hidden_size": target["hidden_size"],
        "num_hidden_layers": layers,
        "num_attention_heads": key_heads * one_of("draft.num_attention_heads", (1, 2, 5)),
        "num_key_value_heads": key_heads,
        "head_dim": one_of("draft.head_dim", tuple(n for n in (2, 6, 16, 30, 32, 48, 80) if sizes is ODD or n % 16 == 0)),
        "intermediate_size": one_of("draft.intermediate_size", sizes),
        "rms_norm_eps": one_of("draft.rms_norm_eps", (1e-6, 1e-5)),
        "rope_theta": one_of("draft.rope_theta", (10000.0, 50000.0)),
        "rope_scaling": _draw_yarn(choices, "draft.") if one_of("draft.rope_scaling", (False, True)) else None,
        "attention_bias": one_of("draft.attention_bias", (False, True)),
        "block_size": choices.integer("draft.block_size", 2, 16),
        "mask_token_id": choices.integer("draft.mask_token_id", 0, target["vocab_size"] - 1),
        "target_layer_ids": read,
        "layer_types": [one_of(f"draft.layer_types.{i}", ("full_attention", "sliding_attention")) for i in range(layers)],
        "sliding_window": one_of("draft.sliding_window", (1, 3, 20, 70)),
        "sliding_mask": one_of("draft.sliding_mask", ("causal", "symmetric", "none")),
        "dtype": target["dtype"],
    }


def _draw_yarn(choices: Choices, at: str) -> dict[str, Any]:
    """YaRN parameters, whose choices' names begin with ``at``: with equal mscales as published, with different ones, and with none."""
    mscale, mscale_all_dim = choices.one_of(f"{at}mscale", ((1.0, 1.0), (0.707, 0.707), (1.0, 0.5), (0.0, 0.0), (0.0, 1.0)))
    return {
        "type": "yarn",
        "factor": choices.one_of(f"{at}factor", (1.0, 4.0, 40.0)),
        "original_max_position_embeddings": choices.one_of(f"{at}original_max_position_embeddings", (16, 64)),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }


def _draw_routing(choices: Choices, family: str) -> dict[str, Any]:
    """Experts, groups and how many of each are chosen: one expert, all experts, one group and several."""
    one_of = choices.one_of
    v2 = family == "deepseek_v2"
    method = one_of("topk_method", ("greedy", "group_limited_greedy")) if v2 else "noaux_tc"
    groups = 1 if method == "greedy" else one_of("n_group", (1, 2, 3))
    per_group = choices.integer("experts_per_group", 1 if v2 or groups == 1 else 2, 4)
    kept = choices.integer("topk_group", 1, groups)
    return {
        "n_routed_experts": groups * per_group,
        "n_group": groups,
        "topk_group": kept,
        "num_experts_per_tok": choices.integer("num_experts_per_tok", 1, kept * per_group),
        "n_shared_experts": choices.integer("n_shared_experts", 0, 2),
        "topk_method": method,
        "scoring_func": "softmax" if v2 else "sigmoid",
        "norm_topk_prob": not v2 and one_of("norm_topk_prob", (False, True)),
        "routed_scaling_factor": one_of("routed_scaling_factor", (1.0, 2.5)),
    }


# ---- situations ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestDraw:
    """One request of a situation. The prompt and the drafter's noise come from ``seed``.

    ``drafter`` is none (plain decoding), replay (right but for ``error_rate``), random, adversarial, ngram or dflash (the model's own;
    random where it has none). ``stop_at``: stop at the token that decoding alone gives there. ``joins``: steps of the batch that pass
    before the request is added.
    """

    seed: int
    prompt_length: int
    new_tokens: int
    chunk: int
    drafter: str
    error_rate: float
    budget: int
    block_size: int
    stop_at: int | None
    sampling: Sampling
    joins: int


@dataclass(frozen=True)
class Situation:
    """Requests decoded together in ``slots`` cache slabs. ``spare``: tokens of context that the longest request leaves free.

    ``max_tokens`` is the most prompt tokens of a step, all requests together.
    """

    weights_seed: int
    requests: tuple[RequestDraw, ...]
    slots: int
    spare: int
    max_tokens: int

    @property
    def context(self) -> int:
        return max(request.prompt_length + request.new_tokens for request in self.requests) + self.spare


SAMPLINGS = (
    GREEDY,
    Sampling(1.0, seed=1),
    Sampling(0.7, top_k=3, seed=2**64 - 1),
    Sampling(1.5, top_p=0.8, seed=2**33),
    Sampling(1.0, min_p=0.1, seed=4),
    Sampling(2.0, top_k=20, top_p=0.9, min_p=0.02, seed=5),
)


def draw_situation(choices: Choices) -> Situation:
    count = choices.one_of("requests", (1, 2, 3, 3, 4))
    return Situation(
        weights_seed=choices.integer("weights_seed", 0, SEEDS - 1),
        requests=tuple(_draw_request(choices, f"requests.{i}.") for i in range(count)),
        slots=choices.integer("slots", 1, 3),
        spare=choices.one_of("spare", SPARES),
        max_tokens=choices.one_of("max_tokens", (64, 7, 1)),
    )


def _draw_request(choices: Choices, at: str) -> RequestDraw:
    one_of = choices.one_of
    return RequestDraw(
        seed=choices.integer(f"{at}seed", 0, SEEDS - 1),
        prompt_length=one_of(f"{at}prompt_length", PROMPTS),
        new_tokens=one_of(f"{at}new_tokens", NEW_TOKENS),
        chunk=one_of(f"{at}chunk", (64, 33, 8, 3, 1)),
        drafter=one_of(f"{at}drafter", ("none", "replay", "replay", "replay", "adversarial", "random", "ngram", "dflash", "dflash")),
        error_rate=one_of(f"{at}error_rate", (0.0, 0.1, 0.3, 1.0)),
        budget=one_of(f"{at}budget", (0, 1, 7, 15, 33, 63)),
        block_size=choices.integer(f"{at}block_size", 2, 16),
        stop_at=one_of(f"{at}stop_at", (None, None, 0, 3, 12)),
        sampling=one_of(f"{at}sampling", SAMPLINGS),
        joins=one_of(f"{at}joins", (0, 1, 3)),
    )


@dataclass(frozen=True)
class RoundsDraw:
    """A request decoded by rounds: ``budgets`` in turn, draft blocks of ``depths`` + 1 rows as far as the drafter goes, ``ahead`` started
    before results are read. ``spare`` and ``stop_at`` as a situation's and a request's."""

    seed: int
    prompt_length: int
    new_tokens: int
    budgets: tuple[int, ...]
    depths: int
    chain: bool
    ahead: int
    stop_at: int | None
    sampling: Sampling
    spare: int


def draw_rounds(choices: Choices) -> RoundsDraw:
    one_of = choices.one_of
    return RoundsDraw(
        seed=choices.integer("seed", 0, SEEDS - 1),
        prompt_length=one_of("prompt_length", PROMPTS),
        new_tokens=one_of("new_tokens", (1, 2, 9, 16)),
        budgets=one_of("budgets", ((0,), (7,), (63,), (15, 0, 7), (1, 33), (31, 63, 0))),
        depths=choices.integer("depths", 1, 15),
        chain=one_of("chain", (False, False, True)),
        ahead=one_of("ahead", (0, 1, 1)),
        stop_at=one_of("stop_at", (None, 0, 3, 5, 8)),
        sampling=one_of("sampling", SAMPLINGS),
        spare=one_of("spare", SPARES),
    )
