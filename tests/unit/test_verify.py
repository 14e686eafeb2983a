"""``kdgen verify`` itself: findings, the report, exit codes, and the rule that shrinks wide specs."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from rich.console import Console
from strategies import specs

import kdgen.verify.parts.kernels
import kdgen.verify.run
from kdgen.cli import main
from kdgen.errors import BackendError
from kdgen.files.resources import specs_dir, templates_dir
from kdgen.plan.attention import mma_obstacles
from kdgen.plan.build import build_plan
from kdgen.spec.model import Spec, load_spec
from kdgen.verify.kernels.harness import Findings, poison
from kdgen.verify.report.checks import Check, Report, make_report, print_report
from kdgen.verify.shrink import CPU_PARAMETERS, is_wide, parameters, shrink

SHIPPED = sorted(path.stem for path in specs_dir().glob("*.yaml"))


def kdgen_verify(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["verify", *arguments], prog_name="kdgen")


# ---- findings -----------------------------------------------------------------------------------------------------------


def test_findings_keep_the_worst_element_and_where_it_is() -> None:
    findings = Findings()
    findings.close("y", np.array([1.0, 2.0]), np.array([1.0, 2.5]), np.array([1.0, 1.0]))
    assert not findings.problems and (findings.error, findings.tolerance) == (0.5, 1.0)
    findings.close("y", np.array([[1.0, 4.0]]), np.array([[1.0, 2.5]]), np.array([1.0]))
    assert "y[0, 1] is 4.0 instead of 2.5" in findings.problems[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_never_close(bad: float) -> None:
    findings = Findings()
    findings.close("y", np.array([bad]), np.array([1.0]), np.array([1e9]))
    assert findings.problems


def test_bits_tell_zeros_apart_and_poison_is_seen_when_overwritten() -> None:
    findings = Findings()
    findings.same_bits("y", np.array([0.0], np.float32), np.array([0.0], np.float32))
    findings.untouched("y", poison("bf16", 3, 2))
    assert not findings.problems
    findings.same_bits("y", np.array([-0.0], np.float32), np.array([0.0], np.float32))
    touched = poison("f32", 4)
    touched[2] = 0
    findings.untouched("y", touched)
    assert len(findings.problems) == 2


# ---- the report ---------------------------------------------------------------------------------------------------------


CHECKS = (
    Check("tiny", "f32", "kernel", "embed", "CPU", "ok", 1e-7, 2e-7, "embed.cu.j2", seconds=0.5),
    Check("tiny", "f32", "kernel", "argmax", "CPU", "failed", why="row 3"),
    Check("tiny2", "bf16", "trees", "tree_build", "CPU", "skipped", why="no cases"),
)


def test_report_counts_and_shows_everything() -> None:
    report = make_report(CHECKS, ["a note"], 12.0)
    assert (report.ok, report.ran, report.failed, report.skipped) == (False, 2, 1, 1)
    out = io.StringIO()
    print_report(report, Console(file=out, width=1000))
    text = out.getvalue()
    for expected in ("tiny f32", "tiny2 bf16", "1e-07", "skipped", "no cases", "FAILED tiny f32, kernel, argmax on CPU", "row 3", "a note"):
        assert expected in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_nothing_run_is_not_ok() -> None:
    assert not make_report(CHECKS[2:], [], 0).ok
    assert make_report(CHECKS[:1], [], 0).ok


# ---- the command --------------------------------------------------------------------------------------------------------


def test_bad_input_exits_with_2(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: bad\nhidden_size: -1\n")
    for arguments in ((str(bad),), ("nosuchspec",), ("tiny", "--backend", "abacus"), ("tiny", "--dtype", "int3")):
        assert kdgen_verify(*arguments).exit_code == 2, arguments
    odd = tmp_path / "odd.yaml"
    odd.write_text(load_spec("tiny").to_yaml().replace("hidden_size: 256", "hidden_size: 250"))
    result = kdgen_verify(str(odd), "--dtype", "bf16")
    assert result.exit_code == 2 and "hidden_size 250" in result.output


def test_a_model_of_a_few_positions_is_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    short = tmp_path / "short.yaml"
    short.write_text(load_spec("tiny").model_copy(update={"max_position_embeddings": 16}).to_yaml())
    result = kdgen_verify(str(short), "--backend", "cpu")
    assert (result.exit_code, result.stdout) == (2, "") and "checks need a context of 32" in result.stderr


def test_no_compiler_is_an_error_not_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise BackendError("no compiler")

    monkeypatch.setattr(kdgen.verify.parts.kernels, "load_kernels", refuse)
    result = kdgen_verify("tiny", "--backend", "cpu", "--jobs", "1")
    assert result.exit_code == 2 and "no compiler" in result.output


def test_json_has_the_reports_fields_and_the_exit_code_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kdgen.verify.run, "verify", lambda *_: make_report(CHECKS, ["note"], 1.0))
    result = kdgen_verify("--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert found["schema"] == "kdgen.verify/1" and found["failed"] == 1 and found["checks"][0]["tolerance"] == 2e-7
    assert set(found) == {"schema", *Report.__dataclass_fields__}
    monkeypatch.setattr(kdgen.verify.run, "verify", lambda *_: make_report(CHECKS[:1], [], 1.0))
    assert kdgen_verify("--json").exit_code == 0 and kdgen_verify().exit_code == 0


def test_a_wrong_template_is_found_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command from end to end, over a model that is quick to decode, with one sign of its RoPE turned."""
    spec = tmp_path / "small.yaml"
    spec.write_text(shrink(load_spec("deepseek-v2-lite")).to_yaml())
    shutil.copytree(templates_dir(), tmp_path / "templates")
    rotary = tmp_path / "templates" / "lib" / "rotary.cuh.j2"
    right = rotary.read_text()
    rotary.write_text(right.replace("b * cos_row[i] + a", "b * cos_row[i] - a"))
    assert rotary.read_text() != right
    monkeypatch.setenv("KDGEN_TEMPLATES_DIR", str(tmp_path / "templates"))  # which worker processes see
    result = kdgen_verify(str(spec), "--dtype", "f32", "--backend", "cpu", "--json")
    assert result.exit_code == 1
    checks = json.loads(result.stdout)["checks"]
    bad = [check for check in checks if check["status"] == "failed"]
    assert {"kernel", "checker", "drift", "logits", "decode", "trees"} <= {check["part"] for check in checks}
    for check in bad:  # each was printed in full at once; what failed says nothing of what is right
        printed = f"FAILED {check['spec']} f32, {check['part']}, {check['name']} on {check['backend']}:\n  {check['why'].splitlines()[0]}"
        assert printed in result.stderr and "equal by bits" not in check["detail"]
    (logits,) = (check["why"] for check in bad if check["part"] == "logits")
    assert re.search(r"more than \S+; .*layer 0 is the first whose cache row differs from the reference's, at position [0-9]+, by", logits)
    failed = {(check["part"], check["name"]) for check in bad}
    assert failed == {
        ("kernel", "rope_cache"),
        ("checker", "rope_cache"),
        ("together", "requests that join and leave"),
        ("logits", "the float64 reference"),
        ("ranks", "2 ranks, gather"),
        ("ranks", "2 ranks, peer"),
    }


