"""``kdgen bench`` on a GPU that is none: what it runs, counts, prints and draws. Its times are made up."""

from __future__ import annotations

import ctypes
import json
import xml.etree.ElementTree
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

import pytest
from click.testing import CliRunner, Result

import kdgen.bench.parts
import kdgen.bench.ranks
import kdgen.bench.run
import kdgen.bench.timing
import kdgen.cli.bench
from kdgen.backends.base import AllGather, Backend, DeviceArray, Mailbox, Replay, Work
from kdgen.backends.cpu import CpuBackend
from kdgen.backends.cuda import CudaBackend
from kdgen.backends.gpu import Gpu
from kdgen.bench.parts import distinct_experts
from kdgen.bench.peers import open_torch
from kdgen.bench.plot import plot
from kdgen.bench.run import BenchReport, KernelTime, StepTime
from kdgen.bench.timing import Contender, median, medians
from kdgen.cli import main
from kdgen.codegen.compile import compile_all
from kdgen.codegen.source import Source
from kdgen.errors import BackendError, KdgenError
from kdgen.files.resources import templates_dir
from kdgen.plan.shard import WHOLE, Shard
from kdgen.ranks.place import Place
from kdgen.spec.model import load_spec

SECONDS = 1e-3


class FakeGpu(CpuBackend, CudaBackend):
    """The emulator under a GPU's name; every stopwatch shows a millisecond for each launch recorded or made.

    While one runs, a recording that has been replayed before is only counted.
    """

    name = "cuda"
    rounds_ahead = 0

    def __init__(self) -> None:
        CpuBackend.__init__(self)
        self.gpu = Gpu("fake", (9, 0), 2, 228 << 10, 2**33, (13, 0))
        self.description = "fake GPU"
        self._count = 0
        self._timing = False

    def launch(self, *args: Any) -> None:
        self._count += 1
        super().launch(*args)

    def record(self, work: Sequence[Work]) -> Replay:
        replay, launches, replayed = Backend.record(self, work), sum(not isinstance(each, AllGather) for each in work), False

        def replay_or_count() -> None:
            nonlocal replayed
            if replayed and self._timing:
                self._count += launches
            else:
                replay()
            replayed = True

        return replay_or_count

    def recorded_context(self, context: int) -> int:
        return context

    def mailbox(self, arrays: Sequence[DeviceArray]) -> Mailbox:
        return Backend.mailbox(self, arrays)

    def timer(self) -> Callable[[], float]:
        began, self._timing = self._count, True

        def stop() -> float:
            self._timing = False
            return (self._count - began) * SECONDS

        return stop


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, cache_directory: Path) -> FakeGpu:
    gpu = FakeGpu()
    monkeypatch.setattr(kdgen.cli.bench, "open_shard", lambda group, name, exchange: (gpu, WHOLE))
    monkeypatch.setattr(kdgen.cli.bench, "cuda_unusable", lambda: None)
    monkeypatch.setattr(kdgen.bench.run, "READ_MEGABYTES", 1)
    monkeypatch.setattr(kdgen.bench.parts, "MATRIX_ROUNDS", 1)
    monkeypatch.setattr(kdgen.bench.timing, "REPLAYS", 1)
    return gpu


def bench(*options: str) -> Result:
    return CliRunner().invoke(main, ["bench", "tiny-dflash", "--dtype", "bf16", "--context", "20", *options])


