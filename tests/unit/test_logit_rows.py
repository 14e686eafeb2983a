"""Logits of a prefill: of each chunk's last row alone, unless somebody asks for all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kdgen.backends.base import Backend
from kdgen.bench.parts import prefill_operations
from kdgen.errors import KdgenError
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Limits, Plan
from kdgen.plan.shard import Exchange, Shard
from kdgen.runtime.engine import Engine
from kdgen.runtime.pipeline import start_engine
from kdgen.spec.model import load_spec
from kdgen.spec.sampling import Sampling
from kdgen.verify.decoding.recording import differing_bits
from kdgen.verify.variants import variants
from kdgen.weights.random import random_weights

TINY = load_spec("tiny")
#: Buffers whose rows are the step's token rows; a launch over other rows takes its own.
OF_TOKENS = {"num_tokens", "row_sequence", "row_position", "tokens"}


def plans() -> list[Plan]:
    wide = next(spec for spec in variants() if spec.name == "tiny-wgmma")
    exchanges: tuple[Exchange, ...] = ("gather", "peer")
    ranks = [Shard(2, 0, exchange) for exchange in exchanges]
    found = [build_plan(TINY, "f32"), build_plan(TINY, "bf16"), build_plan(wide, "bf16").on("sm_90a")]
    return [*found, *(build_plan(TINY, "bf16", None, shard) for shard in ranks)]


@pytest.mark.parametrize("plan", plans(), ids=lambda plan: f"{plan.spec_name}-{plan.compute}-{plan.family}-{plan.shard.exchange}")
def test_what_follows_the_last_layer_of_a_prefill_runs_over_rows_with_logits(plan: Plan) -> None:
    for program in plan.programs:
        launches = [launch for launch, _ in program.launches()]
        chosen = [launch for launch in launches if launch.rows == "logits"]
        if not program.name.startswith("prefill"):
            assert not chosen, "every row of other steps has logits: nothing is looked up"
            continue
        assert [launch.kernel for launch in chosen][:2] == ["rmsnorm_logits", "lm_head"]
        assert launches[-1 - len(chosen) : -1] == chosen and launches[-1].kernel == "advance"
        names = {bound.arg.name for launch in chosen for bound in launch.args if bound.arg.kind == "buffer"}
        assert not names & OF_TOKENS and {"num_logits", "logit_row"} <= names


def prefilled(engine: Engine, every_logit: bool) -> tuple[tuple[int, ...], NDArray[Any], NDArray[Any]]:
    """Two steps of chunks of three sequences: (roots of the second, logits of the second, sequence 1's cache rows)."""
    rng = np.random.default_rng(0)
    for sequence in range(3):
        engine.reset(sequence, Sampling(temperature=0.9, seed=sequence) if sequence else Sampling())
    for counts in ((5, 1, 9), (3, 12, 1)):
        chunks = [(sequence, rng.integers(0, TINY.vocab_size, count).tolist()) for sequence, count in zip((2, 0, 1), counts, strict=True)]
        roots = engine.prefill_many(chunks, every_logit)
    rows = engine.logits(sum(counts) if every_logit else len(counts))
    return roots, rows[np.cumsum(counts) - 1] if every_logit else rows, engine.cache_rows(1)


@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_last_rows_have_the_bits_that_they_have_among_all(cpu_backend: Backend, compute: Any) -> None:
    plan = build_plan(TINY, compute, Limits(32, 64, 3))
    engine = start_engine(TINY, plan, cpu_backend, random_weights(TINY, 3).__getitem__)
    roots, logits, cache = prefilled(engine, every_logit=True)
    last_roots, last_logits, last_cache = prefilled(engine, every_logit=False)
    assert last_roots == roots and logits.shape == (3, TINY.vocab_size)
    assert differing_bits(last_logits, logits) == 0 and differing_bits(last_cache, cache) == 0


def test_a_step_has_memory_for_logits_of_full_trees_alone(cpu_backend: Backend) -> None:
    """However many tokens a prefill takes: at 2,048 of them and a vocabulary of 163,840 all logits would be 1.3 GB."""
    plan = build_plan(TINY, "f32", Limits(80, 100))
    assert plan.buffer("logits").shape == (64, TINY.vocab_size) and plan.buffer("tokens").shape == (80,)
    engine = start_engine(TINY, plan, cpu_backend, random_weights(TINY, 3).__getitem__)
    with pytest.raises(KdgenError, match="a step has logits of at most 64 tokens, not 65"):
        engine.prefill([1] * 65, every_logit=True)
    engine.prefill([1] * 80)
    assert engine.length() == 80 and np.isfinite(engine.logits(1)).all()


def test_operations_of_a_prefill_count_a_row_of_logits_a_chunk(cpu_backend: Backend) -> None:
    def operations(chunk: int) -> int:
        plan = build_plan(TINY, "bf16", Limits(chunk, 64))
        return prefill_operations(start_engine(TINY, plan, cpu_backend, random_weights(TINY, 3).__getitem__), 32)

    plan = build_plan(TINY, "bf16")
    ends = sum(plan.kernel(name).cost.operations(1) for name in ("rmsnorm_logits", "lm_head", "argmax", "sample"))
    assert operations(8) - operations(32) == 3 * ends
