"""What PTX's arithmetic instructions compute, for all threads at once: registers are arrays of uint64 that hold their bits.

Docstrings name the section of the PTX ISA that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kdgen.errors import KdgenError
from kdgen.verify.ptx.parse import TYPE_BITS

Bits = npt.NDArray[np.uint64]
CANONICAL_NAN = 0x7FFFFFFF


def masked(values: Bits, bits: int) -> Bits:
    return values if bits == 64 else values & np.uint64((1 << bits) - 1)


def _signed(values: Bits, bits: int) -> npt.NDArray[np.int64]:
    up = np.uint64(64 - bits)
    return (values << up).view(np.int64) >> np.int64(64 - bits)


def _floats(values: Bits) -> npt.NDArray[np.float32]:
    return values.astype(np.uint32).view(np.float32)


def _bits_of(values: npt.NDArray[np.float32]) -> Bits:
    bits = values.view(np.uint32).astype(np.uint64)
    return np.where(np.isnan(values), np.uint64(CANONICAL_NAN), bits)


def evaluate(words: Sequence[str], operands: Sequence[Bits]) -> Bits:
    """The result of the instruction whose opcode has these ``words``, e.g. ``mad.lo.s32``. Raises KdgenError for one not known here."""
    known = _FLOAT.get(".".join(words)) or _WHOLE.get(".".join(words))
    if known is not None:
        return known(*operands)
    if words[0] in ("mov", "cvta"):
        return operands[0]
    if words[0] == "cvt" and len(words) == 3:
        return _convert(words[1], words[2], operands[0])
    if words[0] == "setp" and len(words) == 3 and words[1] in _RELATIONS:
        return _compare(words[1], words[2], *operands)
    if words[0] == "selp":
        return np.where(operands[2] != 0, operands[0], operands[1])
    if words[-1] in ("f32", "f64", "f16") or words[0] not in _INTEGER:
        raise KdgenError(f"the interpreter of PTX does not know {'.'.join(words)}")
    return _INTEGER[words[0]](words, *operands)


# ---- floating point ---------------------------------------------------------------------------------------------------


def round_bf16(values: Bits) -> Bits:
    """cvt.rn.bf16: to nearest even; a NaN becomes the canonical 0x7fff."""
    low, odd = values & np.uint64(0xFFFF), values >> np.uint64(16) & np.uint64(1)
    up = (low > 0x8000) | ((low == 0x8000) & (odd == 1))
    rounded = (values >> np.uint64(16)) + up.astype(np.uint64)
    return np.where(np.isnan(_floats(values)), np.uint64(0x7FFF), masked(rounded, 16))


def _pack_bf16(high: Bits, low: Bits) -> Bits:
    """cvt: of cvt.rn.bf16x2.f32 d, a, b, a goes to the upper half."""
    return round_bf16(high) << np.uint64(16) | round_bf16(low)


def _exp2(values: Bits) -> Bits:
    """ex2.approx.ftz.f32, rounded to nearest here: subnormal inputs and results become zeros."""
    tiny = np.float32(np.finfo(np.float32).tiny)
    x = _floats(values)
    x = np.where(np.abs(x) < tiny, np.float32(0), x)
    with np.errstate(over="ignore", under="ignore"):
        exact = np.exp2(x.astype(np.float64))
        result = exact.astype(np.float32)
    return _bits_of(np.where(exact < tiny, np.float32(0), result))


def _float(operation: Callable[..., Any]) -> Callable[..., Bits]:
    def compute(*operands: Bits) -> Bits:
        with np.errstate(all="ignore"):
            return _bits_of(operation(*(_floats(each) for each in operands)))

    return compute


def _max(a: Bits, b: Bits) -> Bits:
    """max.f32: a NaN loses against a number, and +0 is larger than -0."""
    x, y = _floats(a), _floats(b)
    larger = np.where(x > y, a, np.where(y > x, b, a & b))  # equal numbers differ in the sign of zero alone
    larger = np.where(np.isnan(x), b, np.where(np.isnan(y), a, larger))
    return np.where(np.isnan(x) & np.isnan(y), np.uint64(CANONICAL_NAN), larger)


_FLOAT: dict[str, Callable[..., Bits]] = {
    "add.f32": _float(np.add), "add.rn.f32": _float(np.add), "sub.rn.f32": _float(np.subtract), "mul.rn.f32": _float(np.multiply),
    "max.f32": _max, "ex2.approx.ftz.f32": _exp2, "cvt.rn.bf16.f32": round_bf16, "cvt.rn.bf16x2.f32": _pack_bf16,
    "cvt.f32.bf16": lambda a: masked(a, 16) << np.uint64(16),
}  # fmt: skip

# ---- integers, bits -----------------------------------------------------------------------------------------


def _lop3(a: Bits, b: Bits, c: Bits, table: Bits) -> Bits:
    """lop3: bit ``4 a + 2 b + c`` of the table, for each bit of a, b and c."""
    result = np.zeros_like(a)
    for entry in range(8):
        chosen = np.full_like(a, np.uint64(0xFFFFFFFF))
        for operand, weight in ((a, 4), (b, 2), (c, 1)):
            chosen = chosen & (operand if entry & weight else ~operand)
        result |= np.where(table >> np.uint64(entry) & np.uint64(1), chosen, np.uint64(0))
    return masked(result, 32)


def _prmt(a: Bits, b: Bits, selector: Bits) -> Bits:
    """prmt.b32: four bytes chosen from the eight of {b, a}; bit 3 of a choice repeats the byte's sign."""
    both, result = masked(b, 32) << np.uint64(32) | masked(a, 32), np.zeros_like(a)
    for place in range(4):
        choice = selector >> np.uint64(4 * place) & np.uint64(15)
        byte = both >> (np.uint64(8) * (choice & np.uint64(7))) & np.uint64(0xFF)
        signs = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
        result |= np.where(choice & np.uint64(8), signs, byte) << np.uint64(8 * place)
    return result


