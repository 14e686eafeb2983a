"""Rounds: the same tokens and cache bits as plain decoding, started ahead of their results, and nothing that waits in between."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kdgen.backends.base import Backend, DeviceArray, Mailbox, Replay, Work
from kdgen.backends.cpu import CpuBackend
from kdgen.drafters.base import DeviceDraftRequest
from kdgen.drafters.dflash import DFlashDrafter
from kdgen.errors import KdgenError
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Limits
from kdgen.runtime.budget import FixedBudget
from kdgen.runtime.decode import Decoded, Decoder, decode_plain, decode_rounds
from kdgen.runtime.engine import Engine
from kdgen.runtime.pipeline import start_engine
from kdgen.runtime.request import Request
from kdgen.runtime.rounds import Rounds
from kdgen.spec.model import Spec, load_spec
from kdgen.spec.sampling import Sampling
from kdgen.verify.decoding.recording import differing_bits
from kdgen.weights.random import random_weights

SPEC = load_spec("tiny-dflash")
BLOCK = DeviceDraftRequest(7, 8)
PROMPT = list(range(3, 40))


def engine_of(backend: Backend, spec: Spec = SPEC, context: int = 160) -> Engine:
    return start_engine(spec, build_plan(spec, "f32", Limits(max_context=context)), backend, random_weights(SPEC, 11).__getitem__)


@pytest.fixture(scope="module")
def engine(cpu_backend: Backend) -> Engine:
    return engine_of(cpu_backend)


class Scheduled:
    """Budgets in a fixed order, and what was observed."""

    def __init__(self, budgets: Sequence[int]) -> None:
        self._budgets = cycle(budgets)
        self.seen: list[tuple[int, tuple[int, ...], NDArray[np.float32] | None]] = []

    def choose(self) -> int:
        return next(self._budgets)

    def observe(self, budget: int, nodes: Sequence[int], log_probs: NDArray[np.float32] | None) -> None:
        self.seen.append((budget, tuple(nodes), log_probs))


def same(rounds: Rounds, plain: Decoded, rows: NDArray[Any], got: Decoded) -> None:
    assert got.tokens == plain.tokens
    assert rounds.engine.length() == rows.shape[1] and rounds.running == 0
    assert differing_bits(np.ascontiguousarray(rounds.engine.cache_rows()), rows) == 0


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_p=0.9, seed=2**50)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("budgets", [(7,), (63,), (15, 0, 7), (0,)], ids=str)
def test_tokens_and_cache_bits_of_plain_decoding(engine: Engine, budgets: tuple[int, ...], ahead: int, sampling: Sampling) -> None:
    plain = decode_plain(engine, Request(PROMPT, 12, sampling=sampling))
    rows = np.ascontiguousarray(engine.cache_rows())
    rounds = Rounds(engine, BLOCK, budgets)
    chooser = Scheduled(budgets)
    got = decode_rounds(rounds, Request(PROMPT, 12, sampling=sampling, chunk=9), lambda _: chooser, ahead=ahead)
    same(rounds, plain, rows, got)
    assert got.target_forwards == len(got.acceptance_lengths or chooser.seen) and len(chooser.seen) == got.target_forwards
    assert sum(got.acceptance_lengths) in (0, 11)
    for budget, nodes, log_probs in chooser.seen:
        assert nodes[0] == 0 and list(nodes) == sorted(nodes) and nodes[-1] <= budget
        assert (log_probs is None) == (budget == 0)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_stop_is_seen_late_and_leaves_nothing_behind(engine: Engine, ahead: int) -> None:
    tokens = decode_plain(engine, Request(PROMPT, 12)).tokens
    stop = tokens[5]
    plain = decode_plain(engine, Request(PROMPT, 12, stop=(stop,)))
    rows = np.ascontiguousarray(engine.cache_rows())
    rounds = Rounds(engine, BLOCK, (15,))
    same(rounds, plain, rows, decode_rounds(rounds, Request(PROMPT, 12, stop=(stop,)), lambda _: FixedBudget(15), ahead=ahead))
    assert engine.decode() == tokens[len(plain.tokens)]  # and decoding may go on from there


def test_without_a_drafter_rounds_are_plain(cpu_backend: Backend) -> None:
    engine = engine_of(cpu_backend, SPEC.with_draft(None))
    plain = decode_plain(engine, Request(PROMPT, 6))
    rows = np.ascontiguousarray(engine.cache_rows())
    rounds = Rounds(engine, None, (0,))
    got = decode_rounds(rounds, Request(PROMPT, 6), lambda _: FixedBudget(0), ahead=1)
    same(rounds, plain, rows, got)
    assert got.acceptance_lengths == () and got.target_forwards == 5


@pytest.mark.parametrize("room", [1, 2, 9, 12, 20])
def test_up_to_the_end_of_the_context(cpu_backend: Backend, room: int) -> None:
    engine = engine_of(cpu_backend, context=len(PROMPT) + room)
    plain = decode_plain(engine, Request(PROMPT, 50))
    rows = np.ascontiguousarray(engine.cache_rows())
    rounds = Rounds(engine, BLOCK, (63,))
    same(rounds, plain, rows, decode_rounds(rounds, Request(PROMPT, 50), lambda _: FixedBudget(63), ahead=1))


def test_interrupted(engine: Engine) -> None:
    rounds = Rounds(engine, BLOCK, (7,))
    told: list[int] = []

    def emit(tokens: tuple[int, ...]) -> None:
        told.extend(tokens)
        if len(told) > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode_rounds(rounds, Request(PROMPT, 12), lambda _: FixedBudget(7), emit=emit, ahead=1)
    assert engine.length() == len(PROMPT) + len(told) - 1 and rounds.running == 0
    assert (*told, engine.decode()) == decode_plain(engine, Request(PROMPT, len(told) + 1)).tokens


def test_measuring_rounds_changes_nothing(engine: Engine) -> None:
    plain = decode_plain(engine, Request(PROMPT, 6))
    rows = np.ascontiguousarray(engine.cache_rows())
    rounds, costs = Rounds(engine, BLOCK, (0, 7)), {}

    def measured(root: int) -> FixedBudget:
        costs.update(rounds.costs(root))
        return FixedBudget(7)

    same(rounds, plain, rows, decode_rounds(rounds, Request(PROMPT, 6), measured))
    assert sorted(costs) == [0, 7] and all(seconds > 0 for seconds in costs.values())
    assert rounds.costs(plain.tokens[0]) == costs  # measured once


@settings(max_examples=10)
@given(
    prompt=st.lists(st.integers(0, SPEC.vocab_size - 1), min_size=1, max_size=40),
    new_tokens=st.integers(1, 16),
    stop_at=st.integers(0, 20),
    budgets=st.lists(st.sampled_from([0, 1, 7, 20, 63]), min_size=1, max_size=4),
    depths=st.integers(1, 7),
    ahead=st.integers(0, 1),
)
def test_whatever_the_situation(
    engine: Engine, prompt: list[int], new_tokens: int, stop_at: int, budgets: list[int], depths: int, ahead: int
) -> None:
    tokens = decode_plain(engine, Request(prompt, new_tokens)).tokens
    stop = tokens[stop_at : stop_at + 1]
    plain = decode_plain(engine, Request(prompt, new_tokens, stop=stop))
    rows = np.ascontiguousarray(engine.cache_rows())
    rounds = Rounds(engine, DeviceDraftRequest(depths, depths + 1), budgets)
    same(rounds, plain, rows, decode_rounds(rounds, Request(prompt, new_tokens, stop=stop), lambda _: Scheduled(budgets), ahead=ahead))


def test_a_decoder_records_and_measures_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    measured = Rounds.costs
    monkeypatch.setattr(Rounds, "costs", lambda self, root: made.append(self.budgets) or measured(self, root))  # type: ignore[func-returns-value]
    recorded: list[int] = []
    record = engine.backend.record
    monkeypatch.setattr(engine.backend, "record", lambda work: recorded.append(len(work)) or record(work))  # type: ignore[func-returns-value]
    monkeypatch.setattr(engine.backend, "recorded_context", lambda context: 192)
    decoder, plain = Decoder(engine), decode_plain(engine, Request(PROMPT, 5)).tokens
    decode_plain(engine, Request(PROMPT, 5))  # the engine records a prefill that comes again
    recorded.clear()
    for _ in range(2):
        assert decoder.decode(Request(PROMPT, 5, drafter=DFlashDrafter(8)), auto_budget=True).tokens == plain
        assert decoder.decode(Request(PROMPT, 5, drafter=DFlashDrafter(8, chain=True)), auto_budget=True).tokens == plain
        assert decoder.decode(Request(PROMPT, 5), auto_budget=True).tokens == plain
    assert made == [(0, 7, 15, 31, 63), (0, 7)] * 2
    assert len(recorded) == 5 + 2 + 1
    assert decoder.decode(Request(PROMPT, 1, drafter=DFlashDrafter(8))).tokens == plain[:1]
    assert len(recorded) == 8, "nothing is recorded for nothing"


@pytest.mark.parametrize(
    ("block", "budgets", "said"),
    [
        (BLOCK, (), "a budget lies between 0 and 63, not at none"),
        (BLOCK, (7, 64), "a budget lies between 0 and 63, not at 7, 64"),
        (None, (0, 7), "need a block from a drafter"),
        (DeviceDraftRequest(8, 9), (7,), "the drafter fills blocks of 2 … 8 rows, not 9"),
    ],
)
def test_what_is_refused(engine: Engine, block: DeviceDraftRequest | None, budgets: tuple[int, ...], said: str) -> None:
    with pytest.raises(KdgenError, match=said):
        Rounds(engine, block, budgets)


# ---- no host synchronisation inside a round --------------------------------------------------------------------------------


class _WatchedMailbox(Mailbox):
    """Reads in silence, as a device does that copies by itself; the host's waiting is what ``take`` says."""

    def post(self) -> None:
        backend = self._backend
        assert isinstance(backend, WatchedBackend)
        backend.events.append("post")
        backend.silent = True
        super().post()
        backend.silent = False

    def take(self) -> tuple[NDArray[np.generic], ...]:
        assert isinstance(self._backend, WatchedBackend)
        self._backend.events.append("take")
        return super().take()


