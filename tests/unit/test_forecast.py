"""kdgen plan: memory and floors that follow from the plan, trees that follow from the acceptance, and what it says of itself."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from kdgen.cli import main
from kdgen.errors import KdgenError
from kdgen.forecast.gpus import READ_FRACTION, gpu_model, gpu_models
from kdgen.forecast.steps import Forecast, expected_tokens, experts_hit, forecast
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Limits
from kdgen.plan.shard import Shard
from kdgen.spec.model import Spec, load_spec

H200 = gpu_model("h200")


def kdgen(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments], prog_name="kdgen")


def k26(ranks: int = 8, context: int = 4096) -> Forecast:
    return forecast(load_spec("k26"), H200, ranks, context)


def test_memory_is_the_plans() -> None:
    found = k26(context=8192)
    plan = build_plan(load_spec("k26"), None, Limits(max_context=8192), Shard(8, 0, "peer")).on("sm_90a")
    memory = found.memory
    assert memory.weights == sum(weight.total_bytes for weight in plan.weights)
    assert memory.cache + memory.buffers == sum(buffer.bytes for buffer in plan.buffers)
    assert memory.total == memory.weights + memory.draft_weights + memory.cache + memory.buffers + memory.reserved
    assert memory.fits and found.fewest_ranks == 8


@pytest.mark.parametrize("gpu", ["h200", "rtx-pro-6000"])
def test_a_gpu_has_the_plan_of_its_family(gpu: str) -> None:
    """Hopper joins a layer's splits and multiplies with w_uv in one launch, and learns once a step what attention visits."""
    found = forecast(load_spec("k26"), gpu_model(gpu))
    plan = build_plan(load_spec("k26"), None, Limits(max_context=4096)).on(gpu_model(gpu).target.family)
    assert found.memory.buffers + found.memory.cache == sum(buffer.bytes for buffer in plan.buffers)
    assert sum(part.launches for part in found.decode.parts) == len(list(plan.program("decode").launches()))
    assert {part.name: part.launches for part in found.decode.parts}["attention over the cache"] == 61 * (1 if gpu == "h200" else 2)


def test_the_longest_context_is_the_longest() -> None:
    spec = load_spec("k26")
    small = gpu_model("rtx-pro-6000")
    longest = forecast(spec, small, 8).memory.longest_context
    assert 4096 < longest < spec.max_position_embeddings
    assert forecast(spec, small, 8, context=longest).memory.fits
    assert not forecast(spec, small, 8, context=longest + 1).memory.fits


def test_a_model_that_does_not_fit_says_what_would_do() -> None:
    found = k26(1)
    assert not found.memory.fits and found.fewest_ranks == 8
    said = kdgen("k26", "--tp", "2").stdout
    assert "does NOT fit; 8 such GPUs would be enough (--tp 8)" in said


def test_a_step_reads_a_ranks_weights_and_the_cache() -> None:
    """Eight of 384 experts, a row of the embedding, all else once; on one rank, what the plan's own test says."""
    for ranks in (1, 8):
        found = k26(ranks)
        plan = build_plan(load_spec("k26"), None, Limits(max_context=4096), Shard(ranks, 0, "peer"))
        share = {"experts_gate_up": 8 / 384, "experts_down": 8 / 384, "embed_tokens": 0.0}
        weights = sum(weight.total_bytes * share.get(weight.name, 1) for weight in plan.weights)
        weights += sum(weight.total_bytes for weight in plan.draft_weights if weight.name in ("draft_fc", "draft_kv_proj"))
        cache = 61 * 576 * 2 * 4096
        assert weights + cache < found.decode.bytes < 1.02 * (weights + cache)
        assert found.decode.seconds == pytest.approx(found.decode.bytes / (4.8e12 * READ_FRACTION) + found.decode.collective_seconds)


def test_collectives_of_a_step() -> None:
    """The embedding, two a layer, the choice and the drafter's features; each rank sends its row to seven others, a word and its
    round for each value."""
    step = k26().decode
    assert step.collectives == 1 + 2 * 61 + 1 + 1
    assert step.collective_bytes == 7 * 8 * (7168 * (1 + 2 * 61 + 1) + 2)
    assert k26(1).decode.collectives == 0 == k26(1).decode.collective_seconds


