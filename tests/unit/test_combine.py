"""Splits of attention joined and multiplied with w_uv in one launch, where forwards have few rows."""

from __future__ import annotations

import numpy as np
import pytest

from kdgen.backends import open_backend
from kdgen.drafters.synthetic import wide_candidates
from kdgen.plan.attention import ATTENTION_ROWS
from kdgen.plan.build import build_plan
from kdgen.plan.ir import MAX_NODES, Launch, Limits, Plan
from kdgen.plan.ops.attention_combine import COMBINE_AND_HEADS
from kdgen.plan.shard import WHOLE, Shard
from kdgen.runtime.pipeline import start_engine
from kdgen.spec.model import load_spec
from kdgen.verify.variants import variants
from kdgen.weights.random import random_weights

APART = {"mla_combine", "w_uv_absorb", "w_uv_absorb_few"}


def launched(plan: Plan, program: str) -> list[Launch]:
    """By layer 0 of a program."""
    return [launch for launch, layer in plan.program(program).launches() if layer == 0]


@pytest.mark.parametrize(("ranks", "blocks"), [(1, 2), (2, 4), (4, 8), (8, 8)])
def test_few_rows_have_one_launch(ranks: int, blocks: int) -> None:
    plan = build_plan(load_spec("k26"), shard=Shard(ranks, 0, "peer") if ranks > 1 else WHOLE).on("sm_90a")
    for program in ("decode", "verify"):
        names = [launch.kernel for launch in launched(plan, program)]
        assert names.count(COMBINE_AND_HEADS) == 1 and not APART & set(names)
    names = [launch.kernel for launch in launched(plan, "prefill")]
    assert COMBINE_AND_HEADS not in names and {"mla_combine", "w_uv_absorb"} <= set(names)
    kernel = plan.kernel(COMBINE_AND_HEADS)
    assert kernel.cluster == blocks and kernel.block // kernel.cluster % 32 == 0
    assert "w_uv_absorb_few" not in {each.name for each in plan.kernels}


@pytest.mark.parametrize(("name", "family"), [("k26", "generic"), ("deepseek-v3", "sm_90a")])
def test_others_have_two(name: str, family: str) -> None:
    """Targets without clusters of blocks, and models of which a head would have one block alone."""
    plan = build_plan(load_spec(name))
    plan = plan.on("sm_90a") if family == "sm_90a" else plan.on("generic")
    names = [launch.kernel for launch in launched(plan, "verify")]
    assert COMBINE_AND_HEADS not in {*names, *(kernel.name for kernel in plan.kernels)}
    assert {"mla_combine", "w_uv_absorb_few"} <= set(names)


def test_one_launch_a_group_of_rows() -> None:
    rows, spec = ATTENTION_ROWS[512], load_spec("k26")
    limits = Limits(64, 4096, max_sequences=rows // MAX_NODES + 1)
    plan = build_plan(spec, limits=limits).on("sm_90a")
    first, second = (launch.argument for launch in launched(plan, "verify") if launch.kernel == COMBINE_AND_HEADS)
    assert second("row_position").value - first("row_position").value == 4 * rows
    assert second("y").value - first("y").value == rows * spec.num_attention_heads * spec.v_head_dim * 2
    assert (first("max_rows").value, second("max_rows").value) == (limits.max_rows, limits.max_rows - rows), "rows that have places"


@pytest.mark.parametrize("name", ["tiny-wgmma", "tiny-wgmma-8"])
def test_nodes_of_two_groups_have_the_bits_of_a_prompt(name: str) -> None:
    """A tree of more rows than attention has in a launch, and than a block has latents of; prompts' splits are joined by two kernels."""
    nodes = ATTENTION_ROWS[128] + 8
    spec = next(each for each in variants() if each.name == name)
    engine = start_engine(spec, build_plan(spec).on("sm_90a"), open_backend("cpu"), random_weights(spec, 1).__getitem__)
    prompt = np.random.default_rng(0).integers(0, spec.vocab_size, 9).tolist()
    engine.prefill(prompt)
    root = int(engine.read("root_token")[0])
    engine.verify(wide_candidates(spec.vocab_size, nodes), nodes)
    rows = int(engine.read("tree_size")[0])
    assert rows > ATTENTION_ROWS[128]
    logits, tokens, parents = engine.read("logits")[:rows].copy(), engine.read("tree_token")[0], engine.read("tree_parent")[0]
    paths = [[root]]
    for node in range(1, rows):
        paths.append([*paths[int(parents[node])], int(tokens[node])])
    for node in (0, 1, 7, 15, 16, 17, 39, 40, rows - 1):
        engine.reset()
        engine.prefill([*prompt, *paths[node]])
        assert (engine.read("logits")[0].view(np.uint32) == logits[node].view(np.uint32)).all(), f"node {node}"
