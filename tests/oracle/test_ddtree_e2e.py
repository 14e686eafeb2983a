"""Whole generations with a DFlash drafter against the DDTree reference: tokens, acceptance lengths, trees, draft logits, features."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kdgen.backends.base import Backend
from kdgen.drafters.base import Proposal
from kdgen.drafters.dflash import DFlashDrafter
from kdgen.plan.ir import Compute
from kdgen.runtime.decode import decode_plain, decode_tree
from kdgen.runtime.engine import Engine, Verified
from kdgen.runtime.model import open_model, with_drafter
from kdgen.runtime.pipeline import open_engine
from kdgen.runtime.request import Request
from kdgen.spec.sampling import Sampling
from kdgen.verify.decoding.recording import RecordingEngine, differing_bits
from kdgen.verify.oracles.drafters import Generation, GenerationCase, TreeRound, generation_cases

#: Path log-probabilities that are nearer than this may change places in float32.
NOISE = 1e-4
CONTEXT = 160

CASES = generation_cases()


@dataclass(frozen=True)
class Round:
    """A tree as the engine has it, root first, what of it was accepted, and the draft logits [B − 1, V] that it comes from."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    verified: Verified
    logits: NDArray[Any]

    def paths(self) -> set[tuple[int, ...]]:
        return paths(self.tokens, self.parents)


