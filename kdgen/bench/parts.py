"""Other times of ``kdgen bench``: parts of a round, whole rounds, experts by the number of distinct ones, prefill, and kernels beside a
peer."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kdgen.backends.base import Backend, Launch, Pointer, Work
from kdgen.bench.humming import Humming
from kdgen.bench.peers import Torch
from kdgen.bench.timing import Contender, median, medians
from kdgen.codegen.source import Source
from kdgen.drafters.base import DeviceDraftRequest
from kdgen.drafters.synthetic import wide_candidates
from kdgen.errors import KdgenError
from kdgen.files.resources import templates_dir
from kdgen.plan.floors import expected_experts
from kdgen.plan.ir import Group, Kernel, Plan
from kdgen.plan.ops.attention_combine import CombineAndHeads
from kdgen.plan.ops.dense import LinearHeads, LinearMma
from kdgen.runtime.engine import Engine
from kdgen.runtime.rounds import Rounds, budgets_for
from kdgen.spec.model import Spec

PARTS: tuple[Group, ...] = ("tree", "accept", "draft context")  #: groups of kernels in a round that are not part of a forward
REPEATS = 8  #: of short work in one recording, so that the time to start it does not matter
MATRIX_ROUNDS = 4096
HUMMING_CALLS = 6  #: in one recording, each with other experts, so that they read more bytes than any GPU caches
PREFILLS = 5  #: prefills; the first launches kernel by kernel, the second records


@dataclass(frozen=True)
class PartTime:
    """The kernels of one part of a round, with ``rows`` tree nodes including the root."""

    part: str
    rows: int
    context: int
    microseconds: float


@dataclass(frozen=True)
class RoundTime:
    """A whole round as one graph, from draft to compaction; budget 0 is plain decoding."""

    budget: int
    context: int
    microseconds: float


@dataclass(frozen=True)
class PeerExperts:
    """A peer's time for the same experts and the same numbers of tokens."""

    peer: str
    microseconds: float


@dataclass(frozen=True)
class ExpertsTime:
    """gate_up, SiLU and down of one layer's routed experts, measured in turn with the peers."""

    rows: int
    experts: int  #: distinct experts
    microseconds: float
    floor_microseconds: float
    peers: tuple[PeerExperts, ...]


@dataclass(frozen=True)
class PeerTime:
    """A kernel (for attention, also the one that joins its splits) and a peer's time for the same work, measured in turn."""

    kernel: str
    rows: int
    context: int
    microseconds: float
    peer_microseconds: float


@dataclass(frozen=True)
class PrefillTime:
    """A prompt in chunks, with an empty cache. ``matrix_share`` is its operations per second divided by ``matrix_rate``, the measured rate
    of bf16 products: of mma.sync from registers, or of the peer's large matrix product if that is faster."""

    tokens: int
    chunk: int
    seconds: float
    tokens_per_second: float
    matrix_share: float
    matrix_rate: float


def run_step(engine: Engine, context: int, rows: int) -> str:
    """Run a step of ``rows`` rows after ``context`` random tokens, so that its kernels can then run alone. Returns the program's name."""
    engine.fill(context)
    if rows == 1:
        engine.decode()
        return "decode"
    engine.verify(wide_candidates(engine.spec.vocab_size, rows - 1), rows - 1)
    return "verify"


def part_times(engine: Engine, context: int, rows: int) -> tuple[PartTime, ...]:
    """Time the parts of a verify step with a tree of ``rows`` nodes after ``context`` tokens."""
    launches = _launches(engine, run_step(engine, context, rows), rows, context)
    found = []
    for part in PARTS:
        mine = [each for each in launches if engine.plan.kernel(each.kernel).group == part]
        if mine:
            seconds = median(engine.backend, mine * REPEATS, lambda: engine.fill_length(context)) / REPEATS
            found.append(PartTime(part, rows, context, seconds * 1e6))
    engine.fill_length(context)
    return tuple(found)


def round_times(engine: Engine, context: int) -> tuple[RoundTime, ...]:
    """Time rounds of every budget with the engine's drafter, if it has one."""
    draft = engine.spec.draft
    if draft is None:
        return ()
    block = DeviceDraftRequest(draft.block_size - 1, draft.block_size)
    engine.fill(context)
    rounds = Rounds(engine, block, budgets_for(block))
    rounds.begin(context)
    return tuple(RoundTime(budget, context, seconds * 1e6) for budget, seconds in rounds.costs(0).items())


