"""The campaign of damage and kills, a very small one, and its judge, which must be able to say no."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kdgen.reference import int4
from tests.campaign import judge
from tests.campaign.damage import Damage, sealed, split_safetensors
from tests.campaign.inputs import campaign
from tests.campaign.kills import jobs, kill_often
from tests.campaign.process import Outcome, environment, run_forked
from tests.campaign.subjects import Subjects, generate, make_subjects

NOTHING: frozenset[str] = frozenset()


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    return make_subjects(tmp_path_factory.mktemp("campaign"), whole=False)


def test_forty_damaged_inputs_end_well(subjects: Subjects, tmp_path: Path) -> None:
    tally = campaign(subjects, 7, tmp_path, lambda tally: tally.inputs < 40, lambda _: None)
    assert not tally.findings
    assert tally.inputs == 40 and tally.refused > 10 and tally.answered > 2
    assert len(tally.kinds) == 7  # every file that there is


def test_a_killed_import_leaves_nothing(subjects: Subjects) -> None:
    killed = kill_often("import", jobs(subjects)["import"], 2, 3, lambda _: None)
    assert killed.kills == 2 and not killed.findings


def test_the_judge_refuses_what_is_not_the_reference_answer(subjects: Subjects) -> None:
    model = subjects.models[0].path
    outcome = run_forked(generate(model), model.parent, environment(subjects.cache))
    config, weights, ends = judge.config_of(model), judge.tensors_of(model), judge.ends_of(model)
    assert judge.wrong_tokens(outcome, config, weights, ends) == ""
    report = json.loads(outcome.stdout)
    for place in range(len(report["tokens"])):
        tokens = list(report["tokens"])
        tokens[place] = (tokens[place] + 1) % config["vocab_size"]
        assert "the reference's best" in judge.wrong_tokens(_said(outcome, report | {"tokens": tokens}), config, weights, ends)
    assert "of 4, stopped" in judge.wrong_tokens(_said(outcome, report | {"tokens": report["tokens"][:3]}), config, weights, ends)
    assert "it went on" in judge.wrong_tokens(outcome, config, weights, frozenset(report["tokens"][:1]))
    broken = dict(weights) | {"model.norm.weight": np.full_like(weights["model.norm.weight"], np.nan)}
    assert "not finite" in judge.wrong_tokens(outcome, config, broken, ends)


def _said(outcome: Outcome, report: object) -> Outcome:
    return replace(outcome, stdout=json.dumps(report))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, ""),
        ({"stderr": "Error: no file"}, "names no file"),
        ({"stderr": "Error: config.json: hidden_size is odd"}, "does not name vocab_size"),
        ({"stderr": "config.json: vocab_size"}, "without an error message"),
        ({"stderr": "Traceback (most recent call last):\nValueError: config.json vocab_size"}, "a traceback: ValueError"),
        ({"stderr": "Error: config.json: vocab_size: \x1b[2J"}, "control characters"),
        ({"code": 1}, "exit code 1"),
        ({"code": -11}, "exit code -11"),
        ({"timed_out": True}, "no end within"),
        ({"peak_bytes": 1 << 34}, "MiB of memory"),
    ],
)
def test_the_judge_knows_bad_endings(changes: dict[str, object], found: str) -> None:
    good = Outcome((), 2, "", "Error: config.json: vocab_size: is odd", 1.0, 1 << 20, False)
    ended = replace(good, **changes)  # type: ignore[arg-type]
    said = judge.problems(ended, ("config.json",), "vocab_size", NOTHING, NOTHING, NOTHING)
    assert found in " ".join(said) and bool(said) == bool(found)
    assert judge.problems(good, ("config.json",), "", NOTHING, frozenset({"half"}), frozenset({"half"})) == ["left behind: half"]


def test_the_judge_sees_damage_that_a_packed_file_does_not_report(subjects: Subjects) -> None:
    data = subjects.packed.path.read_bytes()
    head, body = split_safetensors(data)
    assert sealed(head, body) != data and split_safetensors(sealed(head, body)) == (head, body)  # the same checksums, made anew
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    assert judge.unlike_written(data, flipped, [("packed.kdtr", Damage("bit", bytes))]) == "damage is not noticed"


def test_the_judge_sees_weights_that_are_not_the_source_s() -> None:
    source = {"a.weight": np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 64), "norm": np.ones(4, np.float32)}
    packed, scale = int4.encode(source["a.weight"], 32)
    written = {"a.weight_packed": packed, "a.weight_scale": scale, "norm": source["norm"]}
    assert judge.unlike_source(source, written) == ""
    assert "more than half a step" in judge.unlike_source(source, written | {"a.weight_packed": packed ^ 0x20})
    assert "is not the source's" in judge.unlike_source(source, written | {"norm": source["norm"] * 2})
