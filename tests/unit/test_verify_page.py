"""``kdgen verify --report`` and ``--fail-fast``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import kdgen.verify.run
import kdgen.verify.tasks
from kdgen.cli import main
from kdgen.verify.report.checks import Check, make_report
from kdgen.verify.report.page import render_page
from kdgen.verify.tasks import Task

CHECKS = (
    Check("tiny", "f32", "kernel", "embed", "CPU", "ok", 1e-7, 2e-7, "embed.cu.j2", seconds=0.5),
    Check("tiny", "f32", "kernel", "argmax", "CPU", "failed", why="row 3 of <argmax> & more"),
    Check("tiny2", "bf16", "trees", "tree_build", "CPU", "skipped", why="no cases"),
    Check("tiny", "f32", "kernel", "lm_head", "CPU", "failed", 9.0, 2.0, bits=2**24),
)


def test_the_page_shows_everything_and_needs_nothing() -> None:
    page = render_page(make_report(CHECKS, ["a note"], 12.0))
    verdict = "2 of 3 checks failed"
    for expected in (verdict, "row 3 of &lt;argmax&gt; &amp; more", "no cases", "a note", "2 MiB", "<circle", "lm_head", "450 %"):
        assert expected in page, expected
    assert not re.search(r"(?:src|href)=|<script|https?:", page)
    assert "all 1 checks passed" in render_page(make_report(CHECKS[:1], [], 1.0))


def test_the_page_is_written_and_places_that_are_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kdgen.verify.run, "verify", lambda *_: make_report(CHECKS[:1], [], 1.0))
    assert CliRunner().invoke(main, ["verify", "--report", str(tmp_path / "out.html")]).exit_code == 0
    assert "</html>" in (tmp_path / "out.html").read_text()
    assert CliRunner().invoke(main, ["verify", "--report", str(tmp_path / "nowhere" / "out.html")]).exit_code == 2


def test_fail_fast_ends_with_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kdgen.verify.tasks, "tasks", lambda *_: [Task("part", lambda _: iter(CHECKS))])
    assert kdgen.verify.run.verify(["tiny"], "cpu", fail_fast=True, jobs=1).checks == CHECKS[:2]
    assert kdgen.verify.run.verify(["tiny"], "cpu", jobs=1).checks == CHECKS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["tiny", "--report", "/no/such/folder/page.html"],
            "page.html: cannot be written: there is no folder /no/such/folder",
        ),
        (["--fuzz", "1", "--save", "/no/such/folder/x.yaml"], "/no/such/folder/x.yaml: cannot be written"),
        (["tiny", "--save", "x.yaml"], "--save and --seed need --fuzz"),
        (["tiny", "--seed", "0"], "--save and --seed need --fuzz"),
    ],
)
def test_what_would_be_in_vain_is_refused_first(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["verify", *arguments], prog_name="kdgen")
    assert (result.exit_code, result.stdout) == (2, "") and said in result.stderr
