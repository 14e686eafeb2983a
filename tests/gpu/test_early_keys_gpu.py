"""Attention brings old keys before it waits for the kernel before it, and nothing else: not this step's keys, and not its queries."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from kdgen.backends.base import Launch, Pointer
from kdgen.backends.cuda import CudaBackend
from kdgen.bench.parts import run_step
from kdgen.codegen.source import Source
from kdgen.plan.build import build_plan
from kdgen.plan.cache_layout import from_tiles, to_tiles
from kdgen.plan.ir import Limits
from kdgen.runtime.pipeline import start_engine
from kdgen.verify.decoding.recording import differing_bits
from kdgen.verify.variants import variants
from kdgen.weights.random import random_weights

pytestmark = pytest.mark.gpu

SPEC = next(spec for spec in variants() if spec.name == "tiny-wgmma")
#: Lets attention start at once, and copies its queries and its layer's cache to their places long after.
LATE = Source(
    "late",
    """#include "primitives.cuh"
namespace late {
extern "C" __global__ void __launch_bounds__(256) late(
    const uint4* queries, uint4* query, int query_pieces, const uint4* rows, uint4* cache, int cache_pieces) {
  begin_after_previous_kernel();
  const long long begin = clock64();
  while (clock64() - begin < 200000) {}
  for (int i = threadIdx.x; i < query_pieces; i += 256) query[i] = queries[i];
  for (int i = threadIdx.x; i < cache_pieces; i += 256) cache[i] = rows[i];
}
}
""",
    256,
    0,
    overlaps=True,
)


@pytest.mark.parametrize("context", [64, 130, 256, 321])
@pytest.mark.parametrize("program, rows", [("decode", 1), ("verify", 8), ("prefill", 60)])
def test_what_is_new_is_waited_for(cuda_backend: CudaBackend, program: str, rows: int, context: int) -> None:
    if cuda_backend.arch != "sm_90a":
        pytest.skip(f"{cuda_backend.arch} has no wgmma")
    limits = Limits(64, 512)
    engine = start_engine(SPEC, build_plan(SPEC, "bf16", limits), cuda_backend, random_weights(SPEC, 3).__getitem__)
    cuda_backend.load([LATE])
    if program == "prefill":
        engine.fill(context)
        engine.prefill(list(range(1, rows + 1)))
    else:
        assert run_step(engine, context, rows) == program
    layer = SPEC.num_hidden_layers - 1
    work = [each for each in engine.work(program, rows, context + rows) if isinstance(each, Launch)]
    attention = [each for each in work if each.kernel.startswith("mla_")]  # and what joins its splits
    attention = attention[-len(attention) // SPEC.num_hidden_layers :]
    assert len(attention) == (2 if program == "decode" else 4), "steps of up to 64 rows launch attention twice"
    expected = {name: engine.read(name) for name in ("latent", "attention")}

    query, cache = engine._buffers["query"], engine._buffers["kv_cache"]
    numbers = math.prod(cache.shape[1:])
    kept = [cuda_backend.to_host(each) for each in (query, cache)]
    copies = [cuda_backend.to_device(values, "bf16") for values in (kept[0], np.ascontiguousarray(kept[1][layer]))]
    lost = from_tiles(kept[1][layer]).copy()
    lost.reshape(-1, cache.shape[-1])[context:] = np.nan  # the sequence's pages are all there are, in order
    work = [
        Launch("late", (1, 1, 1), 256, 0, (
            Pointer(copies[0]), Pointer(query), math.prod(query.shape) // 8,
            Pointer(copies[1]), Pointer(cache, layer * numbers * 2), numbers // 8,
        )),
        *attention,
    ]  # fmt: skip
    replay = cuda_backend.record(work)
    for _ in range(3):
        cuda_backend.write(cache, to_tiles(lost), layer * numbers)
        cuda_backend.write(query, np.full(query.shape, np.nan, ml_dtypes.bfloat16))
        replay()
        assert {name: differing_bits(engine.read(name), values) for name, values in expected.items()} == dict.fromkeys(expected, 0)