def test_sums_of_many_rows_are_two_collectives() -> None:
    """Eight rows: parts go to the ranks that sum them, sums to all; the choice, two words a row, stays one."""
    step = forecast(load_spec("k26"), H200, 8, nodes=7).verify
    assert step.collectives == 2 * (1 + 2 * 61 + 1) + 1
    assert step.collective_bytes == (1 + 2 * 61 + 1) * 2 * 8 * 7168 * 8 * 7 // 8 + 7 * 8 * 2 * 8


@pytest.mark.parametrize(("gpu", "latency", "link"), [("h200", 5e-6, 450e9), ("rtx-pro-6000", 12e-6, 64e9)])
def test_seconds_of_collectives(gpu: str, latency: float, link: float) -> None:
    """Each takes its latency, and bytes leave at the link's bandwidth, in bytes a second."""
    step = forecast(load_spec("k26"), gpu_model(gpu), 8).decode
    assert step.collective_seconds == pytest.approx(step.collectives * latency + step.collective_bytes / link)
    assert sum(part.seconds for part in step.parts) == pytest.approx(step.seconds - step.collective_seconds)


def test_a_drafts_collectives_count() -> None:
    """Blocks of 8 rows: thirteen sums over many rows, and the logits, an eighth of 163,840 for each row to seven others."""
    found = k26().draft_seconds
    slow = forecast(load_spec("k26"), dataclasses.replace(H200, nvlink=False), 8).draft_seconds
    assert slow - found == pytest.approx((2 * (1 + 2 * 6) + 1) * 7e-6)
    narrow = forecast(load_spec("k26"), dataclasses.replace(H200, link_bandwidth=45e9), 8).draft_seconds
    sent = 13 * 2 * 8 * 7168 * 8 * 7 // 8 + 8 * 163_840 // 8 * 8 * 7
    assert narrow - found == pytest.approx(9 * sent / 450e9)


def test_experts_that_several_tokens_hit() -> None:
    spec = load_spec("k26")
    assert experts_hit(spec, 1) == pytest.approx(8)
    assert 8 * 8 * 0.9 < experts_hit(spec, 8) < 8 * 8
    assert experts_hit(spec, 10_000) == pytest.approx(384)


