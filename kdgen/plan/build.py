"""From spec to plan."""

from __future__ import annotations

import functools
from dataclasses import replace

from kdgen.errors import KdgenError
from kdgen.plan.attention import has_wgmma_shapes, mma_obstacles
from kdgen.plan.derive import derive, of_larger_limits, op_programs
from kdgen.plan.describe import described, share_headers
from kdgen.plan.ir import Buffer, Compute, Family, Limits, Plan
from kdgen.plan.memory import buffers
from kdgen.plan.ops.attention_combine import fuses_combine_and_w_uv
from kdgen.plan.ops.many_rows import TILED_ROWS
from kdgen.plan.ops.op import Context
from kdgen.plan.shard import WHOLE, Shard, check_shard, part_of, shares_draft
from kdgen.plan.tuning import Mode, mode_of
from kdgen.plan.weights import draft_weights, weights
from kdgen.spec.model import Spec


def default_compute(spec: Spec) -> Compute:
    """bf16 on tensor cores for bf16 checkpoints whose dims allow it, float32 otherwise."""
    return "bf16" if spec.dtype == "bfloat16" and not mma_obstacles(spec) else "f32"


def build_plan(spec: Spec, compute: Compute | None = None, limits: Limits | None = None, shard: Shard = WHOLE) -> Plan:
    """The plan for ``spec``, or for the part of it that ``shard`` says; ``compute`` None takes the spec's default.

    Raises KdgenError when ``compute`` is bf16 and the dims rule tensor cores out, naming the dims, when the ranks of ``shard`` cannot
    share the model evenly, or when ``limits`` are impossible.
    """
    return _built(spec, compute, limits, shard)


@functools.lru_cache(maxsize=32)  # a forecast and the checks of a model ask for some plans again and again; K2.6's takes 0.3 s
def _built(spec: Spec, compute: Compute | None, limits: Limits | None, shard: Shard) -> Plan:
    check_shard(spec, shard)
    limits = limits or Limits(max_context=min(Limits().max_context, spec.max_position_embeddings))
    if limits.max_context > spec.max_position_embeddings:
        raise KdgenError(f"{spec.name}: a context of {limits.max_context} exceeds max_position_embeddings {spec.max_position_embeddings}")
    if min(limits.max_context, limits.max_tokens, limits.max_sequences) < 1:
        raise KdgenError(f"{spec.name}: context, tokens and sequences must be at least 1")
    part = part_of(spec, shard.ranks)
    default = default_compute(part)
    compute = compute or default
    obstacles = mma_obstacles(part)
    if compute == "bf16" and obstacles:
        raise KdgenError(f"{spec.name}: bf16 compute needs tensor-core shapes, but {'; '.join(obstacles)}. Use --dtype f32.")
    generic = _plan(spec, compute, default, limits, shard, "generic")
    if compute == "bf16" and has_wgmma_shapes(part):
        special = _plan(spec, compute, default, limits, shard, "sm_90a")
        return replace(generic, special=(replace(special, kernels=share_headers(special.kernels, generic.kernels)),))
    return generic


def has_tiled_prefill(spec: Spec, compute: Compute | None, family: Family) -> bool:
    """Whether targets of ``family`` have programs of their own for prefills of many rows (``Plan.tiled_rows``), on one rank."""
    return family == "sm_90a" and (compute or default_compute(spec)) == "bf16" and has_wgmma_shapes(spec)


def own_kernels(special: Plan, plan: Plan) -> Plan:
    """``special`` with those of its kernels that ``plan`` does not have."""
    return replace(special, kernels=tuple(kernel for kernel in special.kernels if kernel not in plan.kernels))


def buffers_at(plan: Plan, spec: Spec, max_context: int) -> tuple[Buffer, ...]:
    """The buffers that ``plan``, which was built for ``spec``, has at another context: the same ones in other sizes."""
    limits = replace(plan.limits, max_context=max_context)
    c = Context(spec, part_of(spec, plan.shard.ranks), _mode(spec, plan.compute, plan.family), limits, plan.shard)
    return buffers(c, frozenset(buffer.name for buffer in plan.buffers))


def _mode(spec: Spec, compute: Compute, family: Family) -> Mode:
    return replace(mode_of(spec, compute), wgmma=family == "sm_90a")


def _plan(spec: Spec, compute: Compute, default: Compute, limits: Limits, shard: Shard, family: Family) -> Plan:
    part = part_of(spec, shard.ranks)
    mode, obstacles = _mode(spec, compute, family), mma_obstacles(part)
    notes = [f"{compute} path: {'tensor cores (mma.sync m16n8k16)' if compute == 'bf16' else 'generic float32, any dims'}"]
    if obstacles:
        notes.append("no tensor-core path: " + "; ".join(obstacles))
    if not shard.whole:
        notes.append(
            f"{shard.ranks} ranks share heads, MLPs, every expert and the vocabulary; norms, latents, router and cache are on each"
        )
        if spec.draft is not None:
            shared = shares_draft(spec, shard.ranks)
            notes.append(
                "the ranks share the drafter, too" if shared else "the drafter is on each rank, whole: its dims are not to be shared"
            )
    if family == "sm_90a":
        notes.append("sm_90a only: attention over the cache runs on wgmma, with splits of its own and a block an SM")
        if fuses_combine_and_w_uv(part, mode):
            notes.append(
                "sm_90a only: few rows join attention's splits and leave the latent space in one launch, with a cluster of blocks a head"
            )
        notes.append("sm_90a only: prefills of many rows run their matrix kernels on wgmma, with the bits of the kernels for few rows")
    else:
        notes.append("for every target: no block uses more than 99 KiB of shared memory")
    if spec.draft is not None:
        notes.append("drafter: target layers' outputs are captured, and its cache follows every committed token")
    c = Context(spec, part, mode, limits, shard)
    found = derive(op_programs(c), of_larger_limits(c))
    tensors, draft_tensors = weights(spec, mode, shard), draft_weights(spec, compute, shard)
    return Plan(
        spec_name=spec.name,
        spec_sha256=spec.sha256,
        compute=compute,
        default_compute=default,
        limits=limits,
        kernels=described(found.kernels, (*tensors, *draft_tensors), c),
        weights=tensors,
        draft_weights=draft_tensors,
        buffers=buffers(c, found.buffers),
        programs=found.programs,
        notes=tuple(notes),
        shard=shard,
        gathers=found.gathers,
        family=family,
        num_experts_per_tok=spec.num_experts_per_tok,
        tiled_rows=TILED_ROWS[part.kv_lora_rank] if family == "sm_90a" else 0,
    )
