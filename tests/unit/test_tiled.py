"""Prefills of many rows, whose matrix kernels are twins of those for few: chosen by the rows alone, and with the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kdgen.backends import open_backend
from kdgen.backends.base import Backend
from kdgen.plan.attention import ATTENTION_ROWS
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Limits, Plan
from kdgen.plan.ops.many_rows import TILED_ROWS, twin_name, twin_of
from kdgen.runtime.pipeline import start_engine
from kdgen.spec.model import load_spec
from kdgen.verify.decoding.recording import RecordingEngine, differing_bits
from kdgen.verify.variants import variants
from kdgen.weights.random import random_weights

VARIANTS = {spec.name: spec for spec in variants()}
PROMPT = 64


def plan_of(name: str) -> Plan:
    spec = VARIANTS.get(name) or load_spec(name)
    return build_plan(spec, "bf16", Limits(PROMPT, 2 * PROMPT)).on("sm_90a")


@pytest.mark.parametrize("name", ["tiny-wgmma", "tiny-wgmma-int4", "k26"])
def test_twins_are_launched_with_the_arguments_of_their_kernels(name: str) -> None:
    plan = plan_of(name)
    tiled, plain = plan.program("prefill_tiled"), plan.program("prefill")
    twins, gathers = 0, {gather.name for gather in plan.gathers}
    for (one, layer), (other, other_layer) in zip(tiled.launches(), plain.launches(), strict=True):
        if one.kernel in gathers:
            assert one == other
            continue
        arguments = [launch.in_order(plan.kernel(launch.kernel)) for launch in (one, other)]
        if one.kernel == twin_name("router_logits"):  # whose kernel for few rows does not take tiles one after another
            arguments[0] = arguments[0][:-1]
        assert (arguments[0], one.rows, layer) == (arguments[1], other.rows, other_layer)
        if one.kernel != other.kernel:
            assert one.kernel == twin_name(other.kernel)
            twin, kernel = plan.kernel(one.kernel), plan.kernel(other.kernel)
            assert twin.row_tiles == kernel.row_tiles or kernel.name == "router_logits"  # whose blocks each have one
            assert twin.cost == kernel.cost
            twins += 1
        else:
            assert one.rows == "logits" or twin_of(plan.kernel(one.kernel), plan.kernels) is None
    assert twins >= 7 * plan.buffer("kv_cache").shape[0]  # in each layer
    assert twin_of(plan.kernel("lm_head"), plan.kernels) is None, "few rows have logits, however many the step has"


def test_only_targets_with_wgmma_have_them() -> None:
    plan = build_plan(load_spec("k26"))
    assert plan.tiled_rows == 0 and not any(kernel.name.endswith("_tiled") for kernel in plan.kernels)
    assert plan.on("sm_90a").tiled_rows == TILED_ROWS[512]


def test_attention_goes_through_rows_in_groups() -> None:
    """Partial values are kept of one group at a time; each launch begins where the last one ended."""
    rows = ATTENTION_ROWS[512]
    plan = build_plan(load_spec("k26"), "bf16", Limits(4 * rows - 1, 4096)).on("sm_90a")
    assert plan.buffer("split_values").shape[0] == rows and plan.buffer("group_rows").shape == (4,)
    spec = load_spec("k26")
    launches = [launch for launch, layer in plan.program("prefill").launches() if layer == 0]
    places = {
        name: [
            [bound.arg.value for bound in launch.args if bound.arg.name in buffers.split()] for launch in launches if launch.kernel == name
        ][:4]
        for name, buffers in (
            ("attention_schedule", "group_rows row_position attention_schedule"),
            ("mla_attention", "attention_schedule query"),
        )
    }
    query, schedule = spec.num_attention_heads * spec.cache_row_dim * 2, plan.buffer("attention_schedule").shape[1] * 4
    assert places["attention_schedule"] == [[4 * i, 4 * i * rows, i * schedule] for i in range(4)]
    assert places["mla_attention"] == [[i * schedule, i * rows * query] for i in range(4)]
    first = [launch.argument("first_row").value for launch in launches if launch.kernel == "attention_schedule"]
    assert first == [0, rows, 2 * rows, 3 * rows], "rows of the step before each launch's"
    for name in ("decode", "verify"):
        assert not any(launch.kernel == "row_groups" for launch, _ in plan.program(name).launches())


@pytest.mark.parametrize(
    ("name", "backend"), [("tiny-wgmma", "cpu"), ("tiny-wgmma-8", "cpu-shuffled"), ("tiny-wgmma-int4", "cpu-shuffled")]
)
def test_chunks_on_both_sides_of_the_threshold(name: str, backend: str) -> None:
    """L3: whichever kernels a chunk went through, rows have the bits that they have token by token."""
    spec, plan = VARIANTS[name], plan_of(name)
    engine = RecordingEngine(start_engine(spec, plan, open_backend(backend, seed=5), random_weights(spec, 1).__getitem__))
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, PROMPT).tolist()

    def rows(*chunks: int) -> tuple[list[NDArray[np.float32]], NDArray[Any]]:
        engine.reset()
        at = 0
        for chunk in chunks:
            engine.prefill(tokens[at : at + chunk])
            at += chunk
        assert at == PROMPT
        return engine.logits, engine.cache_rows()

    logits, cache = rows(*[1] * PROMPT)
    least = plan.tiled_rows
    for chunks in ((PROMPT,), (least, PROMPT - least), (least - 1, least + 1, PROMPT - 2 * least), (3, 2 * least, PROMPT - 2 * least - 3)):
        again, same_cache = rows(*chunks)
        assert differing_bits(same_cache, cache) == 0
        assert differing_bits(np.stack(again), np.stack(logits)) == 0


def test_first_rows_of_a_buffer(cpu_backend: Backend) -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    array = cpu_backend.to_device(values, "f32")
    assert (cpu_backend.to_host(array, 2) == values[:2]).all() and (cpu_backend.to_host(array, 9) == values).all()
