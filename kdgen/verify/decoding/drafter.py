"""Checks of the model's own drafter: what it drafts is float64's, and depends on the tokens before it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kdgen.drafters.base import DeviceDraftRequest
from kdgen.drafters.synthetic import ReplayDrafter
from kdgen.plan.ir import Compute
from kdgen.reference.dflash import ReferenceDrafter
from kdgen.runtime.decode import Decoded, decode_tree, prefill
from kdgen.runtime.engine import Engine
from kdgen.runtime.request import Request
from kdgen.spec.model import Spec
from kdgen.verify.decoding.recording import RecordingEngine, differing_bits
from kdgen.verify.kernels import tolerances
from kdgen.verify.published import reference_of
from kdgen.verify.report.checks import Check, finite

Array = NDArray[Any]


class Subject(Protocol):
    """What is decoded with; ``kdgen.verify.decoding.decodes`` has it."""

    @property
    def spec(self) -> Spec: ...

    @property
    def compute(self) -> Compute: ...

    @property
    def weights(self) -> Mapping[str, Array]: ...

    @property
    def prompt(self) -> tuple[int, ...]: ...


def drafted(engine: Engine, block_size: int) -> Array:
    """Draft a block behind sequence 0's committed tokens, and verify it: its logits, float32 [block_size - 1, V]."""
    engine.verify(DeviceDraftRequest(block_size - 1, block_size), 1)
    return engine.read("draft_logits").reshape(-1, engine.spec.vocab_size)[1:block_size].astype(np.float32, copy=False)


def captured(engine: RecordingEngine, tokens: Sequence[int]) -> tuple[int, Array]:
    """Commit ``tokens``, then (the root token, the features that the drafter was given of them, [T, feature_width])."""
    engine.reset()
    most, parts, root = engine.plan.limits.max_tokens, [], 0
    for at in range(0, len(tokens), most):
        chunk = tokens[at : at + most]
        root = engine.prefill(chunk)
        parts.append(engine.engine.read("features")[: len(chunk)])
    return root, np.concatenate(parts)


def check_drafter(engine: RecordingEngine, subject: Subject, plain: Decoded, check: Callable[..., Check]) -> Iterator[Check]:
    """Captured features and draft logits against float64; draft logits by bits after prefills and trees of all kinds."""
    draft = subject.spec.draft
    assert draft is not None
    root, features = captured(engine, subject.prompt)
    logits = drafted(engine.engine, draft.block_size)

    outputs = reference_of(subject.spec, subject.weights).forward(subject.prompt).features[list(draft.target_layer_ids)]
    expected = outputs.swapaxes(0, 1).reshape(features.shape)
    yield check("draft", "captured features", *_compare(subject, features, expected, draft.target_layer_ids[-1] + 1))

    head = "model.embed_tokens.weight" if subject.spec.tie_word_embeddings else "lm_head.weight"
    drafter = ReferenceDrafter(draft, subject.weights, subject.weights["model.embed_tokens.weight"], subject.weights[head])
    _, expected = drafter.block(drafter.extend(drafter.empty_cache(), features), root, draft.block_size)
    yield check("draft", "logits of the float64 drafter", *_compare(subject, logits, expected, draft.num_hidden_layers + 1))

    detail = "the same draft, by bits, after prefills in other chunks and after trees"
    yield check("draft", "a function of the tokens", _after_others(engine, subject, plain, draft.block_size), detail)


def _compare(subject: Subject, got: Array, expected: Array, layers: int) -> tuple[str, str, float | None, float]:
    """(problem, what was measured, the figure, its tolerance): in float32 each element, in bf16 the rows' typical error."""
    error = np.abs(got.astype(np.float64) - expected)
    if subject.compute == "f32":
        figure, tolerance, what = float(error.max()), tolerances.float32_logits(expected), "largest error"
    else:
        figure, what = float(np.median(np.sqrt(np.square(error).mean(axis=1)))), "median over rows of the error's root mean square"
        tolerance = tolerances.bf16_logits(expected, layers)
    row = int(np.nan_to_num(error, nan=np.inf).max(axis=1).argmax())
    return "" if figure <= tolerance else f"row {row} is off by {error[row].max():.3g}", what, finite(figure), tolerance


def _after_others(engine: RecordingEngine, subject: Subject, plain: Decoded, block: int) -> str:
    """What is drafted after tokens that trees committed, and after the same tokens committed by prefills."""
    tokens = (*subject.prompt, *plain.tokens)
    drafter = ReplayDrafter(tokens, subject.spec.vocab_size, 0.3)
    decode_tree(engine, Request(subject.prompt, max(1, len(plain.tokens) - block), chunk=9, drafter=drafter, budget=15, block_size=8))
    committed = tokens[: engine.engine.length()]
    if len(committed) + block > engine.plan.limits.max_context:
        return ""  # no room for a block
    expected = drafted(engine.engine, block)
    for chunk in (1, 7, 64):
        prefill(engine, committed, chunk)
        if count := differing_bits(drafted(engine.engine, block), expected):
            return f"a prefill in chunks of {chunk} differs in {count} logits from trees"
    return ""
