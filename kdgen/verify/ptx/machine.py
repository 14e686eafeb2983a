"""An interpreter of PTX for the primitives: threads in lock step, arithmetic computed, hardware operations written down.

A hardware operation (an MMA, a copy, a barrier …) becomes an Event: the instruction with all its qualifiers, and what its operands are
in the names of the kernel's parameters and arrays. Its results are values of their own, whose names say where they come from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kdgen.errors import KdgenError
from kdgen.verify.ptx.alu import Bits, evaluate, masked
from kdgen.verify.ptx.memory import FIRST_SHARED, SHARED_WINDOW, Memory
from kdgen.verify.ptx.parse import TYPE_BITS, Instruction, Kernel

Lanes = npt.NDArray[np.int64]

#: Operations that are written down, and those of them that have results of their own.
_HARDWARE = frozenset({
    "mma", "wgmma", "ldmatrix", "fence", "membar", "mbarrier", "barrier", "bar", "setmaxnreg", "cp", "griddepcontrol", "mapa",
    "createpolicy", "nanosleep", "prefetch", "discard",
})  # fmt: skip
_RESULTS = frozenset({"mma", "ldmatrix", "createpolicy"})
_CLUSTER = 0x40  #: the upper byte of an address in block 0 of a cluster
_ALL = (1 << 64) - 1
_MOST_STEPS = 20_000
_NUMBER = re.compile(r"-?(0x[0-9A-Fa-f]+|\d+)")


class Machine:
    """One launch of ``kernel`` with ``arguments`` (the parameters' bits) for ``blocks`` of ``threads`` each.

    ``specials`` are special registers by name; ``answers`` what each mbarrier.try_wait says, in order. Dynamic shared memory begins at
    ``dynamic_shared``.
    """

    def __init__(
        self, kernel: Kernel, arguments: Sequence[int], memory: Memory, *, threads: int, blocks: int = 1,
        specials: Mapping[str, int] | None = None, answers: Sequence[int] = (), dynamic_shared: int = FIRST_SHARED,
    ) -> None:  # fmt: skip
        self.events: list[str] = []
        self._kernel, self._memory, self._answers = kernel, memory, list(answers)
        self._names = dict(memory.names)
        self._threads = count = threads * blocks
        self._labels = dict(kernel.labels)
        self._parameters = dict(zip(kernel.parameters, arguments, strict=True))
        self._registers: dict[str, Bits] = {}
        number = np.arange(count, dtype=np.uint64)
        self._specials = {name: np.full(count, value, np.uint64) for name, value in (specials or {}).items()}
        self._specials |= {"%tid.x": number % threads, "%ctaid.x": number // threads, "%laneid": number % 32}
        self._specials["%ntid.x"] = np.full(count, threads, np.uint64)
        self._fresh = 0
        self._symbols: dict[str, int] = {}
        offset = FIRST_SHARED
        for each in kernel.shared:
            place = -(-offset // each.align) * each.align if each.size else dynamic_shared
            size = each.size or 4096
            memory.add(each.name, np.zeros(size, np.uint8), SHARED_WINDOW + place)
            self._symbols[each.symbol] = place
            offset = max(offset, place + size)

    def run(self) -> list[str]:
        """Until every thread has returned; the events. Raises KdgenError for an instruction or an access that cannot be."""
        code, next_of = self._kernel.code, np.zeros(self._threads, np.int64)
        for _ in range(_MOST_STEPS):
            place = int(next_of.min())
            if place >= len(code):
                return self.events
            # threads that are behind go on first, so those that a branch has parted meet again
            active = np.flatnonzero(next_of == place)
            each = code[place]
            if each.guard:
                taken = self._registers[each.guard][active] != each.negated
                chosen = active[taken]
            else:
                chosen = active
            next_of[active] = place + 1
            if each.words[0] in ("ret", "exit"):
                next_of[chosen] = len(code)
            elif each.words[0] == "bra":
                next_of[chosen] = self._labels[each.operands[0]]
            elif len(chosen):
                try:
                    self._step(each, chosen)
                except KdgenError as error:
                    raise KdgenError(f"{each.opcode} {', '.join(each.operands)}: {error}") from error
        raise KdgenError(f"no end after {_MOST_STEPS} steps")

    # ---- one instruction ------------------------------------------------------

    def _step(self, each: Instruction, active: Lanes) -> None:
        words = each.words
        if words[0] in ("ld", "st") and "async" not in words:
            self._access(each, active)
        elif words[0] in ("shfl", "redux"):
            self._collective(each, active)
        elif words[0] in _HARDWARE or (words[0] == "st" and "async" in words):
            self._hardware(each, active)
        elif words[0] == "cvta":
            shift = SHARED_WINDOW if "shared" in words else 0
            value = self._read(each.operands[1], active)
            self._write(each.operands[0], active, value - np.uint64(shift) if "to" in words else value + np.uint64(shift))
        else:
            operands = [self._read(operand, active) for operand in each.operands[1:]]
            self._write(each.operands[0], active, evaluate(words, operands))

    def _access(self, each: Instruction, active: Lanes) -> None:
        words = each.words
        loads = words[0] == "ld"
        values, address = (each.operands[0], each.operands[1]) if loads else (each.operands[1], each.operands[0])
        if "param" in words:
            name = address.strip("[]")
            bits = TYPE_BITS[words[-1]]
            value = np.full(len(active), self._parameters[name], np.uint64)
            self._write(values, active, evaluate(["cvt", "s64", words[-1]], [value]) if words[-1].startswith("s") else masked(value, bits))
            return
        size = TYPE_BITS[words[-1]] // 8
        places = self._read(address, active) + np.uint64(SHARED_WINDOW if "shared" in words else 0)
        registers = [register.strip() for register in values.strip("{}").split(",")]
        if (places % np.uint64(size * len(registers))).any():
            raise KdgenError("an address is not aligned")
        for number, register in enumerate(registers):
            at = places + np.uint64(size * number)
            if loads:
                self._write(register, active, self._memory.load(at, size))
            else:
                self._memory.store(at, size, self._read(register, active))
        if each.asm:
            self._record(each, active)

    def _collective(self, each: Instruction, active: Lanes) -> None:
        """PTX ISA, shfl.sync (butterflies) and redux.sync, of whole warps."""
        words = each.words
        if len(active) % 32:
            raise KdgenError("not all lanes of a warp are here")
        lanes = active.reshape(-1, 32)
        if (lanes != lanes[:, :1] + np.arange(32)).any() or (lanes[:, 0] % 32).any():
            raise KdgenError("not all lanes of a warp are here")
        target = each.operands[0].partition("|")[0]
        values = [self._read(operand, active).reshape(-1, 32) for operand in each.operands[1:]]
        if (masked(values[-1], 32) != 0xFFFFFFFF).any():
            raise KdgenError("the mask leaves lanes out that are here")
        if words[0] == "redux":
            extreme = {"max": np.max, "min": np.min}[words[2]](values[0], axis=1, keepdims=True)
            self._write(target, active, np.broadcast_to(extreme, lanes.shape).reshape(-1))
            return
        if words[2] != "bfly" or (values[2] != 31).any():
            raise KdgenError("only butterflies over 32 lanes are known")
        source = np.arange(32) ^ values[1].astype(np.int64)
        if source.max() > 31:
            raise KdgenError("a butterfly that leaves the warp")
        self._write(target, active, np.take_along_axis(values[0], source, axis=1).reshape(-1))

    def _hardware(self, each: Instruction, active: Lanes) -> None:
        words = each.words
        results: list[tuple[str, Bits]] = []
        if "try_wait" in words:
            answer = self._answers.pop(0) if self._answers else 1
            results = [(each.operands[0], np.full(len(active), answer, np.uint64))]
        elif words[0] == "mapa":
            address, rank = (self._read(operand, active) for operand in each.operands[1:])
            results = [(each.operands[0], masked(address | (rank + np.uint64(_CLUSTER)) << np.uint64(24), 32))]
        elif words[0] in _RESULTS or words[1] == "mma_async":
            for register in (name.strip() for name in each.operands[0].strip("{}").split(",")):
                fresh = 0x6B000000 + self._fresh * 0x10001
                self._names[fresh] = f"r{self._fresh}"
                self._fresh += 1
                results.append((register, np.full(len(active), fresh, np.uint64)))
        # wgmma's first operand is read and written: the event says what is read
        self._record(each, active, {} if words[0] == "wgmma" else dict(results))
        for register, value in results:
            self._write(register, active, value)

    def _record(self, each: Instruction, active: Lanes, results: Mapping[str, Bits] = MappingProxyType({})) -> None:
        """One event, or one a thread where threads differ or are not all here. The first operand is what it becomes, if a result."""
        texts = []
        for lane, thread in enumerate(active):
            become = {register: self.name_of(int(value[lane])) for register, value in results.items()}
            operands = [self._texts(operand, thread, become if place == 0 else {}) for place, operand in enumerate(each.operands)]
            texts.append(f"{each.opcode} {', '.join(operands)}".strip())
        if len(active) == self._threads and len(set(texts)) == 1:
            self.events.append(texts[0])
        else:
            self.events += [f"t{thread}: {text}" for thread, text in zip(active, texts, strict=True)]

    def _texts(self, operand: str, thread: int, become: Mapping[str, str]) -> str:
        """An operand, a vector or an address, as this thread has it."""

        def text(found: re.Match[str]) -> str:
            each = found[0]
            if each == "_" or _NUMBER.fullmatch(each):
                return each
            return become.get(each) or self.name_of(int(self._read(each, np.array([thread]))[0]))

        return re.sub(r"[^\s{},\[\]]+", text, operand)

    def name_of(self, value: int) -> str:
        """A value in words: of a parameter, of a place in an array, or the number."""
        if value in self._names:
            return self._names[value]
        if _CLUSTER <= value >> 24 < 2 * _CLUSTER and value < 1 << 32:
            return f"{self.name_of(value & 0xFFFFFF)}@{(value >> 24) - _CLUSTER}"
        region = self._memory.find(value) or self._memory.find(value + SHARED_WINDOW)
        if region is not None:
            space = "" if region.address == value or region.address < SHARED_WINDOW or value < SHARED_WINDOW else "generic "
            offset = value - region.address if value >= region.address else value + SHARED_WINDOW - region.address
            return f"{space}{region.name}" + (f"+{offset}" if offset else "")
        if value >> 32 in self._names and value & 0xFFFFFFFF in self._names:
            return f"{self._names[value >> 32]}:{self._names[value & 0xFFFFFFFF]}"
        return str(value) if value < 1 << 20 else hex(value)

    # ---- registers ------------------------------------------------------------

    def _read(self, operand: str, active: Lanes) -> Bits:
        """A register, an immediate, a symbol, or an address ``[a+8]``, as this many threads have it."""
        text = operand.strip("[]")
        base, plus, offset = text.rpartition("+")
        if plus:
            return self._read(base, active) + np.uint64(int(offset) & _ALL)
        if text in self._registers:
            return self._registers[text][active]
        if text in self._specials:
            return self._specials[text][active]
        if text in self._symbols:
            number = self._symbols[text]
        elif found := re.fullmatch(r"0[fd]([0-9A-Fa-f]+)", text):
            number = int(found[1], 16)
        elif _NUMBER.fullmatch(text):
            number = int(text, 0) & _ALL
        else:
            raise KdgenError(f"{text} has no value yet")
        return np.full(len(active), number, np.uint64)

    def _write(self, register: str, active: Lanes, value: Bits) -> None:
        if register not in self._registers:
            self._registers[register] = np.zeros(self._threads, np.uint64)
        self._registers[register][active] = masked(value, self._kernel.width(register))
