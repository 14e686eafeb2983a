"""The engine against a NumPy model of its cache, through any series of prefills, decodes, verified trees, resets, forks and reused
prefixes, over a pool with too few pages for all sequences at once."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from kdgen.backends import open_backend
from kdgen.drafters.base import Candidates
from kdgen.errors import PagesError
from kdgen.plan.build import build_plan
from kdgen.plan.ir import PAGE_SLOTS, Limits
from kdgen.reference.tree import build_tree, walk
from kdgen.runtime.engine import Draft, Engine
from kdgen.runtime.pipeline import start_engine
from kdgen.spec.sampling import GREEDY, Sampling
from kdgen.verify.decoding.recording import differing_bits
from kdgen.verify.variants import variants
from kdgen.weights.random import random_weights

SPEC = next(spec for spec in variants() if spec.name == "tiny-odd")
SEQUENCES, CONTEXT, CHUNK = 3, 140, 48
PAGES = 7  #: a sequence has four at most
SAMPLINGS = (GREEDY, Sampling(1.0, seed=7), Sampling(1.0, seed=8), Sampling(1.5, top_k=9, top_p=0.9, min_p=0.01, seed=2**50))


def new_engine(sequences: int) -> Engine:
    plan = build_plan(SPEC, "f32", Limits(CHUNK, CONTEXT, sequences, PAGES))
    return start_engine(SPEC, plan, open_backend("cpu"), random_weights(SPEC, 3).__getitem__)


@cache
def engine() -> Engine:
    """Loading weights and kernels is what takes time; what a run leaves in the cache must not matter to the next."""
    return new_engine(SEQUENCES)


class Truth:
    """What plain decoding, token by token and alone, makes of a sequence: its cache rows, and the token after it."""

    def __init__(self) -> None:
        self._engine = new_engine(1)
        self._done: list[int] = []
        self._sampling = GREEDY
        self._known: dict[tuple[Sampling, tuple[int, ...]], tuple[NDArray[Any], int]] = {}

    def after(self, tokens: list[int], sampling: Sampling) -> tuple[NDArray[Any], int]:
        """(the last token's cache row [layers, row], the token that follows)."""
        key = (sampling, tuple(tokens))
        if key not in self._known:
            if self._sampling != sampling or self._done != tokens[: len(self._done)] or len(self._done) >= len(tokens):
                self._engine.reset(sampling=sampling)
                self._done, self._sampling = [], sampling
            for token in tokens[len(self._done) :]:
                following = self._engine.prefill([token])
                self._done.append(token)
                row = self._engine.cache_rows()[:, -1]
                self._known[sampling, tuple(self._done)] = row, following
        return self._known[key]


@cache
def truth() -> Truth:
    return Truth()


sequences = st.lists(st.integers(0, SEQUENCES - 1), min_size=1, max_size=SEQUENCES, unique=True)
seeds = st.integers(0, 2**32 - 1)


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine = engine()
        self.cache = np.zeros((SPEC.num_hidden_layers, SEQUENCES, CONTEXT, SPEC.cache_row_dim), np.float32)
        self.tokens: list[list[int]] = [[] for _ in range(SEQUENCES)]
        self.roots: list[int | None] = [None] * SEQUENCES
        self.sampling = [GREEDY] * SEQUENCES
        for sequence in range(SEQUENCES):
            self.engine.reset(sequence)
        self.engine.pages.forget()

    # ---- the model of the cache -------------------------------------------------------------------------------------

    def commit(self, sequence: int, tokens: list[int]) -> None:
        """Append tokens; the root is then what follows them."""
        for token in tokens:
            self.tokens[sequence].append(token)
            row, self.roots[sequence] = truth().after(self.tokens[sequence], self.sampling[sequence])
            self.cache[:, sequence, len(self.tokens[sequence]) - 1] = row

    def room(self, sequence: int) -> int:
        return CONTEXT - len(self.tokens[sequence])

    def rooted(self, chosen: list[int], rows: int) -> list[int]:
        return [s for s in chosen if self.roots[s] is not None and self.room(s) >= rows]

    # ---- steps ------------------------------------------------------------------------------------------------------

    @rule(sequence=st.integers(0, SEQUENCES - 1), sampling=st.sampled_from(SAMPLINGS))
    def reset(self, sequence: int, sampling: Sampling) -> None:
        self.engine.reset(sequence, sampling)
        self.tokens[sequence], self.roots[sequence], self.sampling[sequence] = [], None, sampling

    @rule(chosen=sequences, seed=seeds, most=st.integers(1, CHUNK))
    def prefill(self, chosen: list[int], seed: int, most: int) -> None:
        rng, chunks, left = np.random.default_rng(seed), [], CHUNK
        for sequence in chosen:
            count = min(most, left, self.room(sequence))
            if count > 0:
                chunks.append((sequence, rng.integers(0, SPEC.vocab_size, count).tolist()))
                left -= count
        if not chunks:
            return
        try:
            roots = self.engine.prefill_many(chunks)
        except PagesError:
            return
        for (sequence, tokens), root in zip(chunks, roots, strict=True):
            self.commit(sequence, tokens)
            assert root == self.roots[sequence]

    @precondition(lambda self: any(self.tokens))
    @rule(sequence=st.integers(0, SEQUENCES - 1), to=st.integers(0, SEQUENCES - 1), part=st.floats(0, 1), chunk=st.integers(1, CHUNK))
    def reuse_a_prefix(self, sequence: int, to: int, part: float, chunk: int) -> None:
        """Go back to a prefix of what ``sequence`` holds, there or in another sequence."""
        prefix = self.tokens[sequence][: round(part * len(self.tokens[sequence]))]
        self.engine.reset(to, self.sampling[to])
        self.tokens[to], self.roots[to] = [], None
        found = self.engine.reuse(to, prefix)
        assert found % PAGE_SLOTS == 0 and found < max(1, len(prefix))
        self.commit(to, prefix[:found])
        self.roots[to] = None  # a prefill of the rest says what follows
        for start in range(found, len(prefix), chunk):
            part_of_it = prefix[start : start + chunk]
            try:
                root = self.engine.prefill(part_of_it, to)
            except PagesError:
                return
            self.commit(to, part_of_it)
            assert root == self.roots[to]

    @rule(sequence=st.integers(0, SEQUENCES - 1))
    def share(self, sequence: int) -> None:
        """What the sequence holds may be found from now on; what it writes later must not change that."""
        root = self.roots[sequence]
        self.engine.share(sequence, self.tokens[sequence] + ([] if root is None else [root]))  # whose row is not there yet

    @precondition(lambda self: any(self.tokens))
    @rule(source=st.integers(0, SEQUENCES - 1), to=st.integers(0, SEQUENCES - 1))
    def fork(self, source: int, to: int) -> None:
        """Two sequences go on from the same tokens, in the same pages until one of them writes."""
        if source == to or self.sampling[source] != self.sampling[to]:
            return
        self.engine.reset(to, self.sampling[to])
        self.engine.fork(source, to)
        self.tokens[to], self.roots[to] = [*self.tokens[source]], self.roots[source]
        self.cache[:, to] = self.cache[:, source]

    @rule(chosen=sequences)
    def decode(self, chosen: list[int]) -> None:
        chosen = self.rooted(chosen, 1)
        if not chosen:
            return
        try:
            roots = self.engine.decode_many(chosen)
        except PagesError:
            return
        for sequence, root in zip(chosen, roots, strict=True):
            old = self.roots[sequence]
            assert old is not None
            self.commit(sequence, [old])
            assert root == self.roots[sequence]

    @rule(chosen=sequences, seed=seeds, depths=st.integers(0, 15), width=st.integers(1, 5), budget=st.sampled_from((0, 1, 5, 20, 63)))
    def verify(self, chosen: list[int], seed: int, depths: int, width: int, budget: int) -> None:
        chosen = self.rooted(chosen, depths + 1)
        if not chosen:
            return
        rng = np.random.default_rng(seed)
        proposals = [self.propose(rng, sequence, depths, width) for sequence in chosen]
        try:
            steps = self.engine.verify_many([Draft(s, proposal, budget) for s, proposal in zip(chosen, proposals, strict=True)])
        except PagesError:
            return
        first_row = 0
        for sequence, proposal, step in zip(chosen, proposals, steps, strict=True):
            tree = build_tree(proposal.tokens.astype(np.int64), proposal.log_probs, budget)
            root = self.roots[sequence]
            assert root is not None
            everything = [root, *tree.tokens.tolist()]
            choices = []  # of the target after every node
            for node in range(tree.size + 1):
                path = [everything[each] for each in tree.path(node)]
                choices.append(truth().after([*self.tokens[sequence], *path], self.sampling[sequence])[1])
            accepted, following = walk(tree, np.array(choices))
            assert step.accepted == tuple(everything[node] for node in accepted)
            assert step.rows == tuple(first_row + node for node in accepted)
            assert step.next_token == following
            self.commit(sequence, list(step.accepted))
            first_row += tree.size + 1

    def propose(self, rng: np.random.Generator, sequence: int, depths: int, width: int) -> Candidates:
        """Candidates among which the true continuation often is, with many equal probabilities."""
        following = [*self.tokens[sequence]]
        tokens = np.zeros((depths, width), np.int32)
        token = self.roots[sequence]
        for depth in range(depths):
            assert token is not None
            following.append(token)
            token = truth().after(following, self.sampling[sequence])[1]
            others = rng.permutation([other for other in range(SPEC.vocab_size) if other != token])[:width]
            if rng.random() < 0.8:
                others[rng.integers(0, width)] = token
            tokens[depth] = others
        log_probs = -np.sort(rng.integers(1, 9, (depths, width)) / 4, axis=1)
        return Candidates(tokens, log_probs.astype(np.float32))

    # ---- what holds after every step --------------------------------------------------------------------------------

    @invariant()
    def cache_is_as_modelled(self) -> None:
        self.engine.pages.check()
        lengths, roots = self.engine.read("sequence_length"), self.engine.read("root_token")
        for sequence, tokens in enumerate(self.tokens):
            assert self.engine.length(sequence) == lengths[sequence] == len(tokens)
            if self.roots[sequence] is not None:
                assert roots[sequence] == self.roots[sequence]
            rows = self.engine.cache_rows(sequence)
            assert differing_bits(rows, self.cache[:, sequence, : len(tokens)]) == 0, f"sequence {sequence}"


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=12, stateful_step_count=30)


def test_a_page_is_not_found_before_its_last_row_is_there() -> None:
    tokens = [token % SPEC.vocab_size for token in range(1, PAGE_SLOTS + 1)]
    engine = new_engine(2)
    for start in range(0, PAGE_SLOTS - 1, CHUNK):
        root = engine.prefill(tokens[start : min(start + CHUNK, PAGE_SLOTS - 1)])
    engine.share(0, [*tokens[:-1], root])
    assert engine.reuse(1, [*tokens[:-1], root, 1]) == 0


def test_a_seed_is_new_though_the_temperature_is_not() -> None:
    engine = new_engine(1)
    drawn = []
    for seed in range(12):
        engine.reset(sampling=Sampling(2.0, seed=seed))
        drawn.append(engine.prefill([1, 2, 3]))
    assert len(set(drawn)) > 1