def paths(tokens: tuple[int, ...], parents: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Every node's tokens from below the root on; ``tokens`` has the root first."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], token))
    return set(found)


class Watched(RecordingEngine):
    """A target that keeps each round's tree and draft logits."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.rounds: list[Round] = []

    def verify(self, proposal: Proposal, budget: int) -> Verified:
        verified = super().verify(proposal, budget)
        read = self.engine.read
        size = int(read("tree_size")[0])
        tokens, parents, depths = (tuple(read(f"tree_{name}")[0, :size].tolist()) for name in ("token", "parent", "depth"))
        logits = read("draft_logits").reshape(-1, self.engine.spec.vocab_size)[1 : proposal.depths + 1]
        self.rounds.append(Round(tokens, parents, depths, verified, logits))
        return verified


def watched(case: GenerationCase, compute: Compute, backend: str) -> Watched:
    return opened(CASES.index(case), compute, backend)


@cache
def opened(place: int, compute: Compute, backend: str) -> Watched:
    case = CASES[place]
    model = with_drafter(open_model(case.target), case.folder)
    return Watched(open_engine(model, CONTEXT, compute, backend).engine)


def generated(target: Watched, run: Generation, more: int = 0) -> tuple[int, ...]:
    """New tokens of ``run``, and ``more`` than it asks for, so that its last trees need not end with it."""
    target.rounds.clear()
    drafter = DFlashDrafter(run.block_size, run.chain)
    return decode_tree(
        target, Request(run.prompt, run.max_new_tokens + more, stop=run.stop, drafter=drafter, budget=run.budget, block_size=run.block_size)
    ).tokens


def check_tokens(case: GenerationCase, run: Generation, backend: str) -> None:
    target = watched(case, "f32", backend)
    assert generated(target, run) == run.new_tokens, run


def check_rounds(case: GenerationCase, run: Generation, backend: str) -> None:
    """Round by round, up to the first whose block the reference cuts short."""
    target = watched(case, "f32", backend)
    tokens = generated(target, run, run.block_size)
    assert tokens[: len(run.new_tokens)] == run.new_tokens, run
    start = len(run.prompt)
    for ours, theirs in zip(target.rounds, run.rounds, strict=False):
        if not theirs.whole:
            break
        assert theirs.start == start
        check_round(ours, theirs, f"{run}, the round at {start}")
        start += theirs.accepted


def check_round(ours: Round, theirs: TreeRound, where: str) -> None:
    tokens = (ours.tokens[0], *theirs.tokens)
    if theirs.gap >= NOISE:
        assert ours.tokens == tokens and ours.parents == theirs.parents and ours.depths == (0, *theirs.depths), where
    else:
        assert ours.paths() == paths(tokens, theirs.parents), where
    assert len(ours.verified.accepted) == theirs.accepted, where


def check_logits(case: GenerationCase, run: Generation, backend: str) -> None:
    target = watched(case, "f32", backend)
    generated(target, run, run.block_size)
    expected = case.draft_logits[run.prompt_index, run.block_size]
    for ours, theirs in zip(target.rounds, expected, strict=False):
        np.testing.assert_allclose(ours.logits, theirs, rtol=0, atol=NOISE)


def check_bits(case: GenerationCase, run: Generation, compute: Compute, backend: str, sampling: Sampling) -> None:
    """Tokens, logits and cache rows of plain decoding (L1 and L2; L5 where tokens are drawn)."""
    target = watched(case, compute, backend)
    plain = decode_plain(target, Request(run.prompt, run.max_new_tokens, sampling=sampling))
    logits, rows = np.stack(target.logits), target.cache_rows()
    drafter = DFlashDrafter(run.block_size, run.chain)
    tree = decode_tree(
        target,
        Request(run.prompt, run.max_new_tokens, sampling=sampling, chunk=7, drafter=drafter, budget=run.budget, block_size=run.block_size),
    )
    assert tree.tokens == plain.tokens
    assert differing_bits(np.stack(target.logits), logits) == 0, "logits"
    assert differing_bits(target.cache_rows(), rows) == 0, "cache rows"


def every(few: bool) -> list[Any]:
    """Every run, or those that a CPU emulator does in a second: where hardly anything is accepted, only small trees."""
    return [
        pytest.param(case, run, id=f"{case.name}-{place}")
        for case in CASES
        for place, run in enumerate(case.generations)
        if not few or len(run.acceptance_lengths) < 20 or (run.prompt_index == 6 and run.budget <= 7)
    ]


def logged(few: bool) -> list[Any]:
    """The runs whose draft logits are known."""
    found = []
    for case in CASES:
        for place, run in enumerate(case.generations):
            known = (run.prompt_index, run.block_size) in case.draft_logits
            same = run.budget == 15 and not run.stop and not run.chain and run.max_new_tokens == 48
            if known and same and (not few or run.prompt_index in (0, 4)):
                found.append(pytest.param(case, run, id=f"{case.name}-{place}"))
    return found


SAMPLINGS = (Sampling(), Sampling(0.7, seed=3), Sampling(1.2, top_p=0.9, seed=2**40))
SOME = [param.values for param in every(few=True)[:45:9]]


@pytest.mark.parametrize(("case", "run"), every(few=True))
def test_rounds(case: GenerationCase, run: Generation, cpu_backend: Backend) -> None:
    check_rounds(case, run, "cpu")


@pytest.mark.parametrize(("case", "run"), SOME)
def test_tokens(case: GenerationCase, run: Generation, cpu_backend: Backend) -> None:
    check_tokens(case, run, "cpu")


@pytest.mark.parametrize(("case", "run"), logged(few=True))
def test_draft_logits(case: GenerationCase, run: Generation, cpu_backend: Backend) -> None:
    check_logits(case, run, "cpu")


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("compute", ["f32", "bf16"])
@pytest.mark.parametrize(("case", "run"), SOME[:2])
def test_bits(case: GenerationCase, run: Generation, compute: Compute, sampling: Sampling, cpu_backend: Backend) -> None:
    check_bits(case, run, compute, "cpu", sampling)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_features(case: GenerationCase, cpu_backend: Backend) -> None:
    target = watched(case, "f32", "cpu")
    prompt = next(run.prompt for run in case.generations if run.prompt_index == 0)
    target.reset()
    target.prefill(prompt)
    features = target.engine.read("features")[: len(prompt)]
    np.testing.assert_allclose(features, case.features, rtol=0, atol=NOISE)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "run"), every(few=False))
def test_rounds_on_the_gpu(case: GenerationCase, run: Generation) -> None:
    check_tokens(case, run, "cuda")
    check_rounds(case, run, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "run"), logged(few=False))
def test_draft_logits_on_the_gpu(case: GenerationCase, run: Generation) -> None:
    check_logits(case, run, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("compute", ["f32", "bf16"])
@pytest.mark.parametrize(("case", "run"), SOME)
def test_bits_on_the_gpu(case: GenerationCase, run: Generation, compute: Compute, sampling: Sampling) -> None:
    check_bits(case, run, compute, "cuda", sampling)
