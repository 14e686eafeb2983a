"""Wrong edits of kdgen, each a plausible bug, are caught by ``kdgen verify``: a few of the list that ``python -m tests.mutants`` runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kdgen.codegen.render import parts_of
from tests.mutants import __main__ as command
from tests.mutants.mutants import MUTANTS, QUICK, Mutant
from tests.mutants.run import ROOT, Result, _python, _result, run


def test_every_mutant_edits_one_place() -> None:
    assert len(MUTANTS) >= 60
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []
    texts = {mutant.file: (ROOT / mutant.file).read_text(encoding="utf-8") for mutant in MUTANTS}
    gone = [f"{m.name}: {texts[m.file].count(m.right)} times" for m in MUTANTS if texts[m.file].count(m.right) != 1]
    assert not gone, "the text has changed: write these mutants anew"


def test_every_template_has_a_mutant() -> None:
    templates = {path.name for path in (ROOT / "templates" / "kernels").iterdir()}
    edited = {mutant.file.rpartition("/")[2] for mutant in MUTANTS if mutant.file.startswith("templates/") and "/gpu/" not in mutant.file}
    assert templates <= edited <= templates | {part for name in templates for part in parts_of(name)}


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.name in QUICK], ids=lambda m: m.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    result = run(mutant)
    assert result.caught
    assert result.part == mutant.part, f"caught by {result.part}, {result.check}: {result.why}"
    kernel = mutant.file.rpartition("/")[2].partition(".")[0].removesuffix("_mma").removesuffix("_f32")
    if mutant.part in ("kernel", "checker") and "/kernels/" in mutant.file:  # which name the kernel that was edited
        assert kernel in result.check + result.why or kernel in ("linear", "rmsnorm"), result


def test_what_computes_for_ever_is_ended(tmp_path: Path) -> None:
    """Soon: its processor time is counted, so that a busy machine makes no hang of a process that waits for its turn."""
    done = _python(tmp_path, "-c", "while True: pass", cpu_seconds=1)
    assert _result(MUTANTS[0], done, None, True).part == "hang"
    done = _python(tmp_path, "-c", "import time; time.sleep(1.5); raise SystemExit(2)", cpu_seconds=1)
    assert _result(MUTANTS[0], done, None, True).part == "refused"


def test_the_table_is_written_where_git_ignores_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caught, missed = MUTANTS[:2]
    monkeypatch.setattr(command, "MUTANTS", (caught, missed))
    monkeypatch.setattr(command, "times_of_checks", lambda: {"kernel: tiny f32, advance": 3.0})
    monkeypatch.setattr(command, "run", lambda m, _: Result(m, m is caught, "kernel" if m is caught else "", "tiny f32, advance", "", True))
    assert f"/{command.PAGE.relative_to(ROOT).as_posix()}" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    monkeypatch.setattr(command, "PAGE", tmp_path / "mutants.md")
    assert command.main(["--write"]) == 1  # one survived
    page = (tmp_path / "mutants.md").read_text(encoding="utf-8")
    assert f"| {caught.name} | kernel: tiny f32, advance | 3 |" in page and f"| {missed.name} | **survived** |  |" in page
    assert page.startswith("# Mutants\n\n1 of 2 caught (kernel 1). Survived: ")
