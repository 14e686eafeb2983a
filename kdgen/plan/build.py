"""From spec to plan."""

from __future__ import annotations

from kdgen.errors import KdgenError
from kdgen.plan import draft
from kdgen.plan.ir import Compute, Limits, Plan
from kdgen.plan.kernels import Catalogue, mma_obstacles, mode_of
from kdgen.plan.programs import buffers, programs
from kdgen.plan.weights import weights
from kdgen.spec import Spec


def default_compute(spec: Spec) -> Compute:
    """bf16 on tensor cores for bf16 checkpoints whose dims allow it, float32 otherwise."""
    return "bf16" if spec.dtype == "bfloat16" and not mma_obstacles(spec) else "f32"


def build_plan(spec: Spec, compute: Compute | None = None, limits: Limits | None = None) -> Plan:
    """The plan for ``spec``; ``compute`` None takes the spec's default.

    Raises KdgenError when ``compute`` is bf16 and the dims rule tensor cores out, naming the dims, or when ``limits`` are impossible.
    """
    limits = limits or Limits(max_context=min(Limits().max_context, spec.max_position_embeddings))
    if limits.max_context > spec.max_position_embeddings:
        raise KdgenError(f"{spec.name}: a context of {limits.max_context} exceeds max_position_embeddings {spec.max_position_embeddings}")
    if min(limits.max_context, limits.max_tokens, limits.max_sequences) < 1:
        raise KdgenError(f"{spec.name}: context, tokens and sequences must be at least 1")
    default = default_compute(spec)
    compute = compute or default
    obstacles = mma_obstacles(spec)
    if compute == "bf16" and obstacles:
        raise KdgenError(f"{spec.name}: bf16 compute needs tensor-core shapes, but {'; '.join(obstacles)}. Use --dtype f32.")
    mode = mode_of(spec, compute)
    notes = [f"{compute} path: {'tensor cores (mma.sync m16n8k16)' if compute == 'bf16' else 'generic float32, any dims'}"]
    if obstacles:
        notes.append("no tensor-core path: " + "; ".join(obstacles))
    notes.append("one plan for every target: no block uses more than 99 KiB of shared memory")
    if spec.draft is not None:
        notes.append("drafter: target layers' outputs are captured, and its cache follows every committed token")
    return Plan(
        spec_name=spec.name,
        spec_sha256=spec.sha256,
        compute=compute,
        default_compute=default,
        limits=limits,
        kernels=Catalogue(spec, mode).all() + draft.kernels(spec, compute),
        weights=weights(spec, mode),
        draft_weights=draft.weights(spec, compute),
        buffers=buffers(spec, mode, limits) + draft.buffers(spec, mode, limits),
        programs=draft.programs(programs(spec, mode, limits), spec, limits),
        notes=tuple(notes),
    )