def _launches(engine: Engine, program: str, rows: int, context: int) -> list[Launch]:
    return [each for each in engine.work(program, rows, context + rows) if isinstance(each, Launch)]


# ---- experts --------------------------------------------------------------------------------------------------------------------


def distinct_experts(experts: int, chosen: int, rows: int) -> int:
    """Distinct experts that ``rows`` tokens hit if each draws ``chosen`` at random: of 384, 1, 8 and 16 tokens hit 8, 60 and 110."""
    return max(chosen, round(expected_experts(experts, chosen, rows)))


def check_distinct(spec: Spec, nodes: Sequence[int], distinct: Sequence[int]) -> None:
    """Raises KdgenError when a step of one of the ``nodes`` rows cannot hit the number in ``distinct`` at the same place."""
    if not spec.has_moe:
        raise KdgenError(f"{spec.name} has no experts: leave out --experts")
    each, experts = spec.num_experts_per_tok, spec.n_routed_experts or 0
    for rows, hit in zip(nodes, distinct, strict=True):
        if not each <= hit <= min(experts, rows * each):
            raise KdgenError(f"--experts: {rows} tokens with {each} experts each hit {each} to {min(experts, rows * each)}, not {hit}")


def experts_time(
    engine: Engine, rows: int, distinct: int, bandwidth: float, torch: Torch | None = None, humming: Humming | None = None
) -> ExpertsTime:
    """Time ``distinct`` experts in every MoE layer in turn, so that a layer's weights are read again only after all others."""
    spec, backend = engine.spec, engine.backend
    each, experts = spec.num_experts_per_tok, spec.n_routed_experts or 0
    order, drawn = np.arange(rows * each) % distinct, np.random.default_rng(0).permutation(experts)
    routings = [drawn[(order + turn * distinct) % experts].reshape(rows, each).astype(np.int32) for turn in range(HUMMING_CALLS)]
    backend.write(engine.buffer("topk_experts"), routings[0])
    backend.write(engine.buffer("num_tokens"), np.array([rows], np.int32))
    launches = _launches(engine, "verify", rows, 0)
    sort = next(launch for launch in _launches(engine, "prefill", rows, 0) if engine.plan.kernel(launch.kernel).writes("num_active"))
    backend.launch(sort.kernel, sort.grid, sort.block, sort.smem, sort.args)
    mine = [launch for launch in launches if engine.plan.kernel(launch.kernel).cost.bytes_per_expert]
    layers = len(mine) // len({launch.kernel for launch in mine})
    repeats = -(-REPEATS // layers)
    weights = [weight for weight in engine.plan.weights if weight.of_experts]
    floor = sum(weight.stored_bytes // weight.logical[0] for weight in weights) * distinct / bandwidth
    others: list[tuple[str, Contender]] = []
    if torch is not None and weights[0].group_size:
        other = torch.experts(spec.hidden_size, spec.moe_intermediate_size or 0, weights[0].group_size, np.bincount(order).tolist())
        others += [(torch.name, other)] if other else []
    if humming is not None:
        others += humming.contenders(routings)
    ours, *theirs = medians(backend, mine * repeats, [contender for _, contender in others])
    peers = tuple(PeerExperts(name, seconds * 1e6) for (name, _), seconds in zip(others, theirs, strict=True))
    return ExpertsTime(rows, distinct, ours / layers / repeats * 1e6, floor * 1e6, peers)


# ---- beside a peer ----------------------------------------------------------------------------------------------------------------


def peer_times(engine: Engine, context: int, rows: int, torch: Torch) -> Iterator[PeerTime]:
    """Time dense layers and attention of a step of ``rows`` rows after ``context`` tokens, over all layers, and the peer."""
    launches = _launches(engine, run_step(engine, context, rows), rows, context)
    counts = Counter(each.kernel for each in launches)
    for kernels, other in _contenders(engine, launches, context, rows, torch):
        names = [kernel.name for kernel in kernels]
        mine = [each for each in launches if each.kernel in names]
        repeats = -(-REPEATS // counts[names[0]])
        ours, theirs = medians(engine.backend, mine * repeats, [other])
        yield PeerTime(" + ".join(names), rows, context, ours / counts[names[0]] / repeats * 1e6, theirs * 1e6)


def attention_and_combine(plan: Plan, work: Sequence[Work]) -> list[tuple[Kernel, Kernel]]:
    """Attention over the cache and the next kernel, which joins its splits."""
    kernels = [plan.kernel(each.kernel) for each in work if isinstance(each, Launch)]
    return list(dict.fromkeys((first, second) for first, second in itertools.pairwise(kernels) if first.cost.bytes_per_key))


def _contenders(
    engine: Engine, launches: Sequence[Launch], context: int, rows: int, torch: Torch
) -> Iterator[tuple[tuple[Kernel, ...], Contender]]:
    """The peer's operations, with the kernels that do the same work."""
    spec, plan = engine.spec, engine.plan
    weights = {weight.name: weight for weight in plan.weights}
    used = {launch.kernel: launch for launch, _ in plan.program("decode").launches()}
    attention = {first: second for first, second in attention_and_combine(plan, launches)}
    for kernel in plan.kernels:
        if kernel.name not in used:
            continue
        if kernel in attention:
            yield (
                (kernel, attention[kernel]),
                torch.attention(
                    spec.num_attention_heads,
                    rows,
                    context + rows,
                    spec.cache_row_dim,
                    spec.kv_lora_rank,
                    spec.softmax_scale,
                    spec.v_head_dim if isinstance(attention[kernel].params, CombineAndHeads) else 0,
                ),
            )
        elif isinstance(kernel.params, LinearHeads) or (isinstance(kernel.params, LinearMma) and kernel.params.outbox is None):
            weight = weights.get(used[kernel.name].argument("weight").name)
            if weight is not None:  # otherwise the kernel is a drafter's
                batch, outputs, inputs = weight.logical
                yield (kernel,), torch.linear(outputs, inputs, rows) if batch == 1 else torch.batched(batch, outputs, inputs, rows)


# ---- prefill ----------------------------------------------------------------------------------------------------------------------


def matrix_rate(backend: Backend, multiprocessors: int) -> float:
    """The operations per second that mma.sync reaches in bf16 with all operands in registers."""
    text = (templates_dir() / "bench" / "matrix_rate.cu").read_text()
    backend.load([Source("matrix_rate", text, 256, 0)])
    sink, blocks = backend.empty((1,), "f32"), multiprocessors * 8
    seconds = median(backend, [Launch("matrix_rate", (blocks, 1, 1), 256, 0, (MATRIX_ROUNDS, Pointer(sink)))])
    backend.free(sink)
    return blocks * 8 * MATRIX_ROUNDS * 8 * (2 * 16 * 8 * 16) / seconds


def prefill_time(engine: Engine, tokens: int, rate: float) -> PrefillTime:
    """Time a prompt of ``tokens`` random tokens in the plan's largest chunks. ``rate`` is the measured operations per second."""
    chunk = engine.plan.limits.max_tokens
    prompt = np.random.default_rng(0).integers(0, engine.spec.vocab_size, tokens).tolist()
    times = []
    for _ in range(PREFILLS):
        engine.reset()
        stop = engine.backend.timer()
        for at in range(0, tokens, chunk):
            engine.prefill(prompt[at : at + chunk])
        times.append(stop())
    seconds = statistics.median(times[2:])
    return PrefillTime(tokens, chunk, seconds, tokens / seconds, prefill_operations(engine, tokens) / seconds / rate, rate)


def prefill_operations(engine: Engine, tokens: int) -> int:
    """Operations of all kernels for a prompt of ``tokens`` tokens: attention's for each key that a token sees, and those after the last
    layer for the one row of each chunk that has logits."""
    launched = Counter((launch.kernel, launch.rows, launch.row_groups) for launch, _ in engine.plan.program("prefill").launches())
    chunks, keys_of_rows = -(-tokens // engine.plan.limits.max_tokens), tokens * (tokens + 1) // 2
    found = 0
    for (name, rows, row_groups), launches in launched.items():
        cost = engine.plan.kernel(name).cost
        found += launches // row_groups * (cost.operations(tokens, keys_of_rows) if rows == "tokens" else cost.operations(chunks))
    return found


def wanted_experts(engine: Engine, nodes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The (rows, distinct experts) to measure for steps of ``nodes`` rows."""
    spec = engine.spec
    if not spec.has_moe:
        return ()
    experts, chosen = spec.n_routed_experts or 0, spec.num_experts_per_tok
    return tuple((rows, distinct_experts(experts, chosen, rows)) for rows in nodes)
