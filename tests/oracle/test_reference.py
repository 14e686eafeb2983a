"""The float64 reference against Hugging Face transformers and the DDTree reference."""

from __future__ import annotations

import json

import numpy as np

from kdgen.reference.model import ReferenceModel
from kdgen.reference.tree import build_tree, compact, ranked_rows, walk
from kdgen.spec.published import load_config
from kdgen.verify.oracles.models import ModelCase, TreeCase, model_cases, tree_cases
from kdgen.weights.checkpoint import Checkpoint

# The oracle ran in float32: its own error on logits near 7 is about 2e-5 (4e-5 with YaRN over 120 positions).
LOGIT_TOLERANCE = 5e-5


def _model(case: ModelCase) -> ReferenceModel:
    spec = load_config(case.folder)
    weights = Checkpoint(case.folder)
    weights.validate(spec)
    return ReferenceModel(json.loads((case.folder / "config.json").read_text()), weights)


def test_there_are_cases() -> None:
    assert model_cases() or tree_cases(), "an oracle folder without cases tests nothing"


def test_logits_and_greedy_tokens(model_case: ModelCase) -> None:
    tokens, logits = _model(model_case).greedy(model_case.prompt, len(model_case.greedy))
    assert tokens == model_case.greedy.tolist()
    np.testing.assert_allclose(logits, model_case.logits, rtol=0, atol=LOGIT_TOLERANCE)


def test_one_forward_over_everything_equals_token_by_token(model_case: ModelCase) -> None:
    model = _model(model_case)
    tokens = model_case.tokens[:24]
    whole = model.forward(tokens)
    cache, logits = model.empty_cache(), []
    for token in tokens:
        step = model.forward([token], cache)
        cache = np.concatenate([cache, step.rows], axis=1)
        logits.append(step.logits)
    np.testing.assert_allclose(np.concatenate(logits), whole.logits, rtol=0, atol=1e-11)
    np.testing.assert_allclose(cache, whole.rows, rtol=0, atol=1e-11)


def test_a_tree_step_gives_each_node_what_its_path_alone_would(model_case: ModelCase) -> None:
    model = _model(model_case)
    prompt, root = model_case.prompt[:-1], int(model_case.prompt[-1])
    cache = model.forward(prompt).rows if len(prompt) else model.empty_cache()
    generator = np.random.default_rng(1)
    tree = build_tree(*ranked_rows(generator.normal(size=(4, model.published.vocabulary)).astype(np.float32) * 3, 5), budget=9)
    tokens, positions, visible = tree.step(root, len(prompt))
    step = model.forward(tokens, cache, positions, visible)
    for node in range(tree.size + 1):
        path = tree.path(node)
        line = model.forward([root, *(int(tree.tokens[i - 1]) for i in path[1:])], cache)
        np.testing.assert_allclose(step.logits[node], line.logits[-1], rtol=0, atol=1e-11)
        kept = compact(np.concatenate([cache, step.rows], axis=1), len(prompt), path)
        np.testing.assert_allclose(kept[:, len(prompt) :], line.rows, rtol=0, atol=1e-11)


def test_trees(tree_case: TreeCase) -> None:
    budget = tree_case.budget
    tree = build_tree(*ranked_rows(tree_case.logits, max(budget, 1)), budget)
    np.testing.assert_array_equal(tree.tokens, tree_case.tokens)
    np.testing.assert_array_equal(tree.depths, tree_case.depths)
    np.testing.assert_array_equal(tree.parents, tree_case.parents)
    np.testing.assert_array_equal(tree.visibility, tree_case.visibility)
    for posterior, accepted, next_token in zip(tree_case.posterior, tree_case.accepted, tree_case.next_token, strict=True):
        assert walk(tree, posterior) == ([*accepted], next_token)
