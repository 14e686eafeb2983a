"""What a first token and a build wait for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kdgen.cli.process_age
from kdgen.cli.process_age import process_seconds

HEAVY = ("numba", "cuda", "torch", "transformers", "tokenizers", "safetensors", "rich", "matplotlib")
#: CPU seconds that building K2.6 for one architecture may take: 30 s on 2 cores.
BUILD_SECONDS = 60.0


def test_the_command_line_imports_nothing_heavy() -> None:
    """numba and cuda.core wait until a GPU is opened, the rest until it is used."""
    script = f"import sys, kdgen.cli, kdgen.cli.generate; print([name for name in {HEAVY!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert found.stdout.strip() == "[]"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_how_old_the_process_is() -> None:
    script = "import time; time.sleep(0.3); from kdgen.cli.process_age import process_seconds; print(process_seconds())"
    began = time.monotonic()
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert 0.28 <= float(told.stdout) <= time.monotonic() - began + 0.05


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_text(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(kdgen.cli.process_age.Path, "read_text", read_text)
    assert process_seconds() is None


def test_building_k26_takes_half_a_minute_at_most(tmp_path: Path) -> None:
    """Cold, in CPU seconds, for other work may run beside this."""
    before = os.times()
    command = [
        sys.executable,
        "-c",
        "from kdgen.cli import main; main()",
        "build",
        "k26",
        "--arch",
        "sm_90a",
        "--out",
        str(tmp_path),
        "--json",
    ]
    environment = {**os.environ, "KDGEN_CACHE_DIR": str(tmp_path / "cache")}
    built = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2])
    assert built.returncode == 0, built.stderr
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    assert json.loads(built.stdout)["schema"] == "kdgen.build/1"
    assert seconds < BUILD_SECONDS
