"""Primitives that compute: their PTX interpreted, against the CPU side's results on the same inputs, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kdgen.backends.base import Backend, Pointer
from kdgen.codegen.source import Source
from kdgen.verify.ptx.machine import Machine
from kdgen.verify.ptx.memory import Memory
from kdgen.verify.ptx.parse import Kernel

Words = npt.NDArray[np.uint32]
INPUTS, OUTPUTS = 4, 8  #: words of a thread


@dataclass(frozen=True)
class Arithmetic:
    """A kernel in which each thread computes words ``o[0]`` to ``o[7]`` from words ``a``, ``b``, ``c`` and ``d`` of its own.

    ``covers`` are the signatures that it calls, ``warps`` how many warps run. ``inputs``: any words with all kinds of floats, finite
    floats whose sums have no NaN, or exponents. ``ulps``: how far its floats may be apart, for an instruction that is not exact.
    """

    name: str
    covers: tuple[str, ...]
    body: str
    warps: int = 64
    inputs: Literal["any", "finite", "exponents"] = "any"
    ulps: int = 0

    @property
    def source(self) -> Source:
        text = f"""#include "primitives.cuh"
namespace {self.name} {{
extern "C" __global__ void __launch_bounds__(32) {self.name}(const u32* x, u32* out) {{
  const int i = blockIdx.x * 32 + threadIdx.x;
  const u32 a = x[{INPUTS} * i], b = x[{INPUTS} * i + 1], c = x[{INPUTS} * i + 2], d = x[{INPUTS} * i + 3];
  u32* o = out + {OUTPUTS} * i;
  {self.body.strip()}
}}
}}
"""
        return Source(self.name, text, 32, 0)


def arithmetic() -> tuple[Arithmetic, ...]:
    return *_within_a_thread(), *_over_a_warp(), *_with_rounds()


def _within_a_thread() -> tuple[Arithmetic, ...]:
    """Conversions, masks, places and exponentials."""
    return (
        Arithmetic(
            "bf16_rounding",
            ("from_float<bf16>(float)", "pack_bf16x2(float, float)", "bf16x2_lo(u32)", "bf16x2_hi(u32)"),
            """
  o[0] = from_float<bf16>(__uint_as_float(a)).bits;
  o[1] = pack_bf16x2(__uint_as_float(a), __uint_as_float(b));
  o[2] = __float_as_uint(bf16x2_lo(a));
  o[3] = __float_as_uint(bf16x2_hi(a));""",
            warps=256,
        ),
        Arithmetic(
            "to_and_from_float",
            ("to_float(float)", "to_float(bf16)", "from_float<float>(float)", "negative_infinity()"),
            """
  o[0] = __float_as_uint(to_float(__uint_as_float(a)));
  o[1] = __float_as_uint(to_float(bf16{(unsigned short)a}));
  o[2] = __float_as_uint(from_float<float>(__uint_as_float(b)));
  o[3] = __float_as_uint(negative_infinity());""",
        ),
        Arithmetic(
            "masks_and_places",
            ("lop3_and_or(u32, u32, u32)", "swizzled(int, int)", "wgmma_offset(int)"),
            """
  o[0] = lop3_and_or(a, b, c);
  o[1] = lop3_and_or(a >> 4, 0x000f000fu, 0x43004300u);
  o[2] = swizzled((int)(a & 1023u), (int)(b & 7u));
  o[3] = (u32)wgmma_offset((int)(a & 0xffffu));""",
        ),
        Arithmetic("exponentials", ("ex2_approx_ftz(float)",), "o[0] = __float_as_uint(ex2_approx_ftz(__uint_as_float(a)));",
                   inputs="exponents", ulps=1),
    )  # fmt: skip


def _over_a_warp() -> tuple[Arithmetic, ...]:
    """Sums, extremes and fragments of all lanes."""
    return (
        Arithmetic(
            "warp_sums",
            ("warp_sum(float)",),
            "o[0] = __float_as_uint(warp_sum(__uint_as_float(a)));",
            inputs="finite",
        ),
        Arithmetic(
            "warp_extremes",
            ("warp_max(float)", "warp_max(u32)", "warp_min(u32)"),
            """
  o[0] = __float_as_uint(warp_max(__uint_as_float(a)));
  o[1] = warp_max(b);
  o[2] = warp_min(b);""",
        ),
        Arithmetic(
            "uniform_fragments",
            ("uniform_fragment(u32(&)[4], u32)",),
            "u32 r[4]; uniform_fragment(r, a); o[0] = r[0]; o[1] = r[1]; o[2] = r[2]; o[3] = r[3];",
            warps=2,
        ),
    )  # fmt: skip


def _with_rounds() -> tuple[Arithmetic, ...]:
    """Words that ranks send each other, each beside the round it is sent in."""
    return (
        Arithmetic(
            "words_with_rounds",
            ("send_word(u64*, u32, u32)", "word_is_there(const u64*, u32, u32&)"),
            """
  u32 word;
  o[0] = word_is_there((const u64*)(x + 4 * i), a & 2 ? b : c, word);
  o[1] = word;
  send_word((u64*)(o + 2), c, d);""",
            warps=2,
        ),
        Arithmetic(
            "pairs_with_rounds",
            ("send_words(u64*, const float*, u32)", "words_are_there(const u64*, u32, float*)"),
            """
  float values[2] = {__uint_as_float(a), __uint_as_float(c)};
  send_words<2>((u64*)o, values, d);
  o[4] = words_are_there<2>((const u64*)(x + 4 * i), a & 1 ? b : d, values);
  o[5] = __float_as_uint(values[0]);
  o[6] = __float_as_uint(values[1]);
  o[4] = 2 * o[4] + words_are_there<1>((const u64*)(x + 4 * i), a & 1 ? b : d, values);
  o[7] = __float_as_uint(values[0]);""",
            warps=2,
        ),
    )  # fmt: skip


def inputs_of(each: Arithmetic) -> Words:
    """Words [threads, 4] from a seed of its own: random bits, and floats of every kind and beside every edge of rounding."""
    rng = np.random.default_rng(len(each.name))
    shape = (each.warps * 32, INPUTS)
    if each.inputs == "finite":
        values = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 7, shape)
        return values.astype(np.float32).view(np.uint32)
    if each.inputs == "exponents":
        values = np.where(rng.random(shape) < 0.5, rng.uniform(-160, 0, shape), rng.uniform(-127, 20, shape)).astype(np.float32)
        values[:8, 0] = [0, -0.0, -126, np.nextafter(np.float32(-126), np.float32(-200)), -127, -149, -np.inf, 1e-40]
        return values.view(np.uint32)
    words = rng.integers(0, 1 << 32, shape, dtype=np.uint32)
    words = np.where(rng.random(shape) < 0.3, words & np.uint32(0xFFFF0000) | rng.choice([1, 0x7FFF, 0x8000, 0x8001], shape), words)
    special = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFF812345, 1, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000]
    words = np.where(rng.random(shape) < 0.2, rng.choice(special, shape), words).astype(np.uint32)
    if each.name.endswith("rounds"):  # rounds that agree, and that do not
        words[::3, 3] = words[::3, 1]
    return words


def compare(device: Backend, sources: Sequence[Arithmetic], kernels: Sequence[Kernel]) -> Iterator[tuple[Arithmetic, int, str]]:
    """For each kernel how many words were compared, and where they differ, or "". ``device`` is a CPU, with the kernels loaded."""
    by_name = {kernel.name: kernel for kernel in kernels}
    for each in sources:
        x = inputs_of(each)
        ours, theirs = interpreted(each, by_name[each.name], x), on_cpu(device, each, x)
        yield each, ours.size, _difference(each, x, ours, theirs)


def interpreted(each: Arithmetic, kernel: Kernel, x: Words) -> Words:
    memory = Memory()
    given, out = memory.add("x", x), memory.add("out", np.zeros((len(x), OUTPUTS), np.uint32))
    Machine(kernel, [given.address, out.address], memory, threads=32, blocks=each.warps).run()
    return out.words.reshape(len(x), OUTPUTS)


def on_cpu(device: Backend, each: Arithmetic, x: Words) -> Words:
    given = device.to_device(x.view(np.int32), "i32")
    out = device.to_device(np.zeros((len(x), OUTPUTS), np.int32), "i32")
    device.launch(each.name, (each.warps, 1, 1), 32, 0, [Pointer(given), Pointer(out)])
    result: Words = device.to_host(out).view(np.uint32)
    device.free(given)
    device.free(out)
    return result


def _difference(each: Arithmetic, x: Words, ours: Words, theirs: Words) -> str:
    apart = np.abs(ours.astype(np.int64) - theirs.astype(np.int64))  # of floats of one sign
    wrong = np.argwhere(apart > each.ulps)
    if not len(wrong):
        return ""
    thread, word = (int(place) for place in wrong[0])
    given = ", ".join(f"{value:#010x}" for value in x[thread])
    return (
        f"{', '.join(each.covers)}: o[{word}] of thread {thread} is {ours[thread, word]:#010x} by its PTX and {theirs[thread, word]:#010x}"
        f" on the CPU, for a, b, c, d = {given}; {len(wrong)} of {ours.size} words differ"
    )
