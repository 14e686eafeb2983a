"""The programs in examples/ run, and print what their texts promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
#: What an example prints, among other things.
PRINTS = {
    "generate.py": [" == 0:\n        return"],
    "draft_trees.py": ["plain: 39 forwards", "same tokens: True; same bits: True"],
    "own_drafter.py": ["same tokens: True"],
    "batch.py": ["request 0, 15 forwards", "request 1, ", "request 2, 15 forwards"],
    "generated_text.py": ["kernels for k26; weights 553.4 GiB", "constexpr int TOP_K = 8;"],
}


def test_every_example_is_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PRINTS)
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"({name})" in page for name in PRINTS)


@pytest.mark.parametrize("name", PRINTS)
def test_example(name: str, cache_directory: Path) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": ""}  # the same machine code for everybody: what they print is the CPU's
    env = {**os.environ, "PYTHONPATH": str(ROOT), "KDGEN_CACHE_DIR": str(cache_directory), **hidden}
    done = subprocess.run([sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, env=env, cwd=EXAMPLES)
    assert done.returncode == 0, done.stderr
    missing = [words for words in PRINTS[name] if words not in done.stdout]
    assert not missing, f"{missing} not in:\n{done.stdout}"
