"""Ranks on GPUs: exactness of tensor parallelism, and its times.

On a host with two GPUs::

    pytest -m gpu tests/gpu/test_multi_gpu.py -s            # about three minutes; prints the times
    KDGEN_LAYERS=14 pytest -m gpu tests/gpu/test_multi_gpu.py -s -k times      # more of Kimi K2.6: 8.5 GB a layer

With one GPU, two ranks share it and only the kernels that send words through memory are tested; NCCL refuses that. The times alone,
as JSON, of any model that ``kdgen generate --random-weights`` takes, with 2 ranks and by NCCL::

    python tests/gpu/test_multi_gpu.py k26 5 2 gather
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kdgen.bench import measure
from kdgen.launch import run_ranks
from kdgen.model import open_engine, random_model
from kdgen.oracles import model_cases
from kdgen.plan.ir import Compute
from kdgen.plan.shard import Exchange
from kdgen.ranks import joined, place_in
from kdgen.spec import load_spec
from kdgen.verify.ranks import check_ranks

pytestmark = pytest.mark.gpu
CONTEXT = 4096
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
@pytest.mark.parametrize(("name", "compute"), [("tiny", "f32"), ("tiny", "bf16"), ("tiny-dflash", "bf16")])
def test_two_gpus_are_exact(two_gpus: None, name: str, compute: Compute, exchange: Exchange) -> None:
    """Bits of plain decoding, draft trees, prefills in any chunks, batches and samplings; float32 chooses the oracle's tokens."""
    assert_exact(name, compute, exchange)


@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_two_ranks_on_one_gpu_are_exact(compute: Compute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    assert_exact("tiny", compute, "peer")


def assert_exact(name: str, compute: Compute, exchange: Exchange) -> None:
    case = name if any(each.name == name for each in model_cases()) else ""
    checks = check_ranks(load_spec(name), compute, 2, case, backend="cuda", exchange=exchange)
    assert len(checks) >= 6
    assert [f"{check.name}: {check.why}" for check in checks if check.status != "ok"] == []


def test_kimis_width_on_two_gpus_is_exact(two_gpus: None) -> None:
    """`kdgen generate --tp 2`, as a user starts it: trees against plain decoding, tokens and cache bits."""
    options = "--random-weights --prompt-ids 5,17,9,1000,2000,3000 --max-new-tokens 24 --draft replay --error-rate 0.1 --budget 7"
    command = f"generate --model k26 --layers {LAYERS} {options} --check-exact --ignore-eos --json --tp 2".split()
    run = subprocess.run(
        [sys.executable, "-c", "from kdgen.cli import main; main()", *command], capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    print(f"\nk26, {LAYERS} layers, 2 ranks: {report['timings']}, {len(report['acceptance_lengths'])} verify steps")
    assert report["exact"] is True


# ---- times --------------------------------------------------------------------------------------------------------------


def times(model: str, layers: int, ranks: int, exchange: Exchange) -> dict[str, Any]:
    """``kdgen bench`` of every rank at once; rank 0's report."""
    command = [sys.executable, __file__, model, str(layers), str(ranks), exchange, "rank"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        code = run_ranks(command, ranks, environment, output=output, errors=errors)
        errors.seek(0)
        assert code == 0, errors.read().decode()
        output.seek(0)
        found: dict[str, Any] = json.loads(output.read())
    return found


def of_rank(model: str, layers: int, exchange: Exchange) -> None:
    with joined(place_in(os.environ)) as group:
        engine = open_engine(random_model(model, layers), CONTEXT + 1024, backend="cuda", group=group, exchange=exchange).engine
        report = measure(engine, [CONTEXT], [1, 8], lambda _: None)
        if group is None or group.rank == 0:
            sys.stdout.write(json.dumps(dataclasses.asdict(report)))


def test_times_of_two_gpus(two_gpus: None) -> None:
    runs = {
        "1 rank": times("k26", LAYERS, 1, "gather"),
        "2 ranks, peer memory": times("k26", LAYERS, 2, "peer"),
        "2 ranks, NCCL": times("k26", LAYERS, 2, "gather"),
    }
    alone = runs["1 rank"]["steps"]
    print(f"\nk26, {LAYERS} layers, context {CONTEXT}, {runs['1 rank']['backend']}")
    for name, report in runs.items():
        for step, one in zip(report["steps"], alone, strict=True):
            floor = step["floor_microseconds"]
            print(
                f"{name:22} {step['rows']} rows: {step['microseconds']:8.0f} µs, floor {floor:6.0f} ({step['microseconds'] / floor:.2f}),"
                f" {one['microseconds'] / step['microseconds']:.2f} times as fast as one"
            )
            for kernel in step["kernels"]:
                if kernel["kernel"] in ("rank_sum", "gather_choice", "rank_choice"):
                    print(f"{'':22}   {kernel['kernel']}: {kernel['microseconds']:.2f} µs, {kernel['launches']} in a step")
        for gather, microseconds in report["gathers"].items():
            print(f"{'':22}   {gather}: {microseconds:.2f} µs")
    fastest = min(runs[name]["steps"][0]["microseconds"] for name in ("2 ranks, peer memory", "2 ranks, NCCL"))
    assert fastest < alone[0]["microseconds"]


if __name__ == "__main__":
    chosen: Exchange = "peer" if sys.argv[4] == "peer" else "gather"
    if sys.argv[5:] == ["rank"]:
        of_rank(sys.argv[1], int(sys.argv[2]), chosen)
    else:
        print(json.dumps(times(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), chosen), indent=2))
