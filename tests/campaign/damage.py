"""Damage to files, drawn by Hypothesis: of bytes, of lines, of JSON and YAML values, of a safetensors file's header and body, and of a
``.kdtr`` whose checksums were made anew."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

#: What a JSON value is replaced by: wrong types, edges of number formats, texts that a shell, C++, a path or a terminal would obey.
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 65, 2**31 - 1, 2**31, 2**53 + 1, 2**63, -(2**63), 10**40, 0.0, -0.0, 0.5, 1e-300, 1e300,
    1e999, -1e999, float("nan"), "", " ", "0", "1", "null", "true", "nan", "bfloat16", "float16", "yarn", "sigmoid", "\x00", "\x1b[2J",
    "a" * 5000,
    "../../etc/passwd",
    "/dev/zero", "$(touch INJECTED)", "`touch INJECTED`", "; touch INJECTED;",
    '"); system("touch INJECTED"); //', "*/ int x; /*",
    "{{ 7 * 7 }}",
    "%s%n", "\ud800", "漢字", "con", "-rf", "__class__", [], [[]], [None], [0], [1, 2, 3], list(range(300)), {}, {"": {}}, {"type": "yarn"},
    {"rope_type": "linear", "factor": 2}, {"a": {"b": {"c": []}}},
)  # fmt: skip
ODD_TEXTS = tuple(value for value in ODD_VALUES if isinstance(value, str))
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I8", "U8", "BOOL", "F8_E4M3", "F8_E8M0", "I4", "", "bf16", "X" * 300)
NUMBERS = (0, 1, -1, 2, 7, 8, 2**31, 2**63 - 1, 2**64, 10**30, 1.5, None, "8", True, [])


@dataclass(frozen=True)
class Damage:
    """One file's damage: what it is called in reports, and what it makes of the file's bytes.

    ``key`` is the JSON key that was changed where the damage is one of a single key, else empty.
    """

    title: str
    make: Callable[[bytes], bytes]
    key: str = ""


def of_bytes() -> st.SearchStrategy[Damage]:
    """A flipped bit, a cut end, a hole of zeros, a doubled or inserted piece, an empty file; places are fractions of the file."""
    at = st.floats(0, 1)
    counts = st.sampled_from((1, 7, 8, 512, 4096))
    whole = (b"", b"\n", b"{", b"[]", b"null", b"\xff\xfe", b"\xef\xbb\xbf{}", b"version https://git-lfs.github.com/spec/v1\n")
    return st.one_of(
        st.builds(lambda p, bit: Damage(f"bit {bit} flipped at {p:.6f}", lambda data: _flipped(data, p, bit)), at, st.integers(0, 7)),
        st.builds(lambda p: Damage(f"cut at {p:.6f}", lambda data: data[: int(p * len(data))]), at),
        st.builds(lambda p, n: Damage(f"{n} zeros at {p:.6f}", lambda data: _replaced(data, p, n, bytes(n))), at, counts),
        st.builds(lambda p, n: Damage(f"{n} bytes doubled at {p:.6f}", lambda data: _doubled(data, p, n)), at, counts),
        st.builds(lambda p, b: Damage(f"{b!r} inserted at {p:.6f}", lambda data: _inserted(data, p, b)), at, st.binary(min_size=1)),
        st.sampled_from(whole).map(lambda data: Damage(f"the whole file is {data!r}", lambda _: data)),
    )


def _flipped(data: bytes, at: float, bit: int) -> bytes:
    if not data:
        return data
    place = min(int(at * len(data)), len(data) - 1)
    return data[:place] + bytes([data[place] ^ (1 << bit)]) + data[place + 1 :]


def _replaced(data: bytes, at: float, count: int, by: bytes) -> bytes:
    place = int(at * len(data))
    return data[:place] + by[: len(data) - place] + data[place + count :]


def _doubled(data: bytes, at: float, count: int) -> bytes:
    place = int(at * len(data))
    return data[: place + count] + data[place:]


def _inserted(data: bytes, at: float, piece: bytes) -> bytes:
    place = int(at * len(data))
    return data[:place] + piece + data[place:]


def paths_of(value: Any, most: int = 400) -> list[tuple[str | int, ...]]:
    """The places of a JSON value, as far as they are few: keys and list places from the top."""
    found: list[tuple[str | int, ...]] = []
    pending: list[tuple[tuple[str | int, ...], Any]] = [((), value)]
    while pending and len(found) < most:
        path, here = pending.pop(0)
        if path:
            found.append(path)
        if isinstance(here, dict):
            pending += [((*path, key), each) for key, each in here.items()]
        elif isinstance(here, list):
            pending += [((*path, place), each) for place, each in enumerate(here[:8])]
    return found


@dataclass(frozen=True)
class Form:
    """How a file writes values down."""

    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]


JSON = Form(json.loads, lambda value: json.dumps(value).encode())
YAML = Form(yaml.safe_load, lambda value: yaml.safe_dump(value, sort_keys=False).encode("utf-8", "surrogatepass"))


@st.composite
def of_structure(draw: st.DrawFn, data: bytes, form: Form = JSON) -> Damage:
    """One key of a file removed, set to an odd value, renamed, moved a level up, or followed by one that is nested deep."""
    value = form.decode(data)
    path = draw(st.sampled_from(paths_of(value)))
    kind = draw(st.sampled_from(("remove", "odd", "odd", "odd", "number", "rename", "move up", "bury", "text")))
    odd = draw(st.sampled_from(ODD_VALUES if kind != "text" else ODD_TEXTS))
    number = draw(st.one_of(st.integers(-4, 4096), st.floats(allow_nan=False), st.integers(-(2**70), 2**70)))
    suffix = draw(st.sampled_from(("_", "s", "2", " ", "\u0301")))
    depth = draw(st.sampled_from((1, 50, 3000)))
    *above, last = path

    def make(original: bytes) -> bytes:
        whole = form.decode(original)
        here = whole
        for step in above:
            here = here[step]
        if kind == "remove":
            del here[last]
        elif kind in ("odd", "text"):
            here[last] = odd
        elif kind == "number":
            here[last] = number
        elif kind == "rename" and isinstance(last, str):
            here[last + suffix] = here.pop(last)
        elif kind == "move up" and isinstance(whole, dict):
            whole[str(last)] = here[last]
        elif form is JSON:
            return _nested(form.encode(whole), depth, form.encode(here[last]))
        else:
            return form.encode(whole) + b"_deep: " + b"[" * depth + b"]" * depth + b"\n"
        return form.encode(whole)

    shown = {"odd": repr(odd), "text": repr(odd), "number": repr(number), "rename": suffix, "bury": str(depth)}.get(kind, "")
    names = [str(step) for step in path if isinstance(step, str)]
    key = {"bury": "", "move up": str(last)}.get(kind, names[-1] if names else "")
    return Damage(f"{'.'.join(map(str, path))}: {kind} {shown[:60]}", make, key)


def _nested(whole: bytes, depth: int, inner: bytes) -> bytes:
    """The text with one more key whose value lies ``depth`` lists deep: parsers that recurse give up there."""
    return whole.rstrip()[:-1] + b', "_deep": ' + b"[" * depth + inner + b"]" * depth + b"}"


def of_lines() -> st.SearchStrategy[Damage]:
    """A line removed, doubled, swapped with the next, emptied, or with another end or number; all ends of lines changed."""
    kinds = st.sampled_from(("remove", "double", "swap", "blank before", "blank", "number", "space", "ends", "last end"))
    return st.builds(_of_line, kinds, st.floats(0, 1), st.sampled_from((b"0", b"-1", b"7", b"1e3", b"99999999999999999999", b"", b" 5")))


def _of_line(kind: str, at: float, number: bytes) -> Damage:
    def make(data: bytes) -> bytes:
        lines = data.splitlines()
        if not lines:
            return data
        place = min(int(at * len(lines)), len(lines) - 1)
        line, before, after = lines[place], lines[:place], lines[place + 1 :]
        changed = {
            "remove": [],
            "double": [line, line],
            "swap": [*after[:1], line],
            "blank before": [b"", line],
            "blank": [b""],
            "number": [line.rpartition(b" ")[0] + b" " + number],
            "space": [b" " + line + b"\t"],
        }.get(kind, [line])
        end = b"\r\n" if kind == "ends" else b"\n"
        return end.join([*before, *changed, *after[kind == "swap" :]]) + (b"" if kind == "last end" else end)

    return Damage(f"line at {at:.6f}: {kind} {number.decode() if kind == 'number' else ''}", make)


def split_safetensors(data: bytes) -> tuple[dict[str, Any], bytes]:
    """A safetensors file's header and body."""
    size = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + size])
    return header, data[8 + size :]


