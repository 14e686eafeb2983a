"""Ranks on GPUs: exactness of tensor parallelism, and its times.

On a host with two GPUs::

    pytest -m gpu tests/gpu/test_multi_gpu.py -s            # about three minutes; prints the times
    KDGEN_LAYERS=14 pytest -m gpu tests/gpu/test_multi_gpu.py -s -k times      # more of Kimi K2.6: 8.5 GB a layer

With one GPU, two ranks share it and only the kernels that send words through memory are tested; NCCL refuses that. The times alone, of
any model: ``kdgen bench MODEL --tp 2``.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys

import pytest

from kdgen.plan.ir import Compute
from kdgen.plan.shard import Exchange
from kdgen.spec.model import load_spec
from kdgen.verify.decoding.ranks import check_ranks
from kdgen.verify.oracles.models import model_cases
from kdgen.verify.variants import variants

pytestmark = pytest.mark.gpu
LAYERS = int(os.environ.get("KDGEN_LAYERS", "6"))


def gpus() -> int:
    driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    return count.value if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


@pytest.fixture
def two_gpus() -> None:
    if gpus() < 2:
        pytest.skip(f"{gpus()} GPU; this needs two")


# ---- exactness ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", ["peer", "gather"])
@pytest.mark.parametrize(("name", "compute"), [("tiny", "f32"), ("tiny", "bf16"), ("tiny-dflash", "bf16"), ("tiny-wgmma", "bf16")])
def test_two_gpus_are_exact(two_gpus: None, name: str, compute: Compute, exchange: Exchange) -> None:
    """Bits of plain decoding, draft trees, prefills in any chunks, batches and samplings; float32 chooses the oracle's tokens."""
    assert_exact(name, compute, exchange)


@pytest.mark.parametrize(("name", "compute"), [("tiny", "f32"), ("tiny", "bf16"), ("tiny-wgmma", "bf16")])
def test_two_ranks_on_one_gpu_are_exact(name: str, compute: Compute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    assert_exact(name, compute, "peer")


def assert_exact(name: str, compute: Compute, exchange: Exchange) -> None:
    case = name if any(each.name == name for each in model_cases()) else 0
    spec = next((spec for spec in variants() if spec.name == name), None) or load_spec(name)
    checks = check_ranks(spec, compute, 2, case, backend="cuda", exchange=exchange)
    assert len(checks) >= 6
    assert [f"{check.name}: {check.why}" for check in checks if check.status != "ok"] == []


@pytest.mark.parametrize("exchange", ["peer", "gather"])
def test_kimis_width_on_two_gpus_is_exact(two_gpus: None, exchange: str) -> None:
    """`kdgen generate --tp 2`, as a user starts it: trees against plain decoding, tokens and cache bits."""
    options = "--random-weights --prompt-ids 5,17,9,1000,2000,3000 --max-new-tokens 24 --draft ngram --budget 7"
    command = f"generate --model k26 --layers {LAYERS} {options} --check-exact --ignore-eos --json --tp 2 --exchange {exchange}"
    report = json.loads(kdgen(*command.split()))
    print(f"\nk26, {LAYERS} layers, 2 ranks, {exchange}: {report['timings']}, {len(report['acceptance_lengths'])} verify steps")
    assert report["exact"] is True


# ---- times --------------------------------------------------------------------------------------------------------------


def test_times_of_two_gpus(two_gpus: None) -> None:
    """Steps of two ranks beside one GPU's, and each collective, in one run."""
    report = json.loads(kdgen("bench", "k26", "--layers", str(LAYERS), "--tp", "2", "--nodes", "1,8", "--json"))
    for step in report["steps"]:
        print({name: round(value, 2) if isinstance(value, float) else value for name, value in step.items()})
    for collective in report["collectives"]:
        print(collective)
    assert report["missing"] == {}
    assert max(step["speedup"] for step in report["steps"] if step["rows"] == 1) > 1


def kdgen(*arguments: str) -> str:
    """What a command prints, run as a user runs it."""
    run = subprocess.run(
        [sys.executable, "-c", "from kdgen.cli import main; main()", *arguments], capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stderr
    return run.stdout
