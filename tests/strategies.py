"""Hypothesis strategies: whole models and draft rows, valid by construction.

``specs()`` draws structures that the generic path must take: dimensions of 1, odd ones, and both sides of tile edges.
``specs(sizes=TILED)`` draws only multiples of 16, which tensor-core paths accept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kdgen.spec import Spec

#: Odd, one, and beside the edges of tiles of 8, 16, 32 and 64.
ODD = (1, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96)
TILED = (16, 32, 48, 64, 80, 128)


@st.composite
def specs(
    draw: st.DrawFn,
    sizes: tuple[int, ...] = ODD,
    max_layers: int = 3,
    quantized: bool | None = False,
    dtypes: tuple[str, ...] = ("bfloat16", "float32"),
) -> Spec:
    """A small valid Spec; ``quantized`` None draws either. Families differ as published ones do (V2 routes by softmax, …)."""
    size = st.sampled_from(sizes)
    rope_dim = st.sampled_from(tuple(n for n in (2, 4, 6, 16, 30, 32, 34) if sizes is ODD or n % 16 == 0))
    layers = draw(st.integers(1, max_layers))
    family = draw(st.sampled_from(("deepseek_v3", "kimi_k2", "deepseek_v2", "glm4_moe_lite")))
    vocab = draw(st.sampled_from((2, 5, 17, 64, 100, 257)))
    dense = draw(st.sampled_from(sorted({0, 1, layers})))
    values: dict[str, Any] = {
        "name": "drawn",
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": draw(size),
        "num_hidden_layers": layers,
        "num_attention_heads": draw(st.integers(1, 5)),
        "q_lora_rank": draw(st.none() | size),
        "kv_lora_rank": draw(size),
        "qk_nope_head_dim": draw(size),
        "qk_rope_head_dim": draw(rope_dim),
        "v_head_dim": draw(size),
        "attention_bias": draw(st.booleans()),
        "intermediate_size": draw(size),
        "first_k_dense_replace": dense,
        "n_routed_experts": None,
        "rms_norm_eps": draw(st.sampled_from((1e-6, 1e-5))),
        "rope_theta": draw(st.sampled_from((10000.0, 50000.0, 1e6))),
        "rope_interleave": family == "deepseek_v2" or draw(st.booleans()),
        "rope_scaling": draw(st.none() | yarn()),
        "max_position_embeddings": 512,
        "tie_word_embeddings": draw(st.booleans()),
        "bos_token_id": 0,
        "eos_token_id": draw(st.sampled_from(([], [1], [0, vocab - 1]))),
        "dtype": draw(st.sampled_from(dtypes)),
    }
    if dense < layers:
        values |= draw(routing(family))
        values["moe_intermediate_size"] = draw(size)
        if draw(st.booleans()) if quantized is None else quantized:
            group = draw(st.sampled_from((32, 64)))
            values["quantization"] = {"num_bits": 4, "group_size": group, "symmetric": True}
            values |= {key: group * draw(st.integers(1, 3)) for key in ("hidden_size", "moe_intermediate_size")}
    return Spec.from_mapping(values)


def yarn() -> st.SearchStrategy[dict[str, Any]]:
    """YaRN parameters: with equal mscales as published, with different ones, and with none."""
    mscales = st.sampled_from(((1.0, 1.0), (0.707, 0.707), (1.0, 0.5), (0.0, 0.0), (0.0, 1.0)))
    return st.tuples(st.sampled_from((1.0, 4.0, 40.0)), st.sampled_from((16, 64)), mscales).map(
        lambda t: {
            "type": "yarn",
            "factor": t[0],
            "original_max_position_embeddings": t[1],
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": t[2][0],
            "mscale_all_dim": t[2][1],
        }
    )


@st.composite
def routing(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """Experts, groups and how many of each are chosen: top-1, all experts, one group and several."""
    v2 = family == "deepseek_v2"
    method = draw(st.sampled_from(("greedy", "group_limited_greedy"))) if v2 else "noaux_tc"
    groups = 1 if method == "greedy" else draw(st.sampled_from((1, 2, 3)))
    per_group = draw(st.integers(1 if v2 or groups == 1 else 2, 4))
    kept = draw(st.integers(1, groups))
    return {
        "n_routed_experts": groups * per_group,
        "n_group": groups,
        "topk_group": kept,
        "num_experts_per_tok": draw(st.integers(1, kept * per_group)),
        "n_shared_experts": draw(st.integers(0, 2)),
        "topk_method": method,
        "scoring_func": "softmax" if v2 else "sigmoid",
        "norm_topk_prob": not v2 and draw(st.booleans()),
        "routed_scaling_factor": draw(st.sampled_from((1.0, 2.5))),
    }


@st.composite
def draft_rows(draw: st.DrawFn, max_depth: int = 4, max_width: int = 4) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """(tokens, log_probs) [h, k], best first: sixteenths, so that sums are exact and ties are common, and some of probability zero."""
    depth, width = draw(st.integers(0, max_depth)), draw(st.integers(1, max_width))
    sixteenths = st.integers(-64, 0).map(lambda n: n / 16) | st.just(float("-inf"))
    rows = [sorted(draw(st.lists(sixteenths, min_size=width, max_size=width)), reverse=True) for _ in range(depth)]
    tokens = [draw(st.permutations(range(width))) for _ in range(depth)]
    return np.array(tokens, np.int64).reshape(depth, width), np.array(rows, np.float32).reshape(depth, width)
