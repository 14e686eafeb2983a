"""The drafter inside an engine: steps of several sequences, drafts of several kinds in a step, limits, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kdgen.backends.base import Backend
from kdgen.drafters.base import Candidates, DeviceDraftRequest, DraftLogits
from kdgen.drafters.dflash import DFlashDrafter
from kdgen.errors import KdgenError, WeightError
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Limits
from kdgen.runtime.decode import decode_plain, decode_tree
from kdgen.runtime.engine import Draft, Engine
from kdgen.runtime.pipeline import start_engine
from kdgen.runtime.request import Request
from kdgen.spec.model import Spec, load_spec
from kdgen.spec.sampling import Sampling
from kdgen.verify.decoding.recording import differing_bits
from kdgen.weights.random import random_weights

SPEC = load_spec("tiny-dflash")
BLOCK = 8
COMPUTES: tuple[Compute, ...] = ("f32", "bf16")
PROMPTS = {0: range(3, 40), 1: range(100, 107), 2: range(7, 97)}


def engine_of(backend: Backend, compute: Compute = "f32", sequences: int = 3, spec: Spec = SPEC, context: int = 160) -> Engine:
    limits = Limits(max_tokens=64, max_context=context, max_sequences=sequences)
    return start_engine(spec, build_plan(spec, compute, limits), backend, random_weights(SPEC, 11).__getitem__)


def fill(engine: Engine, sequences: Sequence[int]) -> None:
    for sequence in sequences:
        engine.reset(sequence)
        tokens = list(PROMPTS[sequence])
        for at in range(0, len(tokens), 50):
            engine.prefill(tokens[at : at + 50], sequence)


def logits(engine: Engine, first: int, depths: int) -> NDArray[Any]:
    return engine.read("draft_logits").reshape(-1, SPEC.vocab_size)[first : first + depths]


def candidates(engine: Engine, place: int, depths: int) -> NDArray[Any]:
    return engine.read("candidate_log_probs")[place, :depths, :5]


def alone(engine: Engine, sequence: int, block: int) -> NDArray[Any]:
    """Draft logits [block − 1, V] of a sequence with nothing else in the step."""
    fill(engine, [sequence])
    engine.verify_many([Draft(sequence, DeviceDraftRequest(block - 1, block), 15)])
    return logits(engine, 1, block - 1).copy()


@pytest.mark.parametrize("compute", COMPUTES)
def test_other_sequences_change_no_bit_of_a_draft(cpu_backend: Backend, compute: Compute) -> None:
    """Nor do blocks of other sizes, and the sequences' own tokens are those of plain decoding."""
    engine = engine_of(cpu_backend, compute)
    blocks = {2: 8, 0: 3, 1: 5}
    expected = {sequence: alone(engine, sequence, block) for sequence, block in blocks.items()}
    fill(engine, [0, 1, 2])
    steps = engine.verify_many([Draft(sequence, DeviceDraftRequest(block - 1, block), 15) for sequence, block in blocks.items()])
    first = 1
    for sequence, block in blocks.items():
        assert differing_bits(logits(engine, first, block - 1), expected[sequence]) == 0
        first += block
    for (sequence, _), step in zip(blocks.items(), steps, strict=True):
        tokens = list(PROMPTS[sequence])
        plain = decode_plain(SingleSequence(engine, sequence), Request(tokens, 3)).tokens
        assert (*step.accepted, step.next_token)[:3] == plain[: len(step.accepted) + 1][:3]


class SingleSequence:
    """A ``decode.Target`` over one of an engine's sequences."""

    def __init__(self, engine: Engine, sequence: int) -> None:
        self.engine, self.sequence = engine, sequence
        self.plan = engine.plan

    def reset(self, sequence: int = 0, sampling: Sampling = Sampling()) -> None:  # noqa: B008 - frozen
        self.engine.reset(self.sequence, sampling)

    def prefill(self, tokens: Sequence[int]) -> int:
        return self.engine.prefill(tokens, self.sequence)

    def decode(self) -> int:
        return self.engine.decode(self.sequence)

    def verify(self, proposal: Any, budget: int) -> Any:
        return self.engine.verify(proposal, budget, self.sequence)


