"""Time a model's kernels and steps on a GPU, and compare the times with the physical floor.

The floor of a kernel is the number of bytes that it must move, divided by the read bandwidth measured in the same run. Launches go through
all layers in turn, so that weights are read from memory and not from a cache. Times are medians over replays of recorded graphs.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kdgen.backends.base import AllGather, Argument, Launch, Pointer, Work
from kdgen.backends.cuda import CudaBackend
from kdgen.bench.humming import Humming, open_humming
from kdgen.bench.parts import (
    ExpertsTime,
    PartTime,
    PeerTime,
    PrefillTime,
    RoundTime,
    attention_and_combine,
    experts_time,
    matrix_rate,
    part_times,
    peer_times,
    prefill_time,
    round_times,
    run_step,
    wanted_experts,
)  # fmt: skip
from kdgen.bench.peers import Torch, open_torch
from kdgen.bench.timing import median
from kdgen.codegen.source import Source
from kdgen.drafters.base import DeviceDraftRequest
from kdgen.errors import KdgenError
from kdgen.files.resources import templates_dir
from kdgen.plan.floors import draft_bytes, workload
from kdgen.plan.ir import MAX_NODES, PAGE_SLOTS, Group, Plan
from kdgen.runtime.engine import Engine
from kdgen.spec.drafter import DraftSpec

NO_GPU = "a benchmark needs a GPU: the CPU backend emulates one thread by thread, and its times do not compare kernels"
READ_MEGABYTES = 4096
#: Replays of a step that are started one after another, as in decoding. The hosts of ranks start at different times and wait for each
#: other in the first collective, and that wait would be counted in every step if each were started alone.
STEPS_IN_A_ROW = 8
#: In a recording of one kernel: enough to hide the start of a graph, and not too long for kernels that a step launches once.
LAUNCHES_A_RECORD = 24


@dataclass(frozen=True)
class KernelTime:
    """One kernel in steps of ``rows`` token rows: microseconds for each launch, and the floor of its bytes. Also a collective without a
    kernel, which has no floor.
    """

    kernel: str
    rows: int
    launches: int  #: in one step
    microseconds: float
    floor_microseconds: float
    group: Group = "norms and rows"


@dataclass(frozen=True)
class StepTime:
    """A whole step. Its floor counts the weights and cache rows that it must read. ``experts`` is the sum over layers of distinct
    experts."""

    program: str
    rows: int
    context: int
    microseconds: float
    floor_microseconds: float
    experts: int
    kernels: tuple[KernelTime, ...]


@dataclass(frozen=True)
class BenchReport:
    """The report of one GPU, or of rank 0."""

    spec: str
    compute: str
    layers: int
    backend: str
    read_bytes_per_second: float
    steps: tuple[StepTime, ...]
    parts: tuple[PartTime, ...] = ()
    rounds: tuple[RoundTime, ...] = ()
    experts: tuple[ExpertsTime, ...] = ()
    prefill: PrefillTime | None = None
    peer: str = ""  #: the peer's name and version, or why there is none; empty without --peers
    missing: str = ""  #: why experts have no times of Humming; empty if they have, or without --peers
    peers: tuple[PeerTime, ...] = ()


def measure(engine: Engine, contexts: Sequence[int], nodes: Sequence[int], say: Callable[[str], None], kernels: bool = True) -> BenchReport:
    """Time decode and verify steps of ``engine``, and drafts if it has a drafter. Its context must have room for the longest of
    ``contexts`` and the rows of its steps.

    Raises KdgenError when the engine does not run on a GPU.
    """
    backend = engine.backend
    if not isinstance(backend, CudaBackend):
        raise KdgenError(NO_GPU)
    say("read bandwidth")
    bandwidth = read_bandwidth(backend)
    steps = []
    for context in contexts:
        for rows in nodes:
            say(f"{rows} rows at context {context}")
            steps.append(_step(engine, backend, context, rows, bandwidth, kernels))
        if engine.spec.draft is not None:
            say(f"a draft at context {context}")
            steps.append(_draft(engine, engine.spec.draft, backend, context, bandwidth, kernels))
    spec = engine.spec
    return BenchReport(spec.name, engine.plan.compute, spec.num_hidden_layers, backend.description, bandwidth, tuple(steps))


def measure_parts(
    report: BenchReport,
    engine: Engine,
    contexts: Sequence[int],
    nodes: Sequence[int],
    distinct: Sequence[int],
    prefill: int | None,
    peers: bool,
    say: Callable[[str], None],
) -> BenchReport:
    """``report`` with the other measurements. ``distinct`` has a number of experts for each of ``nodes``; without it, random tokens
    choose."""
    backend, spec, bandwidth = engine.backend, engine.spec, report.read_bytes_per_second
    if not isinstance(backend, CudaBackend):
        raise KdgenError(NO_GPU)
    torch = open_torch() if peers else ""
    peer = torch if isinstance(torch, Torch) else None
    humming: Humming | str = ""
    parts: list[PartTime] = []
    rounds: list[RoundTime] = []
    beside: list[PeerTime] = []
    for context in contexts:
        for rows in nodes:
            if rows > 1:
                say(f"tree and acceptance, {rows} rows at context {context}")
                parts += part_times(engine, context, rows)
            if peer:
                say(f"{peer.name}, {rows} rows at context {context}")
                beside += peer_times(engine, context, rows, peer)
        if spec.draft is not None:
            say(f"rounds at context {context}")
            rounds += round_times(engine, context)
    experts = []
    if peer and spec.has_moe and spec.quantization:
        say("Humming's kernels")
        humming = open_humming(
            peer, spec.n_routed_experts or 0, spec.hidden_size, spec.moe_intermediate_size or 0, spec.quantization.group_size
        )
    pairs = zip(nodes, distinct, strict=True) if distinct else wanted_experts(engine, nodes)
    for rows, hit in pairs:
        say(f"{hit} experts, {rows} rows")
        experts.append(experts_time(engine, rows, hit, bandwidth, peer, humming if isinstance(humming, Humming) else None))
    chunks = None
    if prefill:
        say(f"a prompt of {prefill} tokens")
        rate = matrix_rate(backend, backend.gpu.multiprocessors)
        chunks = prefill_time(engine, prefill, max(rate, peer.matrix_rate()) if peer else rate)
    who = peer.name if peer else str(torch)
    missing = humming if isinstance(humming, str) else ""
    return replace(
        report, parts=tuple(parts), rounds=tuple(rounds), experts=tuple(experts), prefill=chunks, peer=who, missing=missing,
        peers=tuple(beside),
    )  # fmt: skip


def read_bandwidth(backend: CudaBackend) -> float:
    """The bytes per second at which a kernel reads memory if it does nothing else."""
    text = (templates_dir() / "bench" / "read_bandwidth.cu").read_text()
    backend.load([Source("read_bandwidth", text, 512, 0)])
    data, sink = backend.empty((READ_MEGABYTES * 2**20,), "u8"), backend.empty((1,), "i32")
    blocks = backend.gpu.multiprocessors * 4
    seconds = median(backend, [Launch("read_bandwidth", (blocks, 1, 1), 512, 0, (Pointer(data), READ_MEGABYTES, Pointer(sink)))])
    backend.free(data)
    backend.free(sink)
    return READ_MEGABYTES * 2**20 / seconds


def _step(engine: Engine, backend: CudaBackend, context: int, rows: int, bandwidth: float, kernels: bool) -> StepTime:
    program = run_step(engine, context, rows)
    engine.fill(context)
    in_a_row = max(1, min(STEPS_IN_A_ROW, (engine.plan.limits.max_context - context) // rows))
    work = engine.work(program, rows, context + rows * in_a_row)
    experts = _experts_hit(engine, backend, work)
    engine.fill(context)
    seconds = median(backend, work, lambda: engine.fill_length(context), in_a_row)
    times = _kernels(engine, backend, work, rows, context, bandwidth) if kernels else ()
    floor = _step_bytes(engine, rows, context, experts) / bandwidth
    return StepTime(program, rows, context, seconds * 1e6, floor * 1e6, experts, times)


def _draft(engine: Engine, draft: DraftSpec, backend: CudaBackend, context: int, bandwidth: float, kernels: bool) -> StepTime:
    """Time a block of the drafter, up to its candidates."""
    rows = draft.block_size
    engine.fill(context)
    engine.verify(DeviceDraftRequest(rows - 1, rows), MAX_NODES - 1)
    engine.fill(context)
    work = engine.work("draft", rows, context + rows)
    seconds = median(backend, work)
    times = _kernels(engine, backend, work, rows, context, bandwidth) if kernels else ()
    return StepTime("draft", rows, context, seconds * 1e6, draft_bytes(engine.plan, draft, context) / bandwidth * 1e6, 0, times)


def _kernels(
    engine: Engine, backend: CudaBackend, work: Sequence[Work], rows: int, context: int, bandwidth: float
) -> tuple[KernelTime, ...]:
    """Time each kernel of a step alone, over all its layers, and each collective. Attention is also timed together with the next kernel,
    which joins its splits and may start while attention still runs."""
    engine.fill(engine.plan.limits.max_context)  # with the same rows first
    engine.fill_length(context)
    kernels = [kernel for kernel in engine.plan.kernels if kernel.timing == "alone"]
    times = []
    for group in (*((kernel,) for kernel in kernels), *attention_and_combine(engine.plan, work)):
        names = [kernel.name for kernel in group]
        mine = [each for each in work if isinstance(each, Launch) and each.kernel in names]
        in_step = len(mine) // len(group)
        if group[0].cost.bytes_per_key:
            mine = _over_whole_cache(engine, mine, context + rows)
        if mine:
            many = (mine * -(-LAUNCHES_A_RECORD // len(mine)))[: max(LAUNCHES_A_RECORD, len(mine))]
            count = len(many) // len(group)
            once = median(backend, many) / count
            # earlier kernels ran again on the last layer's activations, which gave this routing
            active = int(engine.read("num_active")[0]) if engine.spec.has_moe else 0
            load = workload(engine.spec, rows, context, active)
            least = sum(kernel.cost.bytes(load) for kernel in group)
            times.append(KernelTime(" + ".join(names), rows, in_step, once * 1e6, least / bandwidth * 1e6, group[0].group))
    times += _behind_senders(engine.plan, backend, work, rows, times)
    gathers = [each for each in work if isinstance(each, AllGather)]
    for name, in_step in Counter(each.name for each in gathers).items():
        alike = [each for each in gathers if each.name == name][:1] * LAUNCHES_A_RECORD
        times.append(KernelTime(name, rows, in_step, median(backend, alike) / LAUNCHES_A_RECORD * 1e6, 0.0, "sums over ranks"))
    return tuple(times)


def _behind_senders(plan: Plan, backend: CudaBackend, work: Sequence[Work], rows: int, times: Sequence[KernelTime]) -> list[KernelTime]:
    """Times of kernels that would wait for ever without the previous kernel, which sends them the ranks' parts: what they add to its
    time."""
    alone = {time.kernel: time.microseconds for time in times}
    found: dict[str, list[float]] = {}
    launches = [each for each in work if isinstance(each, Launch)]
    steps = [(first, second) for first, second in itertools.pairwise(launches) if plan.kernel(second.kernel).timing == "behind its sender"]
    for sender in dict.fromkeys(first.kernel for first, _ in steps):
        mine = [(first, second) for first, second in steps if first.kernel == sender]
        many = mine * -(-LAUNCHES_A_RECORD // len(mine))
        once = median(backend, list(itertools.chain.from_iterable(many))) / len(many) * 1e6
        found.setdefault(mine[0][1].kernel, []).extend([once - alone[sender]] * len(mine))
    return [KernelTime(name, rows, len(each), statistics.mean(each), 0.0, plan.kernel(name).group) for name, each in found.items()]


def _over_whole_cache(engine: Engine, launches: Sequence[Launch], rows: int) -> list[Launch]:
    """The launches, repeated for every stretch of pages that ``rows`` cache rows fill, for a single short one would stay in the L2 cache.
    The sequence's pages are the first ones of the pool, in order."""
    cache = engine.plan.buffer("kv_cache")
    pages, page_bytes = -(-rows // PAGE_SLOTS), cache.bytes // math.prod(cache.shape[:2])

    def moved(argument: Argument, by: int) -> Argument:
        if isinstance(argument, Pointer) and argument.array.shape == cache.shape:
            return replace(argument, offset=argument.offset + by * pages * page_bytes)
        return argument

    stretches = range(cache.shape[1] // pages)
    return [replace(each, args=tuple(moved(argument, by) for argument in each.args)) for by in stretches for each in launches]


def _experts_hit(engine: Engine, backend: CudaBackend, work: Sequence[Work]) -> int:
    """The number of distinct experts of a step, summed over the layers."""
    hit = 0
    for each in work:
        backend.start(each)
        if isinstance(each, Launch) and engine.plan.kernel(each.kernel).writes("num_active"):
            hit += int(engine.read("num_active")[0])
    return hit


def _step_bytes(engine: Engine, rows: int, context: int, experts: int) -> int:
    """Bytes of weights, each once (of experts, those that are hit), an embedding row for each token, and the cache."""
    plan, spec = engine.plan, engine.spec
    total = spec.num_hidden_layers * spec.cache_row_dim * (2 if plan.compute == "bf16" else 4) * (context + rows)
    for weight in plan.weights:
        if weight.name == "embed_tokens":
            total += weight.stored_bytes // spec.vocab_size * rows
        elif weight.of_experts:
            total += weight.stored_bytes // weight.logical[0] * experts
        else:
            total += weight.total_bytes
    # for the drafter's features of the tokens
    return total + sum(weight.total_bytes for weight in plan.draft_weights if weight.name in ("draft_fc", "draft_kv_proj"))