def join_safetensors(header: bytes, body: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + body


@st.composite
def of_header(draw: st.DrawFn, data: bytes) -> Damage:
    """A tensor's name, dtype, shape or offsets changed in a safetensors header, or the length of the header itself."""
    header, _ = split_safetensors(data)
    name = draw(st.sampled_from([key for key in header if key != "__metadata__"]))
    kind = draw(st.sampled_from(("dtype", "shape", "offsets", "rename", "remove", "value", "length", "twice", "metadata")))
    dtype, number = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(NUMBERS))
    place, odd = draw(st.integers(0, 2)), draw(st.sampled_from(ODD_VALUES))
    text = draw(st.sampled_from(ODD_TEXTS))
    length = draw(st.sampled_from((0, 1, 2**20, 2**31, 2**63, 2**64 - 1)))

    def make(original: bytes) -> bytes:
        head, body = split_safetensors(original)
        if kind == "length":
            return length.to_bytes(8, "little") + original[8:]
        if kind == "dtype":
            head[name]["dtype"] = dtype
        elif kind == "shape":
            shape = head[name]["shape"]
            head[name]["shape"] = [*shape[:place], number, *shape[place + 1 :]]
        elif kind == "offsets":
            head[name]["data_offsets"][place % 2] = number
        elif kind == "rename":
            head[text or "renamed"] = head.pop(name)
        elif kind == "remove":
            del head[name]
        elif kind == "value":
            head[name] = odd
        elif kind == "metadata":
            head["__metadata__"] = odd
        encoded = json.dumps(head).encode()
        if kind == "twice":
            again = json.dumps({name: head[name]}).encode()
            encoded = encoded.rstrip()[:-1] + b", " + again[1:]
        return join_safetensors(encoded, body)

    return Damage(f"header of {name}: {kind}", make)


