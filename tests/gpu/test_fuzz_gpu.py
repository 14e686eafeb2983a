"""Random models in random situations on the GPU: ``KDGEN_FUZZ_MODELS=500 pytest tests/gpu/test_fuzz_gpu.py -s`` for the long run.

Kernels compile in as many processes as there are cores, each with a context of its own on the one GPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from kdgen.verify.fuzz import fuzz

pytestmark = pytest.mark.gpu

MODELS = int(os.environ.get("KDGEN_FUZZ_MODELS", "12"))
SEED = int(os.environ.get("KDGEN_FUZZ_SEED", "0"))


def test_random_models_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where failing models' specs go
    report = fuzz(MODELS, SEED, "cuda")
    print(json.dumps(dataclasses.asdict(report), indent=2))
    assert report.models == MODELS
    assert report.ok, "\n".join(f"{failure.problem}\n{Path(failure.spec_file).read_text()}" for failure in report.failures)
