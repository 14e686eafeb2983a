"""What blocks of attention work on, at the widths and numbers of heads that shipped specs and their ranks have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kdgen.backends import open_backend
from kdgen.plan.attention import wgmma_blocks, wgmma_group
from kdgen.plan.build import build_plan
from kdgen.plan.shard import Shard
from kdgen.spec.model import load_spec
from kdgen.verify.kernels.check import check_kernels


@pytest.mark.parametrize(("name", "ranks"), [("k26", 1), ("k26", 2), ("k26", 8), ("deepseek-v3", 1), ("moonlight-16b-a3b", 1)])
def test_schedules_at_full_width(name: str, ranks: int) -> None:
    """One or two tiles of a row's heads, or up to eight rows to a tile. DeepSeek V3's 66 blocks leave more over than a quarter of them."""
    spec = load_spec(name)
    plan = build_plan(spec, shard=Shard(ranks)).on("sm_90a")
    kernels = tuple(kernel for kernel in plan.kernels if kernel.name == "attention_schedule")
    checks = check_kernels(open_backend("cpu"), spec, replace(plan, kernels=kernels), size="slice", tokens=(1, 9, 33))
    assert [check.why for check in checks] == [""]


def test_blocks_and_groups() -> None:
    assert [wgmma_blocks(load_spec(name)) for name in ("k26", "deepseek-v3", "moonlight-16b-a3b")] == [132, 66, 132]
    assert [wgmma_group(load_spec(name)) for name in ("k26", "deepseek-v3", "moonlight-16b-a3b")] == [1, 1, 4]