def test_everything_at_once(gpu: FakeGpu, tmp_path: Path) -> None:
    picture = tmp_path / "roof.svg"
    options = ["--nodes", "1,8", "--draft", "--prefill", "100", "--chunk", "40", "--peers", "--plot", str(picture)]
    result = bench(*options, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["schema"] == "kdgen.bench/3" and report["backend"] == "fake GPU"
    assert [(s["program"], s["rows"]) for s in report["steps"]] == [("decode", 1), ("verify", 8), ("draft", 8)]
    # two kernels each, eight times over, a millisecond a launch
    assert [(p["part"], p["rows"], p["microseconds"]) for p in report["parts"]] == [
        ("tree", 8, pytest.approx(2000)), ("accept", 8, pytest.approx(2000)), ("draft context", 8, pytest.approx(1000)),
    ]  # fmt: skip
    assert [r["budget"] for r in report["rounds"]] == [0, 7, 15, 31, 63]
    steps = {s["rows"]: s["microseconds"] for s in report["steps"] if s["program"] != "draft"}
    assert report["rounds"][0]["microseconds"] == pytest.approx(steps[1])
    assert report["rounds"][1]["microseconds"] == pytest.approx(steps[8] + report["steps"][2]["microseconds"])
    assert [(e["rows"], e["experts"], e["microseconds"]) for e in report["experts"]] == [
        (1, 2, pytest.approx(2000)),
        (8, 7, pytest.approx(2000)),
    ]
    assert all(e["floor_microseconds"] > 0 and e["peers"] == [] for e in report["experts"])
    assert (report["prefill"]["tokens"], report["prefill"]["chunk"]) == (100, 40) and report["prefill"]["matrix_share"] > 0
    launches = report["prefill"]["seconds"] / SECONDS
    assert (
        report["prefill"]["tokens_per_second"] == pytest.approx(100 / report["prefill"]["seconds"]) and launches == round(launches) > 3 * 20
    )
    assert report["peers"] == [] and report["peer"].startswith("torch ")  # there is no GPU for it
    names = {kernel["kernel"] for step in report["steps"] for kernel in step["kernels"]}
    drawn = xml.etree.ElementTree.parse(picture).getroot()
    texts = [element.text or "" for element in drawn.iter() if element.tag.endswith("text")]
    assert any("decode, 1 rows, context 20" in text for text in texts) and names.intersection(texts)

    said = bench(*options).stdout
    for part in ("parts of a step", "rounds, from draft", "experts of a layer", "no peer: torch", "prefill: 100 tokens in chunks of 40"):
        assert part in said


def test_ranks_beside_one_gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs itself, here without processes: alone it takes twice the time, and NCCL is missing."""
    alone = json.loads(bench("--nodes", "1,4", "--json").stdout)
    jobs: list[tuple[list[str], int]] = []

    def run(command: Sequence[str], ranks: int, _: object, output: IO[bytes], errors: IO[bytes]) -> int:
        jobs.append((list(command[4:]), ranks))
        if "gather" in command:
            errors.write(b"kdgen: error: pip install 'kdgen[multi]'\n")
            return 2
        report = json.loads(json.dumps(alone))
        for step in report["steps"] if ranks > 1 else ():
            step["microseconds"] /= 2
            step["kernels"].append(
                {
                    "kernel": "rank_sum",
                    "rows": step["rows"],
                    "launches": 5,
                    "microseconds": 3.0,
                    "floor_microseconds": 0.1,
                    "group": "sums over ranks",
                }
            )
        output.write(json.dumps(report).encode())
        return 0

    monkeypatch.setattr(kdgen.bench.ranks, "run_ranks", run)
    result = bench("--nodes", "1,4", "--tp", "2", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    timed = ["bench", "tiny-dflash", "--context", "20", "--nodes", "1,4", "--seed", "0", "--dtype", "bf16"]
    assert jobs == [([*timed, "--json"], 1), ([*timed, "--exchange", "gather", "--json"], 2), ([*timed, "--exchange", "peer", "--json"], 2)]
    assert report["schema"] == "kdgen.bench-ranks/1" and list(report["runs"]) == ["peer"]
    assert report["missing"] == {"gather": "2 ranks: pip install 'kdgen[multi]'"}
    assert [(s["exchange"], s["rows"], s["speedup"], s["collectives_microseconds"]) for s in report["steps"]] == [
        ("peer", 1, 2.0, 15.0), ("peer", 4, 2.0, 15.0),
    ]  # fmt: skip
    assert [(c["collective"], c["rows"], c["in_step"], c["microseconds"]) for c in report["collectives"]] == [
        ("rank_sum", 1, 5, 3.0), ("rank_sum", 4, 5, 3.0),
    ]  # fmt: skip
    said = bench("--nodes", "1,4", "--tp", "2").stdout
    for part in ("on 2 ranks and on one, fake GPU", "peer memory", "2.00", "rank_sum", "nothing by NCCL: 2 ranks: pip install"):
        assert part in said
    failed = bench("--tp", "2", "--exchange", "gather")
    assert failed.exit_code == 2 and "2 ranks: pip install" in failed.output


def test_a_rank_times_its_part(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers stand among the kernels."""
    monkeypatch.setattr(kdgen.cli.bench, "open_shard", lambda group, name, exchange: (gpu, Shard(2, 0, "gather")))

    def twice(self: FakeGpu, work: AllGather) -> None:
        """The other rank has what this one has, so that all that is gathered are numbers."""
        source, target = (pointer.array.address + pointer.offset for pointer in (work.source, work.target))
        for rank in range(2):
            ctypes.memmove(target + rank * work.nbytes, source, work.nbytes)

    monkeypatch.setattr(FakeGpu, "gather", twice)
    result = bench("--nodes", "1", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    kernels = {kernel["kernel"]: kernel for kernel in report["steps"][0]["kernels"]}
    layers = load_spec("tiny-dflash").num_hidden_layers
    assert kernels["gather_attention"]["launches"] == layers and kernels["gather_mlp"]["launches"] == layers + 1
    assert kernels["gather_choice"]["launches"] == 1 and kernels["rank_sum"]["launches"] == 2 * layers + 1


@pytest.mark.parametrize(
    ("options", "rows"),
    [(["tiny", "--nodes", "1,8"], 8), (["tiny", "--nodes", "2"], 2), (["tiny-dflash", "--nodes", "1", "--draft", "--dtype", "bf16"], 8)],
)
def test_a_context_that_every_model_has(gpu: FakeGpu, options: list[str], rows: int) -> None:
    """All that leaves room for a tree of the most rows, or for a block of the drafter."""
    result = CliRunner().invoke(main, ["bench", *options, "--no-kernels", "--json"])
    assert result.exit_code == 0, result.output
    assert {step["context"] for step in json.loads(result.stdout)["steps"]} == {1024 - rows}


def test_experts_as_many_as_asked_for(gpu: FakeGpu) -> None:
    result = bench("--nodes", "1,4", "--experts", "2,3", "--no-kernels", "--json")
    assert result.exit_code == 0, result.output
    assert [(e["rows"], e["experts"]) for e in json.loads(result.stdout)["experts"]] == [(1, 2), (4, 3)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--experts", "2"], "--experts takes a number for each of --nodes: 2, not 1"),
        (["--nodes", "2", "--experts", "7"], "--experts: 2 tokens with 2 experts each hit 2 to 4, not 7"),
        (["--plot", "roof.pdf"], "--plot draws SVG"),
        (["--plot", "roof.svg", "--no-kernels"], "leave out --no-kernels"),
        (["--nodes", "65"], "--nodes takes numbers from 1 to 64"),
        (["--context", "1020", "--nodes", "8"], "tiny-dflash has 1024 positions: choose a smaller --context, --prefill or --nodes"),
        (["--nodes", "some"], "is not a list of numbers"),
        (["--exchange", "peer"], "--exchange needs several ranks: add --tp"),
        (["--tp", "2", "--peers"], "several ranks time steps and the kernels in them: leave out --experts, --prefill, --peers"),
        (["--tp", "3"], "3 ranks cannot share it"),
    ],
)
def test_what_is_refused(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str) -> None:
    monkeypatch.setattr(kdgen.cli.bench, "measure", lambda *given: pytest.fail("measured first"))
    result = bench(*options)
    assert result.exit_code == 2 and said in " ".join(result.output.replace("│", " ").split())


def test_experts_that_a_model_has_none_of(gpu: FakeGpu, tmp_path: Path) -> None:
    dense = tmp_path / "dense.yaml"
    dense.write_text(load_spec("tiny").model_copy(update={"name": "dense", "first_k_dense_replace": 4}).model_dump_json())
    result = CliRunner().invoke(main, ["bench", str(dense), "--nodes", "2", "--experts", "3"])
    assert result.exit_code == 2 and "dense has no experts: leave out --experts" in result.stderr


def test_figures_outlive_a_picture_that_cannot_be_written(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(path: Path, text: str) -> None:
        raise KdgenError(f"{path}: cannot be written: No space left on device")

    monkeypatch.setattr(kdgen.cli.bench, "write_whole", full)
    result = bench("--nodes", "1", "--plot", str(tmp_path / "roof.svg"), "--json")
    assert result.exit_code == 2 and "roof.svg: cannot be written" in result.stderr
    assert json.loads(result.stdout)["steps"]


def test_no_room_is_made_for_a_chunk_beyond_the_prompt(gpu: FakeGpu) -> None:
    report = json.loads(bench("--nodes", "1", "--no-kernels", "--prefill", "70", "--chunk", str(10**12), "--json").stdout)
    assert (report["prefill"]["tokens"], report["prefill"]["chunk"]) == (70, 70)


def test_a_cpu_is_no_gpu(monkeypatch: pytest.MonkeyPatch, cpu_backend: Backend) -> None:
    monkeypatch.setattr(kdgen.cli.bench, "cuda_unusable", lambda: "none today")
    for more in ((), ("--tp", "2")):  # before weights are made up, and not by naming a backend that cannot be chosen
        result = bench(*more)
        assert result.exit_code == 2
        assert result.stderr.startswith("kdgen: error: a benchmark needs a GPU, and none can be used: none today; `kdgen plan` shows")
    with monkeypatch.context() as rank:  # which has to choose its GPU before anything asks for one
        rank.setattr(kdgen.cli.bench, "place_in", lambda environment: Place(0, 1, 0, "", 0))
        rank.setattr(kdgen.cli.bench, "joined", lambda place: nullcontext(None))
        rank.setattr(kdgen.cli.bench, "open_shard", lambda group, name, exchange: (cpu_backend, WHOLE))
        assert "none today" not in bench().output

        def no_gpu(group: object, name: str, exchange: object) -> None:
            raise BackendError("no GPU can be used: the CPU backend runs the same kernels without one")

        rank.setattr(kdgen.cli.bench, "open_shard", no_gpu)
        assert bench().stderr.startswith("kdgen: error: a benchmark needs a GPU, and none can be used: none today; `kdgen plan` shows")
    monkeypatch.setattr(kdgen.cli.bench, "cuda_unusable", lambda: None)
    monkeypatch.setattr(kdgen.cli.bench, "open_shard", lambda group, name, exchange: (cpu_backend, WHOLE))
    result = bench()
    assert result.exit_code == 2 and "a benchmark needs a GPU: the CPU backend emulates one thread by thread" in result.output


@pytest.mark.parametrize(("kernel", "block"), [("read_bandwidth", 512), ("matrix_rate", 256)])
def test_what_measures_the_gpu_compiles_without_spilling(kernel: str, block: int, cache_directory: Path) -> None:
    source = Source(kernel, (templates_dir() / "bench" / f"{kernel}.cu").read_text(), block, 0)
    (cubin,) = compile_all([(source, "sm_90a")], templates_dir() / "lib" / "gpu")
    assert cubin.spill_stores == cubin.spill_loads == 0


def test_random_tokens_hit_so_many_experts() -> None:
    assert [distinct_experts(384, 8, rows) for rows in (1, 8, 16)] == [8, 60, 110]
    assert distinct_experts(8, 2, 64) == 8


def test_two_contenders_take_turns(gpu: FakeGpu) -> None:
    turns: list[str] = []

    def timer(name: str, seconds: float) -> Callable[[], Callable[[], float]]:
        return lambda: lambda: turns.append(name) or seconds  # type: ignore[func-returns-value]

    gpu.timer = timer("ours", 2.0)  # type: ignore[method-assign]
    other = Contender(lambda: None, timer("theirs", 12.0), repeats=4)
    assert medians(gpu, [], [other]) == [2.0, 3.0]
    assert turns == ["ours", "theirs"] * 3  # two warm up
    assert median(gpu, [], lambda: turns.append("before")) == 2.0
    assert turns[6:] == ["before", "ours"] * 3


def test_the_roof() -> None:
    """A kernel at half the roof has half its bar; what takes next to nothing is not drawn."""
    kernels = (KernelTime("a<b", 1, 2, 100.0, 50.0), KernelTime("roof", 1, 1, 10.0, 10.0), KernelTime("tiny", 1, 1, 0.1, 0.1))
    step = StepTime("decode", 1, 4096, 210.0, 110.0, 0, kernels)
    drawn = xml.etree.ElementTree.fromstring(plot(BenchReport("spec & co", "bf16", 4, "GPU", 4e12, (step,))))
    bars = [float(e.get("width", "")) for e in drawn.iter() if e.tag.endswith("rect") and e.get("fill") != "white"]
    texts = [e.text or "" for e in drawn.iter() if e.tag.endswith("text")]
    assert len(bars) == 2 and bars[0] == pytest.approx(bars[1] / 2, abs=0.1)
    assert "a<b" in texts and "tiny" not in texts and "2.00 TB/s, 50 %, 200 µs" in texts and "4.00 TB/s read" in texts


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert open_torch() == "torch is not installed (pip install torch)"