#: Bits of values that hide, by dtype: NaN, infinities, the largest and the smallest numbers, minus zero.
_VALUES = {
    "BF16": (0x7FC0, 0xFFC1, 0x7F80, 0xFF80, 0x7F7F, 0x0001, 0x8000),
    "F16": (0x7E00, 0x7C00, 0xFC00, 0x7BFF, 0x0001, 0x8000),
    "I64": (0, 1, 2**31, 2**63 - 1, 2**63),
    "F32": (0x7FC00000, 0xFF800001, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x00000001, 0x80000000),
    "I32": (0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0, 0x12345678),
}


@st.composite
def of_values(draw: st.DrawFn, data: bytes) -> Damage:
    """One element, or all, of one tensor of a safetensors file set to a value that may hide: NaN, infinity, the largest number."""
    header, _ = split_safetensors(data)
    names = [key for key, entry in header.items() if key != "__metadata__" and entry["dtype"] in _VALUES]
    quantized = [key for key in names if key.endswith(("_packed", "_scale", "_shape"))]
    name = draw(st.one_of(st.sampled_from(names), st.sampled_from(quantized or names)))
    dtype, (begin, end) = header[name]["dtype"], header[name]["data_offsets"]
    size = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8}[dtype]
    bits = draw(st.sampled_from(_VALUES[dtype]))
    element = draw(st.integers(0, max(0, (end - begin) // size - 1)))
    everywhere = draw(st.sampled_from((False, False, False, True)))
    word = bits.to_bytes(size, "little")

    def make(original: bytes) -> bytes:
        start = 8 + int.from_bytes(original[:8], "little")
        if everywhere:
            return original[: start + begin] + word * ((end - begin) // size) + original[start + end :]
        at = start + begin + element * size
        return original[:at] + word + original[at + size :]

    return Damage(f"{name}[{'all' if everywhere else element}] is 0x{bits:X}", make)


_TEXTS_OF_KDTR = ("spec", "layout", "text")


@st.composite
def of_sealed(draw: st.DrawFn, data: bytes) -> Damage:
    """The metadata of a ``.kdtr`` damaged by somebody who makes its checksums anew: what the checksums guard is looked at behind them."""
    header, _ = split_safetensors(data)
    metadata = header["__metadata__"]
    key = draw(st.sampled_from((*_TEXTS_OF_KDTR, *_TEXTS_OF_KDTR, "kind", "format_version")))
    inner = draw(of_structure(metadata[key].encode()) if key in _TEXTS_OF_KDTR else st.sampled_from(ODD_TEXTS).map(_all_of))

    def make(original: bytes) -> bytes:
        head, body = split_safetensors(original)
        head["__metadata__"][key] = inner.make(head["__metadata__"][key].encode()).decode("utf-8", "surrogateescape")
        return sealed(head, body)

    return Damage(f"sealed metadata {key}: {inner.title}", make)


def _all_of(text: str) -> Damage:
    return Damage(repr(text[:60]), lambda _: text.encode("utf-8", "surrogatepass"))


def sealed(head: dict[str, Any], body: bytes) -> bytes:
    """A ``.kdtr`` of this header, whose own checksum fits it; those of the tensors stay as they are."""
    metadata = {key: value for key, value in head["__metadata__"].items() if key != "checksums"}
    tensors = {key: entry for key, entry in head.items() if key != "__metadata__"}
    described = {key: [each["dtype"], each["shape"], each["data_offsets"][1] - each["data_offsets"][0]] for key, each in tensors.items()}
    checksums = json.loads(head["__metadata__"]["checksums"])
    checksums["header"] = f"{zlib.crc32(json.dumps([metadata, described], sort_keys=True).encode()):08x}"
    return join_safetensors(
        json.dumps({"__metadata__": metadata | {"checksums": json.dumps(checksums, separators=(",", ":"))}, **tensors}).encode(), body
    )


#: Chat templates that would hang, take all memory, reach outside, or raise what nobody expects.
HOSTILE_TEMPLATES = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "{{ 10 ** (10 ** 8) }}",
    "{{ 'a' * 100000000 }}",
    "{{ '%2000000000d' % 1 }}",
    "{{ 'a'.center(2000000000) }}",
    "{{ '{:2000000000}'.format(1) }}",
    "{{ lipsum(n=100000) }}",
    "{{ messages | tojson(indent=100000000) }}",
    "{{ cycler() }}",
    "{{ (1e308 * 10) | int }}",
    "{{ raise_exception('no') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ self.__init__.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{{ messages[99].content }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ undefined_name.attribute }}",
    "{% for x in messages %}",
    "{{ 1 / 0 }}",
    "{{ '\ud800' }}",
    "{{ range(10 ** 9) | list }}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{{ messages | map(attribute='content') | join | upper }}",
    "",
    "{{ bos_token }}{{ messages }}",
    "{{ strftime_now('%Y') }}",
)


def of_template() -> st.SearchStrategy[Damage]:
    """The chat template of a tokenizer_config.json replaced by a hostile one."""

    def replaced(template: str) -> Damage:
        return Damage(f"chat_template {template[:60]!r}", lambda data: json.dumps(json.loads(data) | {"chat_template": template}).encode())

    return st.sampled_from(HOSTILE_TEMPLATES).map(replaced)


def nothing() -> Damage:
    """No damage: the control, whose answer is known."""
    return Damage("nothing", lambda data: data)


def apply(folder: Path, file: str, damage: Damage) -> None:
    """Damage one file of a folder, in place; a second damage is left out where the first has left nothing that it could be done to."""
    path = folder / file
    try:
        data = damage.make(path.read_bytes())
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, yaml.YAMLError):
        return
    path.unlink()  # it may be a link to the undamaged one
    path.write_bytes(data)
