"""Random models and decoding situations, valid by construction, drawn from whatever makes the choices.

Hypothesis makes them in tests, a seed makes them for ``kdgen verify --fuzz``. Options stand simplest first, so that taking
an earlier one shrinks. Dimensions are of 1, odd, and on both sides of tile edges; ``TILED`` ones are what tensor cores take.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Who chooses: Hypothesis, or a seed."""

    def one_of(self, options: Sequence[T]) -> T: ...

    def integer(self, low: int, high: int) -> int:
        """Between ``low`` and ``high``, both included."""


class SeededChoices:
    """Choices from a seed. ``taken`` numbers the option of each choice; ``forced`` numbers are taken instead of drawn ones.

    A forced number beyond the options takes the last.
    """

    def __init__(self, seed: int, stream: int = 0, forced: Sequence[int] = ()) -> None:
        self._rng = np.random.default_rng([seed, stream])
        self._forced = forced
        self.taken: list[int] = []

    def one_of(self, options: Sequence[T]) -> T:
        return options[self._take(len(options))]

    def integer(self, low: int, high: int) -> int:
        return low + self._take(high - low + 1)

    def _take(self, count: int) -> int:
        number, place = int(self._rng.integers(count)), len(self.taken)
        if place < len(self._forced):
            number = min(self._forced[place], count - 1)
        self.taken.append(number)
        return number


# ---- models -------------------------------------------------------------------------------------------------------------


def draw_model(choices: Choices) -> tuple[Spec, Compute]:
    """A model and a type to compute it in: float32 of any dims, or bf16 on tensor cores."""
    if choices.one_of((False, True)):
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
    layers = choices.integer(1, max_layers)
    family = one_of(("deepseek_v3", "kimi_k2", "deepseek_v2", "glm4_moe_lite"))
    vocab = one_of(VOCABULARIES)
    dense = one_of(sorted({0, 1, layers}, reverse=True))
    values: dict[str, Any] = {
        "name": "drawn",
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": one_of(sizes),
        "num_hidden_layers": layers,
        "num_attention_heads": one_of((1, 2, 3, 4, 5, 17)),
        "q_lora_rank": one_of((None, *sizes)),
        "kv_lora_rank": one_of(sizes),
        "qk_nope_head_dim": one_of(sizes),
        "qk_rope_head_dim": one_of(rope_dims),
        "v_head_dim": one_of(sizes),
        "attention_bias": one_of((False, True)),
        "intermediate_size": one_of(sizes),
        "first_k_dense_replace": dense,
        "n_routed_experts": None,
        "rms_norm_eps": one_of((1e-6, 1e-5)),
        "rope_theta": one_of((10000.0, 50000.0, 1e6)),
        "rope_interleave": family == "deepseek_v2" or one_of((True, False)),
        "rope_scaling": _draw_yarn(choices) if one_of((False, True)) else None,
        "max_position_embeddings": 512,
        "tie_word_embeddings": one_of((False, True)),
        "bos_token_id": 0,
        "eos_token_id": one_of(([], [1], [0, vocab - 1])),
        "dtype": one_of(dtypes),
    }
    if dense < layers:
        values |= _draw_routing(choices, family)
        values["moe_intermediate_size"] = one_of(sizes)
        if quantized or (quantized is None and one_of((False, True))):
            group = one_of((32, 64))
            values["quantization"] = {"num_bits": 4, "group_size": group, "symmetric": True}
            values |= {key: group * choices.integer(1, 3) for key in ("hidden_size", "moe_intermediate_size")}
    if one_of((False, False, True)):
        values["draft"] = _draw_drafter(choices, values, sizes)
    return Spec.from_mapping(values)


