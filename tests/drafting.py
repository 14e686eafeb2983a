"""A generated drafter alone, fed with target features from elsewhere: its context rows and its draft as the engine runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.backends.base import Backend
from kdgen.drafters.base import DeviceDraftRequest
from kdgen.plan.build import build_plan
from kdgen.plan.derive import OpProgram, derive
from kdgen.plan.draft_step import Drafter
from kdgen.plan.ir import Compute, Limits
from kdgen.plan.ops.op import Context
from kdgen.plan.shard import WHOLE
from kdgen.plan.tuning import mode_of
from kdgen.runtime.engine import Draft, Engine
from kdgen.runtime.pipeline import start_engine
from kdgen.spec.drafter import DraftSpec
from kdgen.spec.model import Spec, load_spec
from kdgen.weights.formats import numpy_dtype
from kdgen.weights.random import random_weights

Array = NDArray[Any]


def target_for(draft: DraftSpec, vocab_size: int) -> Spec:
    """A small target that ``draft`` fits, whose own layers do not matter."""
    layers = draft.target_layer_ids[-1] + 1
    small = {"hidden_size": draft.hidden_size, "vocab_size": vocab_size, "num_hidden_layers": layers, "name": "drafted"}
    dense = {"first_k_dense_replace": layers, "n_routed_experts": None, "n_shared_experts": 0}
    return Spec.from_mapping(load_spec("tiny").model_dump(mode="json") | small | dense).with_draft(draft)


@dataclass
class FedDrafter:
    """The drafter of an engine whose target never runs. ``length`` tokens are committed."""

    engine: Engine
    length: int = 0

    @classmethod
    def open(cls, draft: DraftSpec, weights: Mapping[str, Array], compute: Compute, backend: Backend, context: int) -> FedDrafter:
        """``weights`` are the drafter's, and the target's embedding and head under their published names."""
        vocab = len(weights["lm_head.weight"])
        spec = target_for(draft, vocab)
        limits = Limits(max_tokens=64, max_context=context)
        plan = build_plan(spec, compute, limits)
        drafter = Drafter.of(Context(spec, spec, mode_of(spec, plan.compute), limits, WHOLE))
        assert drafter
        (feed,) = derive([OpProgram("feed", drafter.context(from_tree=False))]).programs
        plan = replace(plan, programs=(feed, plan.program("draft"), plan.program("draft_top_k")))
        made_up = random_weights(spec, 0)
        return cls(start_engine(spec, plan, backend, lambda key: weights[key] if key in weights else made_up[key]))

    def feed(self, features: Array) -> None:
        """Commit tokens with these features, [T, feature_width]."""
        engine, most = self.engine, self.engine.plan.limits.max_tokens
        for at in range(0, len(features), most):
            part = features[at : at + most]
            self.length += len(part)
            engine.reserve(0, self.length)
            engine._write_step([0])
            engine._write("step_begin", np.array([0, len(part)], np.int32))
            engine._write("sequence_length", np.array([self.length], np.int32))
            engine._write("features", part.astype(numpy_dtype(engine.plan.buffer("features").dtype)))
            engine._lengths[0] = self.length - len(part)
            engine._run("feed", len(part), [0])
            engine._lengths[0] = self.length

    def draft(self, root: int, block_size: int) -> tuple[Array, Array]:
        """(hidden [B, hidden] after the final norm, logits [B − 1, V]) of a block behind what is committed."""
        engine = self.engine
        engine._write("root_token", np.array([root], np.int32))
        engine._write_step([0])
        engine._write_proposals([Draft(0, DeviceDraftRequest(block_size - 1, block_size), 1)])
        hidden = engine.read("hidden")[:block_size].astype(np.float32)
        return hidden, engine.read("draft_logits")[0, 1:block_size].astype(np.float32)

    def cache(self) -> tuple[Array, Array]:
        """(keys, values) of the committed tokens, both [layers, key heads, T, head_dim]."""
        draft = self.engine.spec.draft
        assert draft is not None
        rows = self.engine.draft_rows().astype(np.float32)
        rows = rows.reshape(len(rows), self.length, 2, draft.num_key_value_heads, draft.head_dim)
        return rows[:, :, 0].swapaxes(1, 2), rows[:, :, 1].swapaxes(1, 2)
