"""``kdgen verify --fuzz``: cases are functions of their seeds, a failure becomes a small spec file and a command that repeats it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kdgen.backends import open_backend
from kdgen.cli import main
from kdgen.errors import KdgenError
from kdgen.files.resources import templates_dir
from kdgen.spec.model import load_spec
from kdgen.verify.decoding import random_cases
from kdgen.verify.decoding.random_cases import MOST_CONTEXT, SeededChoices
from kdgen.verify.fuzz import _opened, check_case, draw_case, given_model, ranks_for
from kdgen.verify.shrink import parameters
from kdgen.verify.workers import Workers


def kdgen_verify(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["verify", *arguments], prog_name="kdgen")


def test_choices_repeat_and_can_be_forced() -> None:
    def values(choices: SeededChoices) -> list[object]:
        return [choices.integer("width", 3, 9), choices.one_of("letter", "abc"), choices.integer("seed", 0, 2**32 - 1)]

    first = values(SeededChoices(5))
    assert values(SeededChoices(5)) == first
    assert len({str(values(choices)) for seed in range(5) for choices in (SeededChoices(seed), SeededChoices(seed, 1))}) == 10
    forced = SeededChoices(5, forced={"width": 0, "letter": 99, "height": 3})
    assert values(forced) == [3, "c", first[2]]
    assert forced.taken == {"width": 0, "letter": 2, "seed": first[2]}


def test_a_new_choice_leaves_the_others_as_they_are() -> None:
    """Models and situations of a seed are the same when the fuzzer draws something more, before, between or after."""

    class More(SeededChoices):
        def _take(self, name: str, count: int) -> int:
            super()._take(f"new before {name}", 7)
            return super()._take(name, count)

    for seed in range(20):
        assert random_cases.draw_model(More(seed)) == random_cases.draw_model(SeededChoices(seed))
        assert random_cases.draw_situation(More(seed, 1)) == random_cases.draw_situation(SeededChoices(seed, 1))
        assert random_cases.draw_rounds(More(seed, 2)) == random_cases.draw_rounds(SeededChoices(seed, 2))


def test_a_name_is_drawn_once() -> None:
    choices = SeededChoices(5)
    choices.integer("width", 3, 9)
    with pytest.raises(AssertionError, match="two choices are named width"):
        choices.integer("width", 3, 9)


def test_cases_are_functions_of_their_seed_and_models_of_their_choices() -> None:
    cases = [draw_case(seed) for seed in range(60)]
    for case in cases:
        assert draw_case(case.seed) == case == draw_case(case.seed, forced=case.choices)
        assert case.situation.context <= MOST_CONTEXT <= case.spec.max_position_embeddings
    assert {case.compute for case in cases} == {"f32", "bf16"}
    assert any(case.spec.quantization for case in cases) and any(len(case.situation.requests) == 4 for case in cases)
    first = dict.fromkeys((name for case in cases for name in case.choices), 0)
    simplest = draw_case(3, forced=first).spec
    assert (simplest.num_hidden_layers, simplest.hidden_size, simplest.vocab_size) == (1, 1, 2)
    assert draw_case(3, forced=first).situation == draw_case(3).situation


def test_models_that_ranks_can_share_are_shared() -> None:
    """By a number of ranks that divides their dims; what goes wrong there is the case's problem."""
    counts = {seed: ranks_for(draw_case(seed)) for seed in range(60)}
    assert set(counts.values()) == {1, 2, 4} and sum(ranks > 1 for ranks in counts.values()) >= 4
    seed = next(seed for seed, ranks in counts.items() if ranks == 2)
    outcome = check_case(open_backend("cpu"), draw_case(seed))
    assert (outcome.problem, outcome.ranks) == ("", 2)


def test_a_given_model_keeps_its_own_structure() -> None:
    spec, compute = given_model(load_spec("k26"), None)
    assert compute == "bf16" and spec.name == "k26-shrunk"
    assert draw_case(1, (spec, compute)).spec is spec
    with pytest.raises(KdgenError, match="context"):
        given_model(load_spec("tiny").model_copy(update={"max_position_embeddings": 64}), None)


def test_a_few_models(cache_directory: Path) -> None:
    result = kdgen_verify("--fuzz", "3", "--seed", "13", "--backend", "cpu", "--jobs", "1", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["schema"], found["models"], found["ok"], found["failures"]) == ("kdgen.fuzz/1", 3, True, [])
    assert found["bits_compared"] > 10_000 and 0 < found["largest_error"] < 1


def test_a_failure_is_shrunk_and_can_be_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Greedy choice that breaks ties the other way: found, made small, written down, and found again by the command printed."""
    _copy_templates(tmp_path / "templates", "lib/argmax.cuh.j2", "b.index < a.index", "b.index > a.index")
    monkeypatch.setenv("KDGEN_TEMPLATES_DIR", str(tmp_path / "templates"))
    monkeypatch.chdir(tmp_path)
    result = kdgen_verify("--fuzz", "1", "--seed", "14", "--backend", "cpu", "--jobs", "1", "--save", "small.yaml", "--json")
    assert result.exit_code == 1
    (failure,) = json.loads(result.stdout)["failures"]
    assert "argmax" in failure["problem"] and failure["spec_file"] == "small.yaml"
    small = load_spec("small.yaml")
    assert parameters(small) < parameters(draw_case(14).spec)
    again = kdgen_verify(*shlex.split(failure["command"])[2:])
    assert again.exit_code == 1 and "argmax" in again.output
    monkeypatch.delenv("KDGEN_TEMPLATES_DIR")
    assert kdgen_verify(*shlex.split(failure["command"])[2:]).exit_code == 0


def _copy_templates(target: Path, name: str, right: str, wrong: str) -> None:
    shutil.copytree(templates_dir(), target)
    text = (target / name).read_text()
    assert right in text
    (target / name).write_text(text.replace(right, wrong))


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_no_process_outlives_one_that_was_killed() -> None:
    """They hold its stderr, which ends when the last of them does."""
    script = "from kdgen.cli import main; main(prog_name='kdgen')"
    command = [sys.executable, "-c", script, "verify", "--fuzz", "500", "--jobs", "2", "--backend", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    time.sleep(4)
    assert process.poll() is None
    process.kill()
    process.communicate(timeout=15)


def test_options_that_do_not_go_together() -> None:
    for arguments in (("--fuzz", "1", "tiny", "tiny2"), ("--fuzz", "1", "--fail-fast"), ("--fuzz", "1", "--dtype", "f32"), ("--fuzz", "0")):
        assert kdgen_verify(*arguments).exit_code == 2, arguments


def test_what_stops_a_kernel_is_a_problem_of_the_case(monkeypatch: pytest.MonkeyPatch, cache_directory: Path) -> None:
    monkeypatch.setattr("kdgen.verify.fuzz.check_exactness", lambda *_: (_ for _ in ()).throw(KdgenError("stopped")))
    outcome = check_case(open_backend("cpu"), draw_case(1))
    assert outcome.problem == "stopped" and outcome.exactness is None


def test_options_stand_simplest_first() -> None:
    assert random_cases.ODD[0] == 1 and random_cases.VOCABULARIES[0] == 2 and random_cases.TILED[0] == 16


def test_a_worker_without_its_backend_ends_the_run() -> None:
    """A GPU that has no room for one more process is no failed model, and nothing waits for it."""
    with Workers(_opened, ("no-such-backend",), 2) as workers, pytest.raises(KdgenError, match="unknown backend"):
        list(workers.each([draw_case(0), draw_case(1)]))
