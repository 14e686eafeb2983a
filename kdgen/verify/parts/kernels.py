"""Kernels alone, on the backend that was asked for and under the checker."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np

from kdgen.backends import open_backend
from kdgen.backends.base import Backend
from kdgen.errors import BackendError
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Family, Kernel, Plan
from kdgen.spec.model import Spec
from kdgen.verify.kernels.attention import ATTENTION_TEMPLATES
from kdgen.verify.kernels.check import KernelCheck, check_kernel, load_kernels
from kdgen.verify.kernels.harness import Size
from kdgen.verify.kernels.text_rules import text_problems
from kdgen.verify.plans import title_of
from kdgen.verify.report.checks import Check, Say, Status, finite

CHECKER = "cpu-checker"
CHECKER_TOKENS = (1, 9)
#: The latent width from which attention splits are of 128 keys, long enough that both of its stages are loaded again, and the one of
#: published models, for wgmma's larger shape.
WIDE_LATENTS: dict[Family, int] = {"generic": 256, "sm_90a": 512}


def kernels_alone(backend: Backend, spec: Spec, plan: Plan, size: Size, tokens: Sequence[int], say: Say) -> Iterator[Check]:
    title = title_of(spec, plan)
    say(f"{title} {plan.compute}: compiling {len(plan.kernels)} kernels")
    problems = text_problems(load_kernels(backend, plan))
    status: Status = "failed" if problems else "ok"
    detail = "" if problems else "no atomic operation, no inexact function"
    yield Check(title, plan.compute, "kernel", "texts", "text", status, detail=detail, why="; ".join(problems[:3]))
    for kernel in plan.kernels:
        say(f"{title} {plan.compute}: kernel {kernel.name}")
        began = perf_counter()
        found = check_kernel(backend, spec, plan, kernel, inputs_of(0, kernel), size, tokens)
        ranks = "" if plan.shard.whole else f", {plan.shard.ranks} ranks"
        detail = f"{kernel.template}{', a slice' if found.sliced else ''}{ranks}"
        yield _as_check(title, plan.compute, "kernel", backend, found, detail, perf_counter() - began)


def inputs_of(seed: int, kernel: Kernel) -> np.random.Generator:
    """Random inputs that depend on the kernel's name, not on what other kernels there are."""
    return np.random.default_rng([seed, zlib.crc32(kernel.name.encode())])


def _as_check(title: str, compute: str, part: str, backend: Backend, found: KernelCheck, detail: str, seconds: float) -> Check:
    measured = found.ran and found.tolerance > 0
    figure, tolerance = (finite(found.error), found.tolerance) if measured else (None, None)
    status: Status = "ok" if found.ok else "failed" if found.ran else "skipped"
    return Check(title, compute, part, found.kernel, backend.description, status, figure, tolerance, detail, found.why, seconds, found.bits)


def kernels_under_checker(spec: Spec, plan: Plan, say: Say) -> Iterator[Check]:
    """Every kernel once where races, stray accesses and missing waits are seen; a line each only for those that fail."""
    title = title_of(spec, plan)
    say(f"{title} {plan.compute}: compiling {len(plan.kernels)} kernels for the checker")
    began = perf_counter()
    backend: Backend | None = None
    try:
        backend = open_backend(CHECKER, seed=1)
        found = _checked(backend, spec, plan, say)
        if plan.compute == "bf16" and plan.shard.whole and spec.kv_lora_rank < WIDE_LATENTS[plan.family]:
            wide = spec.model_copy(update={"kv_lora_rank": WIDE_LATENTS[plan.family]})
            wide_plan = build_plan(wide, plan.compute).on(plan.family)
            attention = tuple(kernel for kernel in wide_plan.kernels if kernel.template in ATTENTION_TEMPLATES)
            found += _checked(backend, wide, replace(wide_plan, kernels=attention), say)
    except BackendError as error:
        where = backend.description if backend else CHECKER
        yield Check(title, plan.compute, "checker", "all kernels", where, "skipped", why=str(error), seconds=perf_counter() - began)
        return
    seconds = perf_counter() - began
    bad = [check for check in found if not check.ok]
    for check in bad:
        yield _as_check(title, plan.compute, "checker", backend, check, check.template, seconds / len(bad))
    if not bad:
        ranks = "" if plan.shard.whole else f" of {plan.shard.ranks} ranks"
        detail = (
            f"{len(found)} kernels{ranks}: no race, no uninitialised, misaligned or out-of-bounds access, no missing wait; the same results"
        )
        bits = sum(check.bits for check in found)
        yield Check(title, plan.compute, "checker", "all kernels", backend.description, "ok", detail=detail, seconds=seconds, bits=bits)


def _checked(backend: Backend, spec: Spec, plan: Plan, say: Say) -> list[KernelCheck]:
    load_kernels(backend, plan)
    found = []
    for kernel in plan.kernels:
        say(f"{spec.name} {plan.compute}: kernel {kernel.name} under the checker")
        found.append(check_kernel(backend, spec, plan, kernel, inputs_of(1, kernel), tokens=_checker_tokens(kernel)))
    return found


def _checker_tokens(kernel: Kernel) -> tuple[int, ...]:
    """Few and many; where a kernel brings its inputs another way from some number of tokens on, that number, too."""
    linear = getattr(kernel.params, "linear", kernel.params)
    return tuple(sorted({*CHECKER_TOKENS, getattr(linear, "min_tokens_for_lines", CHECKER_TOKENS[0])}))
