"""From a model to an engine that decodes it: plan, render, compile, load. Build, verify and bench take parts of this."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from kdgen.backends import open_backend
from kdgen.backends.base import Backend
from kdgen.backends.gpu import use_gpu
from kdgen.codegen.render import render
from kdgen.errors import BackendError, KdgenError
from kdgen.plan.build import build_plan, has_tiled_prefill
from kdgen.plan.ir import Compute, Family, Limits, Plan, Weight
from kdgen.plan.ops.many_rows import CHUNK_TOKENS
from kdgen.plan.shard import WHOLE, Exchange, Shard
from kdgen.ranks.group import Group
from kdgen.runtime.engine import Engine
from kdgen.runtime.model import Model
from kdgen.spec.model import Spec
from kdgen.weights.pack import PackedWeights, Tensors, packed

#: Of a weight that ranks compare before they load any.
_SMALL_BYTES = 2**16


@dataclass(frozen=True)
class Opened:
    """An engine ready to decode, and how long its kernels and its weights took."""

    engine: Engine
    build_seconds: float
    load_seconds: float


@dataclass(frozen=True)
class Ranks:
    """The processes that share a model, and how they exchange partial results (None: the best way that they have)."""

    group: Group
    exchange: Exchange | None = None


def context_for(spec: Spec, prompt_tokens: int, new_tokens: int, context: int | None = None) -> int:
    """The context to plan for: ``context``, or what prompt and new tokens need, as far as the model's positions go.

    Raises KdgenError when the prompt leaves no room in it.
    """
    chosen = context or min(prompt_tokens + new_tokens, spec.max_position_embeddings)
    if prompt_tokens >= chosen:
        cure = "raise --context" if context and context < spec.max_position_embeddings else "the model has no more positions"
        raise KdgenError(f"a prompt of {prompt_tokens} tokens leaves no room in a context of {chosen}: {cure}")
    return chosen


def open_engine(
    model: Model,
    context: int,
    compute: Compute | None = None,
    backend: str | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    ranks: Ranks | None = None,
    compiling: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext,
) -> Opened:
    """Plan, compile (through the cache) and load ``model``, or this rank's part of it where there are ``ranks``.

    ``progress`` is called with bytes of weights done and in all, ``compiling`` is entered while kernels compile (``Backend.compiling``).
    Raises KdgenError when ``compute`` is not what the weights are packed for or the plan cannot be made, BackendError when the
    backend cannot run or memory is short, WeightError for damaged weights.
    """
    _need_compute(model, compute)
    opened, shard = open_shard(ranks.group if ranks else None, backend, seed, ranks.exchange if ranks else None)
    opened.compiling = compiling
    limits = limits_for(model, context, compute, shard, opened.family)
    plan = build_plan(model.spec, compute or model.compute, limits, shard)
    if ranks is not None:
        need_same_plan(ranks.group, plan)
        drafters = model.weights if model.draft_weights is None else model.draft_weights
        ranks.group.need_same({"weights": _digest(plan.weights, model.weights), "drafter's weights": _digest(plan.draft_weights, drafters)})
    began = time.perf_counter()
    loading = began

    def on_progress(done: int, total: int) -> None:
        nonlocal loading
        if done == 0:
            loading = time.perf_counter()
        if progress:
            progress(done, total)

    engine = start_engine(model.spec, plan, opened, model.weights, on_progress, model.draft_weights)
    return Opened(engine, loading - began, time.perf_counter() - loading)


def start_engine(
    spec: Spec,
    plan: Plan,
    backend: Backend,
    weights: Tensors | PackedWeights,
    progress: Callable[[int, int], None] | None = None,
    draft_weights: Tensors | PackedWeights | None = None,
) -> Engine:
    """Render the plan for the backend's targets, compile its kernels (through the cache), load them, and load the weights into an engine.

    ``weights`` are in the plan's layouts already, or give checkpoint tensors by key; ``draft_weights`` are the drafter's, where the plan
    has one (None: they are among ``weights``). ``progress`` is called with (bytes done, bytes in all) before the first weight and while
    they load. Raises KdgenError where a template fails, BackendError when kernels do not load or memory is short, and WeightError when the
    weights do not fit the plan or are damaged.
    """
    here = load_kernels(spec, plan, backend)
    return Engine(spec, here, backend, packed(weights), packed(weights if draft_weights is None else draft_weights), progress)


def load_kernels(spec: Spec, plan: Plan, backend: Backend) -> Plan:
    """Render the plan for the backend's targets, compile its kernels (through the cache) and load them; that plan is returned."""
    here = plan.on(backend.family)
    need_memory(spec, here, backend)
    backend.load([rendered.source for rendered in render(here)])
    return here