def test_drafts_of_every_kind_in_one_step(cpu_backend: Backend) -> None:
    engine = engine_of(cpu_backend)
    expected = alone(engine, 1, BLOCK)
    fill(engine, [0, 1, 2])
    rng = np.random.default_rng(0)
    given = DraftLogits(rng.standard_normal((4, SPEC.vocab_size)).astype(np.float32))
    listed = Candidates(np.array([[7, 9]], np.int32), np.array([[-0.5, -1.5]], np.float32))
    engine.verify_many([Draft(0, given, 5), Draft(1, DeviceDraftRequest(BLOCK - 1, BLOCK), 5), Draft(2, listed, 5)])
    assert differing_bits(logits(engine, 1, BLOCK - 1), expected) == 0
    for place, rows in ((0, given.logits), (1, expected)):
        top = np.sort(rows, axis=1)[:, ::-1][:, :5]
        log_sum = np.log(np.exp(rows.astype(np.float64)).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(candidates(engine, place, len(rows)), top - log_sum, atol=1e-5)
    np.testing.assert_array_equal(engine.read("candidate_log_probs")[2, 0, :2], listed.log_probs[0])


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=7), Sampling(0.8, top_p=0.9, seed=2**50)], ids=str)
def test_drafts_change_no_token(cpu_backend: Backend, compute: Compute, sampling: Sampling) -> None:
    engine = engine_of(cpu_backend, compute, sequences=1)
    prompt = list(PROMPTS[0])
    plain = decode_plain(engine, Request(prompt, 12, sampling=sampling))
    rows = np.ascontiguousarray(engine.cache_rows())
    for drafter, budget in ((DFlashDrafter(BLOCK), 31), (DFlashDrafter(BLOCK, chain=True), BLOCK - 1), (DFlashDrafter(2), 1)):
        tree = decode_tree(engine, Request(prompt, 12, sampling=sampling, chunk=9, drafter=drafter, budget=budget, block_size=BLOCK))
        assert tree.tokens == plain.tokens
        assert differing_bits(np.ascontiguousarray(engine.cache_rows()), rows) == 0


def test_a_chain_is_the_best_token_of_each_depth(cpu_backend: Backend) -> None:
    engine = engine_of(cpu_backend)
    fill(engine, [0])
    engine.verify(DFlashDrafter(BLOCK, chain=True).propose([], 20), BLOCK - 1)
    best = logits(engine, 1, BLOCK - 1).argmax(axis=1)
    assert engine.read("tree_size")[0] == BLOCK
    np.testing.assert_array_equal(engine.read("tree_token")[0, 1:BLOCK], best)
    np.testing.assert_array_equal(engine.read("tree_parent")[0, 1:BLOCK], range(BLOCK - 1))


def test_drafts_end_with_the_context(cpu_backend: Backend) -> None:
    """A block may stand beyond the last position that is kept, and only its depths may not."""
    prompt = list(PROMPTS[0])
    engine = engine_of(cpu_backend, sequences=1, context=len(prompt) + 12)
    plain = decode_plain(engine, Request(prompt, 50))
    assert len(plain.tokens) == 12
    assert decode_tree(engine, Request(prompt, 50, drafter=DFlashDrafter(BLOCK), budget=15, block_size=BLOCK)).tokens == plain.tokens


def test_nothing_is_drafted_for_nothing(cpu_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(cpu_backend)
    fill(engine, [0])
    ran: list[str] = []
    run = engine._run
    monkeypatch.setattr(engine, "_run", lambda program, *rest: (ran.append(program), run(program, *rest)))
    engine.verify(DeviceDraftRequest(7, 8), 0)
    engine.verify(DeviceDraftRequest(0, 8), 15)
    assert ran == ["verify", "verify"]


@pytest.mark.parametrize(
    ("proposal", "said"),
    [
        (DeviceDraftRequest(8, 9), "the drafter fills blocks of 2 … 8 rows, not 9"),
        (DeviceDraftRequest(1, 1), "the drafter fills blocks of 2 … 8 rows, not 1"),
        (DeviceDraftRequest(4, 4), "a block of 4 rows gives at most 3 depths, not 4"),
    ],
)
def test_blocks_that_the_drafter_cannot_fill(cpu_backend: Backend, proposal: DeviceDraftRequest, said: str) -> None:
    engine = engine_of(cpu_backend)
    fill(engine, [0])
    with pytest.raises(KdgenError, match=said):
        engine.verify(proposal, 15)


def test_without_a_drafter(cpu_backend: Backend) -> None:
    engine = engine_of(cpu_backend, spec=SPEC.with_draft(None))
    fill(engine, [0])
    with pytest.raises(KdgenError, match="has no drafter: add a draft: section"):
        engine.verify(DeviceDraftRequest(3, 4), 15)


def test_a_drafter_that_gives_no_numbers_proposes_nothing(cpu_backend: Backend) -> None:
    """Weights that are finite and make numbers beyond float32 cost acceptance and nothing else."""
    weights = random_weights(SPEC, 11)
    broken = {"norm.weight": np.full(SPEC.hidden_size, 3e38, np.float32)}
    plan = build_plan(SPEC, "f32", Limits(max_context=80))
    engine = start_engine(SPEC, plan, cpu_backend, lambda key: broken[key] if key in broken else weights[key])
    plain = decode_plain(engine, Request([1, 2, 3], 5))
    tree = decode_tree(engine, Request([1, 2, 3], 5, drafter=DFlashDrafter(BLOCK), budget=15, block_size=BLOCK))
    assert tree.tokens == plain.tokens and set(tree.acceptance_lengths) == {1}


def test_missing_drafter_weights_are_named(cpu_backend: Backend) -> None:
    weights = random_weights(SPEC.with_draft(None), 11)

    def tensors(key: str) -> NDArray[Any]:
        if key not in weights:
            raise WeightError(f"tensor {key} is missing")
        return weights[key]

    with pytest.raises(WeightError, match=r"tensor fc\.weight is missing"):
        start_engine(SPEC, build_plan(SPEC, "f32", Limits(max_context=80)), cpu_backend, tensors)
