"""What launches that overlap may use: the checker names kernel, line, buffer and the launch that may still run, and lets the rest pass."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest

from kdgen.backends.base import Pointer
from kdgen.backends.cpu import CpuBackend
from kdgen.codegen.source import Source
from kdgen.errors import BackendError, CompileError

THREADS = 64
KERNEL = """#include "primitives.cuh"
namespace {name} {{
extern "C" __global__ void __launch_bounds__({threads}) {name}(int* a, int* b, int* c, const int* __restrict__ host) {{
  const int t = threadIdx.x;
  (void)t;
{body}
}}
}}
"""
WAIT, ALLOW, BEGIN = "  griddepcontrol_wait();\n", "  griddepcontrol_launch_dependents();\n", "  begin_after_previous_kernel();\n"
WRITE, FENCE = "  if (!blockIdx.x) a[t] = t;\n", "  __threadfence();\n  __syncthreads();\n"
LATE = WAIT + ALLOW  # lets the next one begin once all before it is over
SET_UP = "  SHARED_ARRAY(u64, ready, [1]);\n  if (t == 0) { mbarrier_init(ready, 32); fence_proxy_async(); }\n  __syncthreads();\n"


@dataclass(frozen=True)
class Case:
    """Bodies of kernels that run one after another, two blocks each of ``early`` named parameters; the last one's line marked BUG is named.

    ``says`` is the error's beginning; nothing: they may run.
    """

    bodies: tuple[str, ...]
    says: str = ""
    early: tuple[str, ...] = ("a", "b", "c")


READ, WRITE_EARLY = "  if (a[t]) c[blockIdx.x * 64 + t] = 1;\n", "  if (!blockIdx.x) a[t] = 1;  // BUG\n"
READ_A = "  const int early = a[t];  // BUG\n"
USE = "  c[blockIdx.x * 64 + t] = early;\n"
EARLY = ALLOW + READ_A + WAIT + USE
SOME_WAIT = "  if (t < 32) griddepcontrol_wait();\n"
ROLES = SET_UP + ALLOW + "  if (t < 32) { DO\n    return;\n  }\n  mbarrier_wait_parity(ready, 0);\n" + READ_A + USE
TOO_EARLY, NO_WRITE = "too early: 4-byte read of a ", "too early: 4-byte write of a .*"
CASES = {
    "read_after_the_wait": Case((BEGIN + WRITE, BEGIN + READ_A + USE)),
    "read_before_the_wait": Case((LATE + WRITE, EARLY), TOO_EARLY),
    "read_that_the_plan_leaves_out": Case((BEGIN, EARLY), "too early: .* the plan does not say so", ("b",)),
    "what_only_the_host_writes": Case((BEGIN, ALLOW + "  const int early = host[t];\n" + WAIT + USE), early=()),
    # what another launch ago wrote is over where the one between lets this one begin only then
    "old_behind_a_late_launch": Case((BEGIN + WRITE, LATE, EARLY)),
    "old_behind_one_that_lets_nobody_begin": Case((BEGIN + WRITE, WAIT, EARLY)),
    "not_old_behind_an_early_one": Case((LATE + WRITE, BEGIN, EARLY), TOO_EARLY),
    "not_old_behind_one_with_an_early_block": Case(
        (LATE + WRITE, "  if (blockIdx.x) griddepcontrol_wait();\n" + ALLOW + WAIT, EARLY), TOO_EARLY
    ),
    # handed over: written, fenced, met, and then the next one may begin
    "handed_over": Case((WAIT + WRITE + FENCE + ALLOW, EARLY)),
    "handed_over_two_launches_on": Case((WAIT + WRITE + FENCE + ALLOW, BEGIN, EARLY)),
    "fence_behind_the_permission": Case((WAIT + WRITE + "  __syncthreads();\n" + ALLOW + FENCE, EARLY), TOO_EARLY),
    "store_behind_the_permission": Case((WAIT + FENCE + ALLOW + WRITE, EARLY), TOO_EARLY),
    "fence_without_a_meeting": Case((WAIT + WRITE + "  __threadfence();\n" + ALLOW, EARLY), TOO_EARLY),
    "handed_over_is_not_to_write": Case((WAIT + WRITE + FENCE + ALLOW, ALLOW + WRITE_EARLY + WAIT), NO_WRITE + "writes"),
    # writes before the wait
    "write_after_read": Case((BEGIN + READ, ALLOW + WRITE_EARLY + WAIT), NO_WRITE + "reads"),
    "write_after_write": Case((BEGIN + WRITE, ALLOW + WRITE_EARLY + WAIT), NO_WRITE + "writes"),
    "write_of_what_is_old": Case((BEGIN + READ, LATE, ALLOW + WRITE_EARLY + WAIT)),
    # who has waited
    "a_thread_waits_for_its_block": Case((LATE + WRITE, ALLOW + SOME_WAIT + "  __syncthreads();\n" + READ_A + USE)),
    "a_warp_waits_for_itself": Case((LATE + WRITE, ALLOW + SOME_WAIT + READ_A + USE), TOO_EARLY),
    "a_shuffle_orders_nothing": Case(
        (LATE + WRITE, ALLOW + "  if (t % 32 == 0) griddepcontrol_wait();\n  __shfl_sync(~0u, t, 0);\n" + READ_A + USE), TOO_EARLY
    ),
    "a_syncwarp_orders": Case((LATE + WRITE, ALLOW + "  if (t % 32 == 0) griddepcontrol_wait();\n  __syncwarp();\n" + READ_A + USE)),
    "an_mbarrier_orders": Case((LATE + WRITE, ROLES.replace("DO", "griddepcontrol_wait(); mbarrier_arrive(ready);"))),
    "an_arrival_before_the_wait": Case((LATE + WRITE, ROLES.replace("DO", "mbarrier_arrive(ready); griddepcontrol_wait();")), TOO_EARLY),
    "a_barrier_of_warps_orders": Case((LATE + WRITE, ALLOW + SOME_WAIT + "  barrier_sync(1, 64);\n" + READ_A + USE)),
    "a_block_that_does_not_wait": Case(
        (BEGIN, ALLOW + "  if (blockIdx.x == 0) griddepcontrol_wait();\n"), "unordered: the block has ended"
    ),
}


def sources(name: str, case: Case) -> list[Source]:
    names = [f"{name}_{i}" for i in range(len(case.bodies))]
    texts = [KERNEL.format(name=each, threads=THREADS, body=body.rstrip()) for each, body in zip(names, case.bodies, strict=True)]
    return [Source(each, text, THREADS, 0, overlaps=True, early=case.early) for each, text in zip(names, texts, strict=True)]


@pytest.fixture(scope="module")
def every_source() -> list[Source]:
    return [source for name, case in CASES.items() for source in sources(name, case)]


def launch(backend: CpuBackend, kernels: list[Source]) -> None:
    arrays = [backend.to_device(np.ones(2 * THREADS, np.int32), "i32") for _ in range(4)]
    for array, name in zip(arrays, ("a", "b", "c", "host"), strict=True):
        backend.label(array, name)
    for kernel in kernels:
        backend.launch(kernel.name, (2, 1, 1), THREADS, 0, [Pointer(array) for array in arrays])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_overlapping_launches(name: str, seed: int, every_source: list[Source]) -> None:
    case, backend = CASES[name], CpuBackend("checker", seed=seed)
    backend.load(every_source)
    kernels = sources(name, case)
    if not case.says:
        return launch(backend, kernels)
    with pytest.raises(BackendError, match=case.says) as caught:
        launch(backend, kernels)
    lines = [i for i, line in enumerate(kernels[-1].text.splitlines(), 1) if "// BUG" in line]
    assert str(caught.value).startswith(f"kernel {kernels[-1].name} block ("), caught.value
    if lines:
        assert re.search(rf"at {kernels[-1].name}\.cu:{lines[0]}: ", str(caught.value)), caught.value
    if "kernel" in str(caught.value).partition("too early")[2] and "previous kernel" not in str(caught.value):
        assert re.search(rf"kernel {name}_\d before it (reads|writes) \({name}_\d\.cu:\d+\)", str(caught.value)), caught.value


def test_the_host_ends_what_overlaps(every_source: list[Source]) -> None:
    """What the host copies or waits for in between ends every launch before it."""
    backend = CpuBackend("checker")
    backend.load(every_source)
    first, second = sources("store_behind_the_permission", CASES["store_behind_the_permission"])
    array = [backend.to_device(np.ones(2 * THREADS, np.int32), "i32") for _ in range(4)]
    args = [Pointer(each) for each in array]
    backend.launch(first.name, (2, 1, 1), THREADS, 0, args)
    backend.synchronize()
    backend.launch(second.name, (2, 1, 1), THREADS, 0, args)
    assert backend.unused_early(second.name) == ("b", "c")


def test_plain_mode_does_not_look(every_source: list[Source]) -> None:
    backend = CpuBackend("plain")
    backend.load(every_source)
    launch(backend, sources("read_before_the_wait", CASES["read_before_the_wait"]))


def test_early_names_are_parameters() -> None:
    (kernel,) = sources("unknown", Case((BEGIN,), early=("a", "nobody")))
    with pytest.raises(CompileError, match="kernel unknown_0 has no parameter nobody"):
        CpuBackend("checker").load([kernel])
