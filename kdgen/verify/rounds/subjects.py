"""Models with drafters whose rounds are checked, and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kdgen.demo.prompts import read_prompts
from kdgen.drafters.base import Candidates, Drafter, DraftLogits
from kdgen.files.resources import demo_dir
from kdgen.plan.ir import Compute
from kdgen.runtime.model import Model, open_model, with_drafter
from kdgen.spec.model import Spec
from kdgen.verify.variants import variants
from kdgen.weights.pack import CheckpointWeights
from kdgen.weights.random import random_weights


class LogitsDrafter:
    """What another drafter proposes, as logits of the whole vocabulary, so that the device takes the best of them."""

    name = "logits"

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self._drafter, self._vocab_size = drafter, vocab_size

    def propose(self, context: Sequence[int], depths: int) -> DraftLogits:
        found = self._drafter.propose(context, depths)
        assert isinstance(found, Candidates)
        # no two tokens are alike, so that it does not matter how a log-probability is rounded
        logits = np.tile((-20 - np.arange(self._vocab_size) / 16).astype(np.float32), (found.depths, 1))
        for row, tokens, log_probs in zip(logits, found.tokens, found.log_probs, strict=True):
            row[tokens] = np.maximum(log_probs, np.float32(-19))
        return DraftLogits(logits)


@dataclass(frozen=True)
class Subject:
    """A model with a drafter, and prompts whose decodes grow beyond a split of the keys."""

    title: str
    model: Model
    compute: Compute
    prompts: tuple[tuple[int, ...], ...]
    block_size: int  #: rows that the drafter is asked for


def shipped() -> Subject:
    """The shipped model and drafter, and ends of two held-out prompts."""
    folder = demo_dir()
    model = with_drafter(open_model(folder / "model-int4"), folder / "drafter")
    model = replace(model, spec=model.spec.model_copy(update={"name": "demo"}))
    prompts = [prompt.tokens for prompt in read_prompts(folder / "prompts.json")]
    return Subject(model.spec.name, model, "f32", (prompts[0][-58:], prompts[1][-120:]), block_size=8)


def favouring(spec: Spec, seed: int, favourites: int = 4) -> Model:
    """Random weights by which a model and its drafter, which share the head, choose a few tokens most of the time: drafts are accepted by
    chance."""
    weights = dict(random_weights(spec, seed))
    head = "model.embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"
    weights[head] = weights[head].copy()
    weights[head][favourites:] *= weights[head].dtype.type(2**-6)
    return Model(spec, CheckpointWeights(weights.__getitem__))


def small(seed: int = 1) -> Subject:
    """A model that is quick to decode, where requests of every kind are tried."""
    spec = next(spec for spec in variants() if spec.name == "tiny-odd")
    tokens = np.random.default_rng(seed).integers(0, spec.vocab_size, 70).tolist()
    return Subject(spec.name, favouring(spec, seed), "f32", (tuple(tokens[:58]), tuple(tokens[5:])), block_size=16)
