"""Text and draft trees on the GPU: the model that comes with kdgen."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from kdgen.backends.base import Backend
from kdgen.cli import main
from kdgen.files.resources import demo_dir

pytestmark = pytest.mark.gpu


def report(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, [*arguments, "--backend", "cuda", "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("budget", [7, 63])
def test_the_demo(cuda_backend: Backend, dtype: str, budget: int) -> None:
    found = report("demo", "--dtype", dtype, "--budget", str(budget), "--tree")
    assert found["same_tokens"] and found["same_cache_bits"] and found["tree"]
    assert found["ways"][0]["tokens_per_forward"] > 1.5


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_text(cuda_backend: Backend, temperature: str) -> None:
    folder = demo_dir()
    options = ("--model", str(folder / "model-int4"), "--prompt", "import os\n", "--temperature", temperature, "--max-new-tokens", "200")
    plain = report("generate", *options)
    drafted = report("generate", *options, "--draft", str(folder / "drafter"), "--check-exact")
    assert drafted["text"] == plain["text"] and drafted["exact"] is True
