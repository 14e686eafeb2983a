"""ruff and mypy, as tests: what they say is the failure's message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def check(*command: str) -> None:
    result = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}{result.stderr}"


def test_ruff() -> None:
    check("ruff", "check", ".")


def test_mypy() -> None:
    check("mypy")
