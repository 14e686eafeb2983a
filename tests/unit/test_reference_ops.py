"""The reference's operations against second, independent ways of saying the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kdgen.reference import ops
from kdgen.reference.published import Router
from kdgen.reference.tree import build_tree, compact, ranked_rows
from kdgen.spec.model import Spec, load_spec
from kdgen.verify.published import router_of

RNG = np.random.default_rng(7)


def routed(**changes: Any) -> Router:
    return router_of(Spec.from_mapping(load_spec("tiny").model_dump(mode="json") | changes))


def test_rmsnorm_gives_rows_of_unit_size() -> None:
    x = RNG.normal(size=(3, 64)) * 5
    y = ops.rmsnorm(x, np.full(64, 2.0), 0.0)
    np.testing.assert_allclose(np.sqrt(np.mean(y * y, axis=1)), 2)
    np.testing.assert_allclose(ops.rmsnorm(np.zeros((1, 4)), np.ones(4), 1e-6), 0)


def test_sigmoid_and_silu_stay_finite() -> None:
    x = np.array([-1e4, -1.0, 0.0, 1.0, 1e4])
    np.testing.assert_allclose(ops.sigmoid(x), [0, 1 / (1 + np.e), 0.5, np.e / (1 + np.e), 1])
    np.testing.assert_allclose(ops.silu(x), x * ops.sigmoid(x))


@pytest.mark.parametrize("interleave", [True, False])
def test_rope_is_a_rotation_of_complex_numbers(interleave: bool) -> None:
    x, angles = RNG.normal(size=(5, 2, 8)), RNG.normal(size=(5, 4))
    y = ops.rope(x, np.cos(angles), np.sin(angles), interleave)
    real, imaginary = (np.s_[..., 0::2], np.s_[..., 1::2]) if interleave else (np.s_[..., :4], np.s_[..., 4:])
    turned = (x[real] + 1j * x[imaginary]) * np.exp(1j * angles)[:, None, :]
    np.testing.assert_allclose(y[real], turned.real)
    np.testing.assert_allclose(y[imaginary], turned.imag)


def test_absorbed_attention_is_attention_over_expanded_keys_and_values() -> None:
    rows, cached, heads, nope, rope, latent, v_dim = 3, 7, 2, 5, 4, 6, 3
    q_nope, q_rope = RNG.normal(size=(rows, heads, nope)), RNG.normal(size=(rows, heads, rope))
    keys = RNG.normal(size=(cached, latent + rope))
    kv_b = RNG.normal(size=(heads * (nope + v_dim), latent))
    visible = RNG.random((rows, cached)) < 0.6
    visible[:, 0] = True
    got = ops.mla_attention(q_nope, q_rope, keys, *ops.split_kv_b(kv_b, heads, nope, v_dim), visible, 0.3)
    expanded = (keys[:, :latent] @ kv_b.T).reshape(cached, heads, nope + v_dim)
    for t in range(rows):
        for h in range(heads):
            seen = np.flatnonzero(visible[t])
            k = np.concatenate([expanded[seen, h, :nope], keys[seen, latent:]], axis=1)
            scores = k @ np.concatenate([q_nope[t, h], q_rope[t, h]]) * 0.3
            weights = np.exp(scores) / np.exp(scores).sum()
            np.testing.assert_allclose(got[t, h], weights @ expanded[seen, h, nope:])


def test_top_k_and_argmax_take_the_lowest_of_equals() -> None:
    x = np.array([[1.0, 3, 3, 2, 3], [0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(ops.top_k(x, 3), [[1, 2, 4], [0, 1, 2]])
    np.testing.assert_array_equal(ops.argmax(x), [1, 0])
    tokens, log_probs = ops.top_k_log_probs(x, 5)
    np.testing.assert_array_equal(tokens, [[1, 2, 4, 3, 0], [0, 1, 2, 3, 4]])
    np.testing.assert_allclose(np.exp(log_probs).sum(axis=1), 1)


def test_router_bias_chooses_but_does_not_weigh() -> None:
    spec = routed(n_routed_experts=4, num_experts_per_tok=2, routed_scaling_factor=2.0)
    logits = np.array([[2.0, 1.0, 0.0, -1.0]])
    experts, weights = ops.router(logits, spec, np.array([0, 0, 0, 5.0]))
    np.testing.assert_array_equal(experts, [[3, 0]])
    scores = ops.sigmoid(np.array([-1.0, 2.0]))
    np.testing.assert_allclose(weights[0], 2 * scores / scores.sum())
    plain, unnormalised = ops.router(logits, routed(n_routed_experts=4, norm_topk_prob=False), np.zeros(4))
    np.testing.assert_array_equal(plain, [[0, 1]])
    np.testing.assert_allclose(unnormalised[0], 1.5 * ops.sigmoid(np.array([2.0, 1.0])))


def test_groups_are_ranked_by_their_best_two_or_their_best_one() -> None:
    logits = np.array([[3.0, -9, -9, 1.0, 1.5, 1.0]])  # groups of 3: one star, or three good ones
    groups = {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    experts, _ = ops.router(logits, routed(**groups), np.zeros(6))
    np.testing.assert_array_equal(experts, [[4, 3]])
    v2 = routed(**groups, topk_method="group_limited_greedy", scoring_func="softmax", norm_topk_prob=False)
    experts, weights = ops.router(logits, v2, None)
    np.testing.assert_array_equal(experts, [[0, 1]])
    np.testing.assert_allclose(weights, 1.5 * ops.softmax(logits)[:, [0, 1]])


def test_a_group_left_out_is_never_chosen_however_negative_the_rest() -> None:
    spec = routed(n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2)
    experts, _ = ops.router(np.zeros((1, 4)), spec, np.array([-3.0, -3, -2, -2]))
    np.testing.assert_array_equal(experts, [[2, 3]])


def test_equal_experts_and_equal_groups_go_to_the_lowest() -> None:
    spec = routed(n_routed_experts=6, n_group=3, topk_group=2, num_experts_per_tok=3)
    experts, _ = ops.router(np.zeros((2, 6)), spec, np.zeros(6))
    np.testing.assert_array_equal(experts, [[0, 1, 2]] * 2)


def test_tree_edges() -> None:
    logits = RNG.normal(size=(3, 9)).astype(np.float32)
    empty = build_tree(*ranked_rows(logits, 4), budget=0)
    assert (empty.size, empty.parents.tolist(), empty.visibility.tolist(), empty.paths.tolist()) == (0, [-1], [[True]], [[0]])
    assert build_tree(*ranked_rows(logits[:0], 4), budget=5).size == 0
    assert build_tree(*ranked_rows(logits[:1], 99), budget=50).size == 9
    certain = np.full((2, 3), -np.inf, np.float32)
    certain[:, 1] = 0
    tree = build_tree(*ranked_rows(certain, 3), budget=5)  # the other tokens have probability zero
    assert (tree.tokens.tolist(), tree.parents.tolist()) == ([1, 1], [-1, 0, 1])
    with pytest.raises(ValueError, match="NaN"):
        build_tree(np.zeros((1, 1), int), np.array([[np.nan]]), 1)


def test_ranked_rows_put_the_lower_of_equal_tokens_first() -> None:
    tokens, log_probs = ranked_rows(np.array([[0.0, 1, 1, 0]]), 4)
    np.testing.assert_array_equal(tokens, [[1, 2, 0, 3]])
    assert log_probs.dtype == np.float32
    np.testing.assert_allclose(np.exp(log_probs).sum(), 1, rtol=1e-6)


def test_compaction_keeps_committed_rows_and_the_path_in_order() -> None:
    cache = np.arange(2 * 7).reshape(2, 7, 1)
    np.testing.assert_array_equal(compact(cache, 3, [0, 2])[:, :, 0], [[0, 1, 2, 3, 5], [7, 8, 9, 10, 12]])