def need_memory(spec: Spec, plan: Plan, backend: Backend) -> None:
    """Raises BackendError when weights and buffers cannot fit: it is better said before kernels compile and gigabytes load."""
    needed = sum(weight.total_bytes for weight in (*plan.weights, *plan.draft_weights))
    needed += sum(buffer.bytes for buffer in plan.buffers)
    limit = backend.memory_limit()
    if limit is not None and needed > limit:
        gib = f"{needed / 2**30:.1f} GiB of memory, and there are {limit / 2**30:.1f}"
        raise BackendError(f"{spec.name} on {backend.description} needs {gib}; fewer layers or a shorter context need less")


def limits_for(model: Model, context: int, compute: Compute | None, shard: Shard, family: Family) -> Limits:
    """The sizes to plan for: a prompt's chunks are large where prefills of many rows have kernels of their own. Ranks keep small chunks,
    whose inboxes take memory on every rank."""
    limits = Limits(max_context=context)
    if not shard.whole or not has_tiled_prefill(model.spec, compute or model.compute, family):
        return limits
    return replace(limits, max_tokens=max(limits.max_tokens, min(context, CHUNK_TOKENS)))


def check_plan(model: Model, context: int, compute: Compute | None, shard: Shard) -> None:
    """Raises what ``open_engine`` does where the ranks of ``shard`` cannot have a plan of ``model`` or read its weights."""
    _need_compute(model, compute)
    model.weights.check(build_plan(model.spec, compute or model.compute, Limits(max_context=context), shard))


def _need_compute(model: Model, compute: Compute | None) -> None:
    if model.compute and compute not in (None, model.compute):
        raise KdgenError(f"the weights of {model.spec.name} are packed for --dtype {model.compute}; import them again for {compute}")


def need_same_plan(group: Group, plan: Plan) -> None:
    """Raises BackendError when the ranks' plans are not those of one model with one set of options."""
    shard = plan.shard
    group.need_same({"the model": plan.spec_sha256, "--dtype": plan.compute, "context": plan.limits, "--exchange": shard.exchange})


def _digest(weights: Iterable[Weight], source: PackedWeights) -> str:
    """Of the small weights that every rank has whole, norms above all: other copies of a model differ in them."""
    found = hashlib.sha256()
    for weight in weights:
        if weight.part is None and weight.stored_bytes <= _SMALL_BYTES:
            for layer in range(*weight.layers) if weight.layers else (0,):
                for part in source.parts(weight, layer):
                    found.update(part.tobytes())
    return found.hexdigest()


def open_shard(group: Group | None, backend: str | None = None, seed: int = 0, exchange: Exchange | None = None) -> tuple[Backend, Shard]:
    """The backend called ``backend``, joined to the others of ``group`` if there is one, and its place among them.

    Raises what ``open_backend`` does, and BackendError when the ranks cannot exchange anything.
    """
    if group is None:
        return open_backend(backend, seed), WHOLE
    if backend in (None, "cuda"):
        use_gpu(group.place.local_rank)
    opened = open_backend(backend, seed)
    names = [name.decode() for name in group.exchange(opened.name.encode())]
    if len(set(names)) > 1:
        others = ", ".join(f"rank {rank} on {name}" for rank, name in enumerate(names))
        raise BackendError(f"ranks do not run on the same kind of device ({others}): each takes a GPU of its own, or --backend cpu")
    best = opened.join(group)
    return opened, Shard(group.ranks, group.rank, exchange or best)
