"""A rank of ``kdgen verify`` that fails ends the others within seconds, and the report has its own words."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kdgen.errors import KdgenError
from kdgen.spec.model import load_spec
from kdgen.verify.decoding.ranks import check_ranks

#: Seconds that two ranks may take to start, decode a little and end; an exchange that nobody ends would take 600.
MOST_SECONDS = 150.0

FAULTS = {
    "raises": ('raise BackendError("planted")', r"rank 1: .*planted"),
    "computes something else": ('return "planted, another result"', r"rank 1: prefill in any chunks: planted, another result"),
    "dies": ("os.kill(os.getpid(), signal.SIGKILL)", r"rank 1 of 2 was ended by SIGKILL"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_failing_rank_is_heard(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is planted in rank 1 alone, by a module that Python imports at its start."""
    statement, said = FAULTS[fault]
    planted = (
        "import os, signal\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import kdgen.verify.decoding.decodes as decodes\n"
        "    from kdgen.errors import BackendError\n"
        f"    def fault(*_):\n        {statement}\n"
        "    decodes._rechunked = fault\n"
    )
    (tmp_path / "sitecustomize.py").write_text(planted)
    paths = [str(tmp_path), str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    began = time.perf_counter()
    with pytest.raises(KdgenError, match=said):
        check_ranks(load_spec("tiny"), "f32", 2, situations=0, exchange="peer")
    assert time.perf_counter() - began < MOST_SECONDS


def test_ranks_are_of_this_package_whatever_lies_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kdgen").mkdir()
    (tmp_path / "kdgen" / "__init__.py").write_text("raise SystemExit('another kdgen')")
    monkeypatch.chdir(tmp_path)
    checks = check_ranks(load_spec("tiny"), "f32", 2, situations=0)
    assert checks and all(check.status == "ok" for check in checks)
