"""The functions of both sides of the primitives, read off their texts: names, parameter types and what the compiler may not move."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_HEAD = re.compile(
    r"(?:template\s*<(?P<template>[^;{}>]*)>\s*)?(?:EMU_UNCHECKED\s+)?(?:__device__ __forceinline__|static inline)\s+"
    r"(?:constexpr\s+)?(?P<result>\w+(?:<\w+>)?)\s+(?P<name>\w+(?:<\w+>)?)\s*\("
)
_INSTANCE = re.compile(r"^WGMMA\((\d+),", re.MULTILINE)


@dataclass(frozen=True)
class Signature:
    """A function. ``parameters`` are types without names; ``kinds`` names of types, ``numbers`` those of integers, that a template
    leaves open. ``volatile``: all its assembly is; ``memory``: all of it keeps accesses to memory in place."""

    name: str
    result: str
    parameters: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    volatile: bool = False
    memory: bool = False

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.parameters)})"


def signatures(text: str) -> list[Signature]:
    """Every function of a ``primitives.cuh`` that kernels may call, overloads apart, in order."""
    text = re.sub(r"//.*", "", text)
    macro = re.search(r"#define WGMMA\(.*?(?<!\\)\n", text, re.DOTALL)
    instances = _INSTANCE.findall(text)
    plain = re.sub(r"#define .*?(?<!\\)\n", "", text, flags=re.DOTALL)
    found = [*_functions(plain)]
    if macro is not None:
        body = macro[0].partition("\n")[2].replace("\\\n", "\n")
        found += [each for count in instances for each in _functions(re.sub(r"\bFLOATS\b", count, body))]
    return found


def _functions(text: str) -> Iterator[Signature]:
    for head in _HEAD.finditer(text):
        if head["name"].startswith("emu_"):
            continue
        end = _closing(text, head.end() - 1)
        rest = text[end + 1 :].lstrip()
        if not rest.startswith("{"):  # a declaration
            continue
        body = rest[: _closing(rest, 0) + 1]
        parameters = tuple(_type(each) for each in _split(text[head.end() : end]) if each != "EMU_HERE")
        declared = [each.strip() for each in (head["template"] or "").split(",")]
        kinds = tuple(re.sub(r"^class\s*(\.\.\.)?\s*", "", each) for each in declared if each.startswith("class"))
        numbers = tuple(each.split()[-1] for each in declared if each.startswith("int"))
        asm = re.findall(r"\basm( volatile)?\(", body)
        memory = bool(asm) and body.count('"memory"') == len(asm)
        yield Signature(head["name"], head["result"], parameters, kinds, numbers, bool(asm) and all(asm), memory)


def _closing(text: str, place: int) -> int:
    """Where the bracket at ``place`` closes."""
    opening, depth = text[place], 0
    closing = {"(": ")", "{": "}"}[opening]
    for at in range(place, len(text)):
        depth += (text[at] == opening) - (text[at] == closing)
        if depth == 0:
            return at
    return len(text)


def _split(text: str) -> list[str]:
    parts = re.split(r",(?![^(]*\))", text)
    return [" ".join(part.split()) for part in parts if part.strip()]


def _type(parameter: str) -> str:
    """Without the name: ``const u32 (&a)[4]`` is ``const u32(&)[4]``."""
    if found := re.fullmatch(r"(.*?)\s*\(&\w*\)\s*(.*)", parameter):
        return f"{found[1]}(&){found[2].strip()}"
    if parameter.endswith(("*", "&", "...")) or " " not in parameter or re.fullmatch(r"const \w+", parameter):
        return parameter
    return re.sub(r"\s*\b\w+$", "", parameter)


def differences(gpu: Sequence[Signature], cpu: Sequence[Signature]) -> list[str]:
    """Functions that one side has and the other has not, or has with another result."""
    found = []
    for ours, others, side in ((gpu, cpu, "CPU"), (cpu, gpu, "GPU")):
        for each in ours:
            same = [other for other in others if _alike(each, other) or _alike(other, each)]
            if not same:
                found.append(f"the {side} side has no {each}")
            elif all(other.result != each.result for other in same):
                found.append(f"the {side} side's {each} returns {same[0].result} instead of {each.result}")
    return found


def _alike(each: Signature, general: Signature) -> bool:
    """Whether ``general`` is the same function, or a template of it."""
    if each.name != general.name:
        return False
    pattern, types = [], list(general.parameters)
    variadic = bool(types) and types[-1].endswith("...")
    for kind in types[: len(types) - variadic]:
        open_kind = next((name for name in general.kinds if re.search(rf"\b{name}\b", kind)), None)
        text = re.escape(kind)
        if open_kind is not None:
            # a reference to anything takes values, too
            text = r".+" if kind == f"const {open_kind}&" else re.sub(rf"\b{open_kind}\b", r"\\w+", text)
        for number in general.numbers:
            text = re.sub(rf"\b{number}\b", r"\\w+", text)
        pattern.append(text)
    if len(each.parameters) < len(pattern) or (len(each.parameters) > len(pattern) and not variadic):
        return False
    return all(re.fullmatch(text, kind) for text, kind in zip(pattern, each.parameters, strict=False))