# ---- shrinking ----------------------------------------------------------------------------------------------------------


def same_structure(spec: Spec, small: Spec) -> None:
    assert bool(mma_obstacles(small)) == bool(mma_obstacles(spec))
    for compute in ("f32",) if mma_obstacles(spec) else ("f32", "bf16"):
        kernels, small_kernels = build_plan(spec, compute).kernels, build_plan(small, compute).kernels  # type: ignore[arg-type]
        # in any order: where a drafter reads another layer, its capture stands elsewhere among the first launches
        assert {(kernel.name, kernel.template) for kernel in small_kernels} == {(kernel.name, kernel.template) for kernel in kernels}
    assert build_plan(small).compute == build_plan(spec).compute
    for field in ("attention_bias", "has_router_bias", "scoring_func", "tie_word_embeddings", "rope_scaling", "rope_interleave", "dtype"):
        assert getattr(small, field) == getattr(spec, field), field
    assert (small.quantization is None) == (spec.quantization is None)
    assert (small.n_group > 1, small.topk_group < small.n_group) == (spec.n_group > 1, spec.topk_group < spec.n_group)


@pytest.mark.parametrize("name", SHIPPED)
def test_shrunk_specs_keep_their_kernels(name: str) -> None:
    spec = load_spec(name)
    small = shrink(spec)
    same_structure(spec, small)
    assert is_wide(spec) == (not name.startswith(("tiny", "demo")))
    assert parameters(small) <= min(parameters(spec), CPU_PARAMETERS / 5)
    assert small.name == f"{name}-shrunk"
    assert len(set(small.eos_token_id)) == len(spec.eos_token_id)


@given(specs(quantized=None))
def test_any_spec_shrinks_to_its_own_structure(spec: Spec) -> None:
    small = shrink(spec)
    same_structure(spec, small)
    assert parameters(small) <= parameters(spec)
