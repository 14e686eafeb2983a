"""Ranks of one process: their sums are seen, and what the checks of all combinations must not miss."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kdgen.errors import KdgenError
from kdgen.plan.shard import shard_obstacles, shares_draft
from kdgen.verify.decoding import lockstep
from kdgen.verify.decoding.lockstep import Team
from kdgen.verify.decoding.rank_cases import Case, cases, rank_specs
from kdgen.verify.decoding.rank_matrix import check_case, check_rank_matrix
from kdgen.verify.decoding.rank_observations import LIMITS, prompt_of
from kdgen.verify.kernels.inboxes import words_out_of_place


def three() -> Case:
    biased, _ = rank_specs()
    return Case(biased, "f32", 3)


def test_cases_are_of_every_number_of_ranks_type_and_exchange() -> None:
    found = cases()
    assert [case.ranks for case in found] == sorted(case.ranks for case in found)  # one part of the report for each number
    assert {case.ranks for case in found} == {1, 2, 3, 4} and {case.compute for case in found} == {"f32", "bf16"}
    assert {case.ranks for case in found if "peer" in case.processes} == {2, 3, 4}
    assert any(case.ties for case in found) and any("gather" in case.processes for case in found)
    biased, plain = rank_specs()
    assert not any(shard_obstacles(spec, ranks) for spec in (biased, plain) for ranks in (2, 3, 4))
    assert all(shares_draft(biased, ranks) and not shares_draft(plain, ranks) for ranks in (2, 3, 4))


def test_ranks_that_add_in_another_order_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = three()
    weights = case.weights()
    team = Team(case.spec, case.compute, case.ranks, LIMITS, weights)
    prompt = prompt_of(case.spec)
    sums = team.watched((lambda engine: engine.prefill(prompt),), weights)
    assert not sums.problem and sums.seen and 0 < sums.ordered < sums.seen

    def reversed_parts(self: Team, rank: int, name: str, source: Any) -> Any:
        return meet(self, rank, name, source)[::-1]

    meet = Team.meet
    monkeypatch.setattr(lockstep.Team, "meet", reversed_parts)
    for engine in team.engines:
        engine.reset()
    assert "not added in the order of ranks" in team.watched((lambda engine: engine.prefill(prompt),), weights).problem


def test_a_rank_that_fails_ends_the_others() -> None:
    case = three()
    team = Team(case.spec, case.compute, case.ranks, LIMITS, case.weights())

    def step(engine: Any) -> int:
        if engine.plan.shard.rank == 1:
            raise KdgenError("this rank has had enough")
        return int(engine.prefill(prompt_of(case.spec)))

    with pytest.raises(KdgenError, match="had enough"):
        team.run(step)


def test_a_lost_bias_is_seen() -> None:
    case = three()
    weights = case.weights()
    key = "model.layers.1.self_attn.o_proj.bias"
    biased, _ = rank_specs()
    assert not check_case(case, weights)[0]
    # the engines load zeros, the checks know the checkpoint's
    team_weights = {**weights, key: np.zeros_like(weights[key])}
    team = Team(biased, "f32", 3, LIMITS, team_weights)
    sums = team.watched((lambda engine: engine.prefill(prompt_of(biased)),), weights)
    assert sums.problem.startswith("rank 0: the attention of layer 1 is not added in the order of ranks")


def test_processes_are_held_to_ranks_of_one_process() -> None:
    biased, _ = rank_specs()
    checks = list(check_rank_matrix([replace(cases()[1], spec=biased, processes=("peer",))]))
    assert [check.status for check in checks] == ["ok", "ok"] and checks[1].name.endswith("processes, peer")


class Inboxed:
    """An engine whose only inbox has 3 rows of 4 words for two ranks; rank 1 has sent row 0 in three rounds, row 2 in one."""

    def __init__(self) -> None:
        self.plan = SimpleNamespace(buffers=(SimpleNamespace(name="inbox_sum", role="inbox"),))
        self.words = np.zeros((2, 2, 3, 4, 2), np.int32)
        self.words[1, 1, 0, :, 1], self.words[0, 1, 0, :, 1], self.words[1, 1, 2, :, 1] = 3, 2, 1

    def read(self, name: str) -> Any:
        return self.words if name == "inbox_sum" else np.array([[3, 3], [0, 0], [1, 1]])


@pytest.mark.parametrize(
    ("at", "round_", "said"),
    [
        ((1, 1, 0, 2), 2, "1 words in inbox_sum are in another row or turn"),  # the other turn's
        ((1, 1, 1, 3), 1, "1 words in inbox_sum are in another row or turn"),  # of a row that no step has had
        ((1, 0, 2), 3, "4 words in inbox_sum are in another row or turn"),  # of a round that is yet to be
        ((0, 1, 0, 1), 0, ""),  # never sent: whoever sums these columns is sent no others
        ((...,), 0, "inbox_sum holds no word"),
    ],
)
def test_words_of_ranks_that_lie_elsewhere_are_seen(at: Any, round_: int, said: str) -> None:
    engine: Any = Inboxed()
    assert words_out_of_place(engine) == ""
    engine.words[(*at, *(() if at == (...,) else (slice(None),) * (4 - len(at))), 1)] = round_
    assert words_out_of_place(engine).startswith(said) and bool(words_out_of_place(engine)) == bool(said)
