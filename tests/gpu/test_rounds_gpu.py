"""Rounds as CUDA graphs: the bits of plain decoding, and a host that waits for nothing while it starts them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from kdgen.backends.base import Backend, Pointer
from kdgen.codegen.source import Source
from kdgen.drafters.base import DeviceDraftRequest
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Limits
from kdgen.runtime.budget import AutoBudget, Budgets, FixedBudget
from kdgen.runtime.decode import decode_plain, decode_rounds
from kdgen.runtime.pipeline import start_engine
from kdgen.runtime.request import Request
from kdgen.runtime.rounds import Rounds
from kdgen.spec.model import load_spec
from kdgen.spec.sampling import Sampling
from kdgen.verify.decoding.recording import differing_bits
from kdgen.weights.random import random_weights

pytestmark = pytest.mark.gpu

SPEC = load_spec("tiny-dflash")
BLOCK = DeviceDraftRequest(7, 8)
PROMPT = list(range(3, 40))
BUDGETS = (0, 7, 15, 31, 63)
SPIN = Source(
    "spin",
    """#include "primitives.cuh"
namespace spin {
extern "C" __global__ void __launch_bounds__(32) spin(int* y, int millions) {
  const long long begin = clock64();
  while (clock64() - begin < millions * 1000000ll) {}
  if (threadIdx.x == 0) *y = millions;
}
}
""",
    32,
    0,
)


def rounds_of(backend: Backend, compute: Compute = "bf16", context: int = 400) -> Rounds:
    plan = build_plan(SPEC, compute, Limits(max_context=context))
    return Rounds(start_engine(SPEC, plan, backend, random_weights(SPEC, 11).__getitem__), BLOCK, BUDGETS)


@pytest.mark.parametrize("compute", ["f32", "bf16"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_p=0.9, seed=7)], ids=["greedy", "sampled"])
def test_tokens_and_cache_bits_of_plain_decoding(cuda_backend: Backend, compute: Compute, sampling: Sampling) -> None:
    rounds = rounds_of(cuda_backend, compute)
    engine = rounds.engine
    plain = decode_plain(engine, Request(PROMPT, 200, sampling=sampling))
    rows = np.ascontiguousarray(engine.cache_rows())

    def auto(root: int) -> Budgets:
        return AutoBudget(rounds.costs(root))

    choosers = [lambda _, budget=budget: FixedBudget(budget) for budget in BUDGETS]
    for chooser in (*choosers, auto):
        got = decode_rounds(rounds, Request(PROMPT, 200, sampling=sampling), chooser)
        assert got.tokens == plain.tokens
        assert engine.length() == rows.shape[1] and differing_bits(np.ascontiguousarray(engine.cache_rows()), rows) == 0
    stop = plain.tokens[50]
    expected = plain.tokens[: plain.tokens.index(stop) + 1]
    assert decode_rounds(rounds, Request(PROMPT, 200, stop=(stop,), sampling=sampling), choosers[2]).tokens == expected
    assert engine.length() == len(PROMPT) + len(expected) - 1


def test_up_to_the_end_of_the_context(cuda_backend: Backend) -> None:
    rounds = rounds_of(cuda_backend, context=len(PROMPT) + 40)
    plain = decode_plain(rounds.engine, Request(PROMPT, 100))
    assert decode_rounds(rounds, Request(PROMPT, 100), lambda _: FixedBudget(63)).tokens == plain.tokens


def test_starting_rounds_waits_for_nothing(cuda_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds are started while the GPU is held up by a kernel that spins for about a tenth of a second."""
    cuda_backend.load([SPIN])
    sink = cuda_backend.to_device(np.zeros(1, np.int32), "i32")
    rounds = rounds_of(cuda_backend)
    root = rounds.engine.prefill(PROMPT)
    rounds.begin(len(PROMPT))
    for _ in range(2):  # the second time, everything is loaded
        cuda_backend.synchronize()
        began = time.perf_counter()
        cuda_backend.launch("spin", (1, 1, 1), 32, 0, [Pointer(sink), 200])
        rounds.start(15)
        rounds.start(7)
        started = time.perf_counter() - began
        first, second = rounds.finish(), rounds.finish()
        finished = time.perf_counter() - began
        rounds.end(len(PROMPT), root)
    assert finished > 0.08 and started < finished / 4, f"starting took {started:.3f} s of {finished:.3f} s"
    assert (first.budget, second.budget) == (15, 7)

    waits: list[str] = []
    for name in ("synchronize", "to_host", "write"):
        function = getattr(cuda_backend, name)

        def watched(*args: Any, name: str = name, function: Any = function) -> Any:
            waits.append(name)
            return function(*args)

        monkeypatch.setattr(cuda_backend, name, watched)
    decoding: list[int] = []
    decode_rounds(rounds, Request(PROMPT, 100), lambda _: FixedBudget(15), emit=lambda _: decoding.append(len(waits)))
    assert len(decoding) > 3 and len(set(decoding[2:])) == 1, "between rounds nothing is written, read or waited for but their results"
