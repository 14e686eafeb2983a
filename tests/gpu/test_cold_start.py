"""From the start of the process to the first token, kernels compiled before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kdgen.backends.base import Backend

pytestmark = pytest.mark.gpu

SECONDS = 3.0


def generated(*options: str) -> dict[str, Any]:
    command = [sys.executable, "-c", "from kdgen.cli import main; main()", "generate", "--model", "tiny-dflash", "--random-weights"]
    command += ["--prompt-ids", "5,17,9", "--max-new-tokens", "16", "--ignore-eos", "--json", *options]
    result = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), cwd=Path(__file__).parents[2])
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("draft", ["none", "dflash"])
def test_the_first_token_comes_within_three_seconds(cuda_backend: Backend, draft: str) -> None:
    generated("--draft", draft)
    runs = [generated("--draft", draft)["timings"] for _ in range(3)]
    for timings in runs:
        print({name: None if seconds is None else round(seconds, 2) for name, seconds in timings.items()})
    assert min(timings["first_token"] for timings in runs) < SECONDS
