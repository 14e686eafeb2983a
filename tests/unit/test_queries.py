"""Queries and cache rows of a few rows in one launch: which steps have it, and bits on both sides of where it ends."""

from __future__ import annotations

import numpy as np
import pytest

from kdgen.backends import open_backend
from kdgen.drafters.synthetic import wide_candidates
from kdgen.engine import Engine
from kdgen.plan.attention import CACHE_BESIDE, QUERIES, QUERY_ROWS
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Limits, Plan
from kdgen.plan.shard import WHOLE, Shard
from kdgen.spec import load_spec
from kdgen.verify.variants import variants
from kdgen.weights.random import random_weights

APART = [CACHE_BESIDE, "q_b_proj", "w_uk_absorb_few"]
VARIANTS = {spec.name: spec for spec in variants()}


def names(plan: Plan, program: str, rows: int) -> list[str]:
    """Kernels of layer 0 in a step of so many rows, up to attention."""
    found = [launch.kernel for launch, layer in plan.program(program).launches(plan.without(rows)) if layer == 0]
    return found[found.index("q_a_kv_a_proj") + 1 : found.index("mla_attention")]


def test_steps_of_few_rows_have_it() -> None:
    plan = build_plan(load_spec("k26")).on("sm_90a")
    assert plan.few_rows == QUERY_ROWS
    for program in ("decode", "verify"):
        assert names(plan, program, 1) == names(plan, program, QUERY_ROWS) == [QUERIES]
        assert names(plan, program, QUERY_ROWS + 1) == APART
    assert QUERIES not in names(plan, "prefill", 1)
    joined, apart = plan.kernel(QUERIES), [plan.kernel(name) for name in APART]
    assert joined.cost.bytes_fixed == sum(kernel.cost.bytes_fixed for kernel in apart)
    assert joined.cost.bytes_per_token < sum(kernel.cost.bytes_per_token for kernel in apart)


@pytest.mark.parametrize(
    ("name", "ranks", "family"), [("k26", 1, "generic"), ("k26", 2, "sm_90a"), ("k26", 8, "sm_90a"), ("deepseek-v3", 1, "sm_90a")]
)
def test_others_have_not(name: str, ranks: int, family: str) -> None:
    """Targets without clusters of blocks, and heads that two blocks each would not take up the whole GPU with, or more."""
    plan = build_plan(load_spec(name), shard=Shard(ranks, 0, "peer") if ranks > 1 else WHOLE)
    plan = plan.on("sm_90a") if family == "sm_90a" else plan.on("generic")
    assert plan.few_rows == 0 and QUERIES not in {kernel.name for kernel in plan.kernels}
    assert names(plan, "verify", 1) == names(plan, "verify", 64) == APART


def test_ranks_with_as_many_heads_have_it() -> None:
    plan = build_plan(load_spec("deepseek-v3"), shard=Shard(2, 0, "peer")).on("sm_90a")
    assert names(plan, "verify", 8) == [QUERIES]


def test_engines_launch_what_a_step_of_so_many_rows_has() -> None:
    spec = VARIANTS["tiny-wgmma"]
    engine = Engine(spec, build_plan(spec).on("sm_90a"), open_backend("cpu"), random_weights(spec, 1).__getitem__)
    for rows, there, not_there in ((QUERY_ROWS, {QUERIES}, set(APART)), (QUERY_ROWS + 1, set(APART), {QUERIES})):
        kernels = {getattr(work, "kernel", "") for work in engine.work("verify", rows, 100)}
        assert there <= kernels and not not_there & kernels


@pytest.mark.parametrize("name", ["tiny-wgmma", "tiny-wgmma-int4"])
def test_a_tree_has_the_same_bits_by_either_way(name: str) -> None:
    """The first rows of a tree that is too large for one launch are those of a smaller one."""
    spec = VARIANTS[name]
    logits, queries = [], []
    for nodes in (QUERY_ROWS - 1, QUERY_ROWS):
        engine = Engine(
            spec, build_plan(spec, None, Limits(64, 128)).on("sm_90a"), open_backend("cpu"), random_weights(spec, 1).__getitem__
        )
        engine.prefill(np.random.default_rng(0).integers(0, spec.vocab_size, 9).tolist())
        engine.verify(wide_candidates(spec.vocab_size, nodes), nodes)
        assert int(engine.read("tree_size")[0]) == nodes + 1
        logits.append(engine.logits(QUERY_ROWS).copy())
        queries.append(engine.read("query")[:QUERY_ROWS].copy())
    assert (logits[0].view(np.uint32) == logits[1].view(np.uint32)).all()
    assert (queries[0].view(np.uint16) == queries[1].view(np.uint16)).all()