class WatchedBackend(CpuBackend):
    """Writes down whatever the host asks of the device."""

    rounds_ahead = 1

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.silent = False

    def _event(self, name: str) -> None:
        if not self.silent:
            self.events.append(name)

    def launch(self, kernel: str, grid: tuple[int, int, int], block: int, smem: int, args: Any) -> None:
        self._event("launch")
        super().launch(kernel, grid, block, smem, args)

    def record(self, work: Sequence[Work]) -> Replay:
        self._event("record")
        replay = super().record(work)

        def start() -> None:
            self._event("round")
            silent, self.silent = self.silent, True
            replay()
            self.silent = silent

        return start

    def to_host(self, array: DeviceArray, rows: int | None = None) -> NDArray[np.generic]:
        self._event("to_host")
        return super().to_host(array, rows)

    def write(self, array: DeviceArray, values: NDArray[np.generic], offset: int = 0) -> None:
        self._event("write")
        super().write(array, values, offset)

    def synchronize(self) -> None:
        self._event("synchronize")
        super().synchronize()

    def recorded_context(self, context: int) -> int:
        return -(-context // 1024) * 1024  # far beyond the engine's: blocks with nothing to do must end

    def mailbox(self, arrays: Sequence[DeviceArray]) -> Mailbox:
        return _WatchedMailbox(self, arrays)


def test_a_round_is_one_call_and_its_results_are_read_while_the_next_one_runs(cache_directory: Any) -> None:
    backend = WatchedBackend()
    engine = engine_of(backend)
    rounds = Rounds(engine, BLOCK, (7, 15))
    backend.events.clear()
    got = decode_rounds(rounds, Request(PROMPT, 12), lambda _: Scheduled((7, 15)))
    first = backend.events.index("round")
    last = len(backend.events) - backend.events[::-1].index("take")
    during = backend.events[first:last]
    assert "record" in backend.events[:first], "units are recorded before the first round"
    assert set(during) == {"round", "post", "take"}, "nothing is launched, copied or waited for but rounds and their results"
    running = 0
    for place, event in enumerate(during):
        running += {"round": 1, "take": -1}.get(event, 0)
        if event == "take" and "round" in during[place:]:
            assert running == 1, "a round runs while the one before it is read"
    assert during.count("take") == got.target_forwards > 2