@pytest.mark.parametrize("acceptance", [0.3, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("depths", [1, 2, 3])
def test_expected_tokens_are_those_of_the_likeliest_nodes(acceptance: float, depths: int) -> None:
    """Every path of choices 1 … 9, likeliest first: a tree holds them, for a node's ancestors are likelier than it is."""
    chances = []
    for depth in range(1, depths + 1):
        for path in itertools.product(range(1, 10), repeat=depth):
            chance = 1.0
            for choice in path:
                chance *= acceptance * (1 - acceptance) ** (choice - 1)
            chances.append(chance)
    chances.sort(reverse=True)
    found = expected_tokens(acceptance, depths, 9)
    assert found == pytest.approx([1 + sum(chances[:nodes]) for nodes in range(10)])


def test_trees_grow_and_the_best_is_the_best() -> None:
    found = k26()
    tokens = [tree.tokens for tree in found.trees]
    assert tokens == sorted(tokens) and tokens[0] == 1 and len(tokens) == 64
    assert found.trees[0].speedup == 1
    assert found.best.speedup == max(tree.speedup for tree in found.trees) > 1
    assert forecast(load_spec("k26"), H200, 8, acceptance=0.0).best.nodes == 0


def test_more_ranks_are_faster_and_read_less() -> None:
    times = [k26(ranks).decode for ranks in (1, 2, 4, 8)]
    assert [step.bytes for step in times] == sorted((step.bytes for step in times), reverse=True)
    assert times[-1].seconds < times[0].seconds


def test_json_has_what_the_table_has(tmp_path: Path) -> None:
    plot = tmp_path / "k26.svg"
    result = kdgen("k26", "--tp", "8", "--json", "--plot", str(plot))
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["schema"] == "kdgen.plan/1" and report["ranks"] == 8 and len(report["trees"]) == 64
    assert {part["name"] for part in report["decode"]["parts"]} >= {"routed experts", "attention over the cache", "sums over ranks"}
    assert any("for each collective" in line for line in report["assumptions"])
    root = ElementTree.fromstring(plot.read_text())
    assert len([each for each in root if each.tag.endswith("polyline")]) == 5


@pytest.mark.parametrize("spec", ["tiny", "tiny2", "moonlight-16b-a3b", "deepseek-v3", "glm-4.7-flash"])
def test_every_shipped_spec_has_a_forecast(spec: str) -> None:
    result = kdgen(spec, "--context", "512")
    assert result.exit_code == 0, result.output
    assert "the spec has no drafter, so drafting takes no time" in result.stdout


def test_the_context_of_a_small_model_is_all_that_it_has() -> None:
    result = kdgen("demo")
    assert result.exit_code == 0, result.output
    assert "demo (bf16) on 1 x H200 SXM, context 2048" in result.stdout
    assert "context 4096" in kdgen("k26").stdout


def test_experts_that_no_layer_has() -> None:
    """A config of experts whose layers are all dense, as ``--layers`` and a large first_k_dense_replace leave one."""
    values = load_spec("tiny").model_dump(mode="json") | {"num_hidden_layers": 1, "first_k_dense_replace": 1}
    found = forecast(Spec.from_mapping(values, "dense"), H200, 2, 64)
    assert found.placements == () and found.decode.experts == found.verify.experts == 0


def test_what_is_assumed_of_hosts_is_said() -> None:
    assert any("NVLink 4 between all 64 GPUs, as in one host, 450 GB/s" in each for each in k26(64).assumptions)


def test_gpus_have_names_of_their_own() -> None:
    names = [each.name for each in gpu_models()]
    assert len(set(names)) == len(names)
    assert all(each.bandwidth > each.link_bandwidth > 1e9 for each in gpu_models())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["k26", "--gpu", "h20"], "unknown GPU 'h20'; kdgen knows a100, h100, h200"),
        (["k26", "--tp", "3"], "3 ranks cannot share it"),
        (["k26", "--acceptance", "1"], "the acceptance must be at least 0 and below 1"),
        (["tiny", "--context", "4096"], "exceeds max_position_embeddings 1024"),
        (["k26", "--plot", "x.png"], "--plot draws SVG: x.png must end in .svg"),
        (["nothing"], "neither a file nor a shipped spec"),
        (["k26", "--plot", "/no/such/folder/x.svg"], "cannot be written"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: list[str], said: str) -> None:
    result = kdgen(*arguments)
    assert result.exit_code == 2 and said in result.output


def test_nodes_beyond_a_tree() -> None:
    with pytest.raises(KdgenError, match="0 to 63 nodes"):
        forecast(load_spec("tiny"), H200, context=64, nodes=64)


def test_whole_experts_on_ranks_are_uneven() -> None:
    """One token: an N-th of eight experts, or what the fullest rank has of them. Many: every rank reads all of its own, and their
    activations are split as well."""
    spec = load_spec("k26")
    assert forecast(spec, gpu_model("h200"), 1).placements == ()
    assert forecast(load_spec("k26").with_draft(None), gpu_model("h200"), 8).placements == forecast(spec, gpu_model("h200"), 8).placements
    first, *others = forecast(spec, gpu_model("h200"), 8).placements
    assert (first.rows, first.experts) == (1, 8) and 2.0 < first.fullest < 3.0
    assert first.whole_bytes / first.shared_bytes == pytest.approx(first.fullest, rel=0.03)
    ratios = [each.whole_bytes / each.shared_bytes for each in (first, *others)]
    assert ratios == sorted(ratios, reverse=True) and ratios[1] > 1.4 and ratios[-1] < 1
    assert others[-1].experts == pytest.approx(384, abs=1) and others[-1].fullest == pytest.approx(48, abs=0.1)
