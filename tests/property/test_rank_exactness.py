"""L1 to L5 among ranks: processes that share a model decode with draft trees what they decode plainly, bit for bit.

The default ``kdgen verify`` compares all numbers of ranks, one among them, both exchanges and both compute types. Here every kind of
model has one case, and each exchange several.
"""

from __future__ import annotations

import pytest

from kdgen.plan.ir import Compute
from kdgen.spec.model import Spec, load_spec
from kdgen.spec.published import load_config
from kdgen.verify.decoding.ranks import check_ranks
from kdgen.verify.oracles.models import model_cases
from kdgen.verify.report.checks import Check
from kdgen.verify.variants import variants

#: Dimensions that 1 to 4 ranks divide, 3 of them into odd parts.
TWELVE = {"name": "twelve", "vocab_size": 540, "num_attention_heads": 12, "intermediate_size": 132, "moe_intermediate_size": 36}


def problems(checks: list[Check]) -> list[str]:
    assert {check.part for check in checks} == {"ranks"} and len(checks) >= 6
    return [f"{check.name}: {check.why}" for check in checks if check.status != "ok"]


def short(spec: Spec) -> Spec:
    """``spec`` with room for a prompt and an answer of half the length that decodes have otherwise: every step is a rank's time over."""
    return Spec.from_mapping(spec.model_dump(mode="json") | {"max_position_embeddings": 36})


def twelve() -> Spec:
    return Spec.from_mapping(load_spec("tiny").model_dump(mode="json") | TWELVE)


def test_three_ranks() -> None:
    checks = check_ranks(short(twelve()), "f32", 3, situations=1)
    assert not problems(checks)
    logits = checks[0]
    assert "float64 reference" in logits.name and logits.figure is not None


def test_the_oracles_tokens() -> None:
    found = next(each for each in model_cases() if each.name == "tiny")
    checks = check_ranks(load_config(found.folder), "f32", 4, found.name, situations=1)
    assert not problems(checks)
    assert any("oracle's greedy tokens" in check.name for check in checks)


def test_int4_experts_and_biases() -> None:
    spec = next(spec for spec in variants() if spec.name == "tiny-v2")
    assert not problems(check_ranks(short(spec), "bf16", 2, situations=1))


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_of_few_heads_on_wgmma(ranks: int) -> None:
    """Tiles of 32 and 16 heads a token row, as plans for sm_90a have them, with splits of 64 keys."""
    tiny = next(spec for spec in variants() if spec.name == "tiny-wgmma")
    spec = Spec.from_mapping(tiny.model_dump(mode="json") | {"name": "rank-wgmma", "moe_intermediate_size": 64, "num_hidden_layers": 1})
    assert not problems(check_ranks(spec, "bf16", ranks, situations=1, family="sm_90a"))


@pytest.mark.parametrize(("name", "compute", "ranks"), [("tiny-dflash", "bf16", 2), ("twelve", "f32", 3)])
def test_through_the_ranks_memory(name: str, compute: Compute, ranks: int) -> None:
    """The kernels that send words to the other ranks and wait for theirs. Decoding normalises in those that sum, prefill does not, and
    their bits are equal."""
    spec = twelve() if name == "twelve" else next((spec for spec in variants() if spec.name == name), None) or load_spec(name)
    assert not problems(check_ranks(short(spec), compute, ranks, situations=1, exchange="peer"))


def test_in_any_order_of_threads() -> None:
    """Blocks and threads in a drawn order, asynchronous copies late: the same bits."""
    assert not problems(check_ranks(short(load_spec("tiny2")), "bf16", 2, backend="cpu-shuffled", situations=1))