def _draw_drafter(choices: Choices, target: dict[str, Any], sizes: tuple[int, ...]) -> dict[str, Any]:
    """A DFlash drafter of a target: any part of its layers read, any mix of layers that slide."""
    one_of, layers = choices.one_of, choices.integer(1, 2)
    read = sorted({choices.integer(0, target["num_hidden_layers"] - 1) for _ in range(3)})
    key_heads = one_of((1, 2, 3))
    return {
        "hidden_size": target["hidden_size"],
        "num_hidden_layers": layers,
        "num_attention_heads": key_heads * one_of((1, 2, 5)),
        "num_key_value_heads": key_heads,
        "head_dim": one_of(tuple(n for n in (2, 6, 16, 30, 32, 48, 80) if sizes is ODD or n % 16 == 0)),
        "intermediate_size": one_of(sizes),
        "rms_norm_eps": one_of((1e-6, 1e-5)),
        "rope_theta": one_of((10000.0, 50000.0)),
        "rope_scaling": _draw_yarn(choices) if one_of((False, True)) else None,
        "attention_bias": one_of((False, True)),
        "block_size": choices.integer(2, 16),
        "mask_token_id": choices.integer(0, target["vocab_size"] - 1),
        "target_layer_ids": read,
        "layer_types": [one_of(("full_attention", "sliding_attention")) for _ in range(layers)],
        "sliding_window": one_of((1, 3, 20, 70)),
        "sliding_mask": one_of(("causal", "symmetric", "none")),
        "dtype": target["dtype"],
    }


def _draw_yarn(choices: Choices) -> dict[str, Any]:
    """YaRN parameters: with equal mscales as published, with different ones, and with none."""
    mscale, mscale_all_dim = choices.one_of(((1.0, 1.0), (0.707, 0.707), (1.0, 0.5), (0.0, 0.0), (0.0, 1.0)))
    return {
        "type": "yarn",
        "factor": choices.one_of((1.0, 4.0, 40.0)),
        "original_max_position_embeddings": choices.one_of((16, 64)),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }


def _draw_routing(choices: Choices, family: str) -> dict[str, Any]:
    """Experts, groups and how many of each are chosen: one expert, all experts, one group and several."""
    one_of = choices.one_of
    v2 = family == "deepseek_v2"
    method = one_of(("greedy", "group_limited_greedy")) if v2 else "noaux_tc"
    groups = 1 if method == "greedy" else one_of((1, 2, 3))
    per_group = choices.integer(1 if v2 or groups == 1 else 2, 4)
    kept = choices.integer(1, groups)
    return {
        "n_routed_experts": groups * per_group,
        "n_group": groups,
        "topk_group": kept,
        "num_experts_per_tok": choices.integer(1, kept * per_group),
        "n_shared_experts": choices.integer(0, 2),
        "topk_method": method,
        "scoring_func": "softmax" if v2 else "sigmoid",
        "norm_topk_prob": not v2 and one_of((False, True)),
        "routed_scaling_factor": one_of((1.0, 2.5)),
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
    count = choices.one_of((1, 2, 3, 3, 4))
    return Situation(
        weights_seed=choices.integer(0, SEEDS - 1),
        requests=tuple(_draw_request(choices) for _ in range(count)),
        slots=choices.integer(1, 3),
        spare=choices.one_of(SPARES),
        max_tokens=choices.one_of((64, 7, 1)),
    )


def _draw_request(choices: Choices) -> RequestDraw:
    one_of = choices.one_of
    return RequestDraw(
        seed=choices.integer(0, SEEDS - 1),
        prompt_length=one_of(PROMPTS),
        new_tokens=one_of(NEW_TOKENS),
        chunk=one_of((64, 33, 8, 3, 1)),
        drafter=one_of(("none", "replay", "replay", "replay", "adversarial", "random", "ngram", "dflash", "dflash")),
        error_rate=one_of((0.0, 0.1, 0.3, 1.0)),
        budget=one_of((0, 1, 7, 15, 33, 63)),
        block_size=choices.integer(2, 16),
        stop_at=one_of((None, None, 0, 3, 12)),
        sampling=one_of(SAMPLINGS),
        joins=one_of((0, 1, 3)),
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
        seed=choices.integer(0, SEEDS - 1),
        prompt_length=one_of(PROMPTS),
        new_tokens=one_of((1, 2, 9, 16)),
        budgets=one_of(((0,), (7,), (63,), (15, 0, 7), (1, 33), (31, 63, 0))),
        depths=choices.integer(1, 15),
        chain=one_of((False, False, True)),
        ahead=one_of((0, 1, 1)),
        stop_at=one_of((None, 0, 3, 5, 8)),
        sampling=one_of(SAMPLINGS),
        spare=one_of(SPARES),
    )