def _bfe(a: Bits, begin: Bits, length: Bits) -> Bits:
    """bfe.u32."""
    ones: Bits = (np.uint64(1) << (length & np.uint64(0xFF))) - np.uint64(1)
    result: Bits = masked(a, 32) >> (begin & np.uint64(0xFF)) & ones
    return result


def _bfi(bits: int) -> Callable[..., Bits]:
    """bfi: the lowest ``length`` bits of a take the place of b's from bit ``begin`` on."""

    def insert(a: Bits, b: Bits, begin: Bits, length: Bits) -> Bits:
        ones: Bits = np.uint64((1 << int(length[0])) - 1) << begin  # both are constants in all that NVRTC writes here
        result: Bits = (b & ~ones) | (a << begin & ones)
        return masked(result, bits)

    return insert


def _shift(words: Sequence[str], a: Bits, count: Bits) -> Bits:
    """shl, shr: counts of the width and more move everything out."""
    bits = TYPE_BITS[words[-1]]
    amount = np.minimum(masked(count, 32), np.uint64(bits))
    halves = amount // np.uint64(2), amount - amount // np.uint64(2)  # NumPy leaves a shift by 64 undefined
    if words[0] == "shl":
        return masked(a << halves[0] << halves[1], bits)
    if words[-1].startswith("s"):
        return (_signed(a, bits) >> halves[0].view(np.int64) >> halves[1].view(np.int64)).view(np.uint64)
    return masked(a, bits) >> halves[0] >> halves[1]


def _typed(words: Sequence[str], value: Bits) -> Bits:
    bits = TYPE_BITS[words[-1]]
    return _signed(value, bits).view(np.uint64) if words[-1].startswith("s") else masked(value, bits)


def _multiply(words: Sequence[str], a: Bits, b: Bits) -> Bits:
    if words[1] not in ("lo", "wide") or (words[1] == "wide" and TYPE_BITS[words[-1]] > 32):
        raise KdgenError(f"the interpreter of PTX does not know {'.'.join(words)}")
    return _typed(words, a) * _typed(words, b)


def _extreme(words: Sequence[str], a: Bits, b: Bits) -> Bits:
    x, y = _typed(words, a), _typed(words, b)
    less = x.view(np.int64) < y.view(np.int64) if words[-1].startswith("s") else x < y
    return np.where(less == (words[0] == "min"), x, y)


_WHOLE: dict[str, Callable[..., Bits]] = {"lop3.b32": _lop3, "prmt.b32": _prmt, "bfe.u32": _bfe, "bfi.b32": _bfi(32), "bfi.b64": _bfi(64)}
_INTEGER: dict[str, Callable[..., Bits]] = {
    "add": lambda _, a, b: a + b,
    "sub": lambda _, a, b: a - b,
    "mul": _multiply,
    "mad": lambda words, a, b, c: _multiply(words, a, b) + c,
    "and": lambda _, a, b: a & b,
    "or": lambda _, a, b: a | b,
    "xor": lambda _, a, b: a ^ b,
    "not": lambda words, a: ~a if words[-1] != "pred" else a ^ np.uint64(1),
    "neg": lambda _, a: np.uint64(0) - a,
    "shl": _shift,
    "shr": _shift,
    "min": _extreme,
    "max": _extreme,
}


def _convert(to: str, source: str, value: Bits) -> Bits:
    """cvt between integers: extended as the source's type says, then cut."""
    if to[0] not in "us" or source[0] not in "us":
        raise KdgenError(f"the interpreter of PTX does not know cvt.{to}.{source}")
    return masked(_typed([source], value), TYPE_BITS[to])


def _compare(relation: str, kind: str, a: Bits, b: Bits) -> Bits:
    if kind == "f32":
        with np.errstate(invalid="ignore"):
            return _related(relation, _floats(a), _floats(b))
    x, y = _typed([kind], a), _typed([kind], b)
    return _related(relation, x.view(np.int64), y.view(np.int64)) if kind.startswith("s") else _related(relation, x, y)


def _related(relation: str, x: npt.NDArray[Any], y: npt.NDArray[Any]) -> Bits:
    return np.asarray(_RELATIONS[relation](x, y)).astype(np.uint64)


_RELATIONS: dict[str, Callable[..., Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
