"""The rounds of ``kdgen verify``: their own arithmetic by hand, and wrong edits planted in what they check, each of which they report."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kdgen.runtime.decode
from kdgen.backends.base import Backend
from kdgen.runtime.budget import FixedBudget
from kdgen.runtime.engine import Engine
from kdgen.runtime.request import Output
from kdgen.runtime.rounds import Rounds
from kdgen.spec.sampling import Sampling
from kdgen.verify.decoding.expected_rounds import accepted, to_stop
from kdgen.verify.decoding.watched import COLD, WatchedBackend, seconds_of
from kdgen.verify.rounds.checks import SMALL_CHECKS
from kdgen.verify.rounds.situation import Situation
from kdgen.verify.rounds.subjects import small


@pytest.fixture(scope="module")
def situation(cpu_backend: Backend) -> Situation:
    return Situation(cpu_backend, small())


def test_paths_and_stops_by_hand() -> None:
    """The tree takes 5, 5-7, 6 and 6-7, for 0.6, 0.54, 0.4 and 0.36."""
    tokens, log_probs = np.array([[5, 6], [7, 8]]), np.log(np.array([[0.6, 0.4], [0.9, 0.1]], np.float32))
    assert accepted(tokens, log_probs, 3, (6, 7, 1)) == (0, 3)
    assert accepted(tokens, log_probs, 4, (6, 7, 1)) == (0, 3, 4)
    assert accepted(tokens, log_probs, 1, (6,)) == (0,)
    assert (to_stop((1, 2, 3), {2}), to_stop((1, 2), {4}), to_stop((), {4})) == ((1, 2), (1, 2), ())


def test_the_clock_counts_blocks_and_the_backend_units(situation: Situation) -> None:
    backend, engine = WatchedBackend(situation.backend.inner), situation.engine
    work = engine.work("decode", 1, 64)
    replay, times = backend.record(work), []
    for _ in range(4):
        stop = backend.timer()
        engine.begin_rounds(0)
        engine.cut(3, 1)
        replay()
        times.append(stop())
    assert times == [pace * seconds_of(work) for pace in (COLD, 3, 1, 2)]
    assert (backend.recorded, backend.started, backend.timed) == (1, 4, 4)


def leave_a_round(self: Rounds, root: int, measured: Any = Rounds.costs) -> dict[int, float]:
    costs: dict[int, float] = measured(self, root)
    self.engine.cut(self.engine.length() + 1, root)
    return costs


def notice_late(self: Output) -> bool:
    return self.room < 1 or bool(set(self.request.stop).intersection(self.tokens[:-1]))


def lose_a_bit(self: Engine, write: Any = Engine._write_sampling) -> None:
    chosen, self._sampling = self._sampling, [Sampling(s.temperature, s.top_k, s.top_p, s.min_p, s.seed % 2**63) for s in self._sampling]
    write(self)
    self._sampling = chosen


@pytest.mark.parametrize(
    ("name", "target", "attribute", "wrong", "said"),
    [
        ("a stop at every place", kdgen.runtime.request, "through_stop", lambda tokens, stops: tuple(tokens), "stop after token"),
        ("to the end of the context", Rounds, "may_start", property(lambda self: True), "rounds started"),
        ("measured costs", Rounds, "costs", leave_a_round, "committed tokens"),
        ("budgets by measured costs", kdgen.runtime.decode, "budget_for", lambda costs: FixedBudget(15), "budgets"),
        ("forwards of a batch", Output, "done", property(notice_late), "instead of"),
        ("seeds of 64 bits", Engine, "_write_sampling", lose_a_bit, "is not what the reference draws"),
    ],
)
def test_a_wrong_edit_is_reported(
    situation: Situation, monkeypatch: pytest.MonkeyPatch, name: str, target: Any, attribute: str, wrong: Any, said: str
) -> None:
    check = next(check for title, check in SMALL_CHECKS if title == name)
    assert check(situation)[0] == ""
    monkeypatch.setattr(target, attribute, wrong)
    assert said in check(situation)[0]
