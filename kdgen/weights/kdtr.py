"""The ``.kdtr`` container: a safetensors file whose metadata says what it holds. Any safetensors reader opens it.

Writing streams tensor by tensor, or in pieces, behind a header made from shapes known beforehand; reading maps a tensor when it is asked
for. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kdgen.errors import WeightError
from kdgen.plan.ir import DType
from kdgen.weights.header import Header, TensorEntry, read_header
from kdgen.weights.stream import Announced, write_stream

FORMAT = "kdtr"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file to be written."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _numpy_dtypes()[self.dtype].itemsize


@dataclass(frozen=True)
class KdtrMetadata:
    """What a .kdtr file holds. ``spec`` and ``layout`` are JSON texts: the model, and how the tensors are packed; so is ``text``, a
    table of the small files that came with the model for text, by name.
    """

    kind: str  #: "packed" (weights in a plan's layouts) or "reference" (what a model should compute)
    spec: str
    layout: str
    text: str = "{}"


class Kdtr:
    """An open .kdtr file. Tensors are read-only and mapped one by one, read from disk as they are touched, let go when dropped."""

    def __init__(self, header: Header, metadata: KdtrMetadata) -> None:
        self.path = header.path
        self.metadata = metadata
        self.tensors = tuple(TensorInfo(entry.name, _dtype(header.path, entry), entry.shape) for entry in header.tensors)
        self._entries = {entry.name: entry for entry in header.tensors}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> npt.NDArray[np.generic]:
        """The tensor called ``name``.

        Raises WeightError when there is none.
        """
        entry = self._entry(name)
        dtype = _numpy_dtypes()[_dtype(self.path, entry)]
        if not entry.nbytes:
            return np.frombuffer(b"", dtype).reshape(entry.shape)
        mapped = np.asarray(np.memmap(self.path, np.uint8, "r", entry.begin, (entry.nbytes,)))
        return mapped.view(dtype).reshape(entry.shape)

    def parts(self, name: str, part_bytes: int) -> Iterator[npt.NDArray[np.generic]]:
        """The tensor called ``name`` in flat pieces of at most ``part_bytes`` (a multiple of its item size), read one at a time.

        Raises WeightError when there is no such tensor, or the file cannot be read or has become shorter.
        """
        entry = self._entry(name)
        dtype = _numpy_dtypes()[_dtype(self.path, entry)]
        try:
            with self.path.open("rb") as file:
                file.seek(entry.begin)
                for left in range(entry.nbytes, 0, -part_bytes):
                    part = np.fromfile(file, dtype, min(part_bytes, left) // dtype.itemsize)
                    if part.nbytes != min(part_bytes, left):
                        raise WeightError(f"{self.path}: was cut off while it was read")
                    yield part
        except OSError as error:
            raise WeightError(f"{self.path}: cannot be read: {error.strerror or error}") from error

    def _entry(self, name: str) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise WeightError(f"{self.path}: no tensor {name!r}")
        return entry


def write_kdtr(
    path: Path, infos: Sequence[TensorInfo], tensors: Iterable[tuple[str, npt.NDArray[np.generic]]], metadata: KdtrMetadata
) -> None:
    """Write ``tensors``, which must come as ``infos`` says, one at a time; ``path`` appears whole or not at all.

    Raises WeightError when a tensor is missing, superfluous or not of its dtype and shape, or when the file cannot be written.
    """
    write_kdtr_parts(path, infos, _checked(path, infos, tensors), metadata)


def write_kdtr_parts(
    path: Path, infos: Sequence[TensorInfo], parts: Iterable[tuple[str, npt.NDArray[np.generic]]], metadata: KdtrMetadata
) -> None:
    """``write_kdtr`` for tensors that come in any number of pieces, each after its tensor's name, in order.

    Raises WeightError when a tensor's pieces are fewer or more than its bytes, or when the file cannot be written.
    """
    announced = [Announced(info.name, _SAFETENSORS_NAMES[info.dtype], info.shape, info.nbytes) for info in infos]
    described = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "kind": metadata.kind,
        "spec": metadata.spec,
        "layout": metadata.layout,
        "text": metadata.text,
    }
    write_stream(path, announced, parts, described)


def open_kdtr(path: Path) -> Kdtr:
    """Open a .kdtr file.

    Raises WeightError when it is damaged, truncated, not a .kdtr file, or of a newer format.
    """
    header = read_header(path)
    return Kdtr(header, kdtr_metadata(header))


def kdtr_metadata(header: Header) -> KdtrMetadata:
    """The .kdtr part of a safetensors header.

    Raises WeightError when there is none, or it is of another version or damaged.
    """
    found = header.metadata
    if found.get("format") != FORMAT:
        raise WeightError(f"{header.path}: a safetensors file, but not a .kdtr file")
    version = found.get("format_version", "")
    if version != str(FORMAT_VERSION):
        raise WeightError(f"{header.path}: .kdtr format {version or 'unknown'}; this kdgen reads format {FORMAT_VERSION}")
    for key in ("kind", "spec", "layout"):
        if key not in found:
            raise WeightError(f"{header.path}: damaged .kdtr metadata: no {key!r}")
    for key in ("spec", "layout", "text"):
        try:
            json.loads(found.get(key, "{}"))
        except (ValueError, RecursionError) as error:
            raise WeightError(f"{header.path}: damaged .kdtr metadata: {key!r} is not JSON") from error
    return KdtrMetadata(found["kind"], found["spec"], found["layout"], found.get("text", "{}"))


def _checked(
    path: Path, infos: Sequence[TensorInfo], tensors: Iterable[tuple[str, npt.NDArray[np.generic]]]
) -> Iterator[tuple[str, npt.NDArray[np.generic]]]:
    pending = iter(tensors)
    for info in infos:
        name, values = next(pending, ("", None))
        if values is None:
            raise WeightError(f"{path}: tensor {info.name!r} is missing")
        if name != info.name:
            raise WeightError(f"{path}: tensor {name!r} came where {info.name!r} was announced")
        if values.dtype != _numpy_dtypes()[info.dtype] or values.shape != info.shape:
            raise WeightError(f"{path}: tensor {name!r} is {values.dtype} {values.shape}, announced as {info.dtype} {info.shape}")
        yield name, values
    if (extra := next(pending, None)) is not None:
        raise WeightError(f"{path}: tensor {extra[0]!r} was not announced")


_SAFETENSORS_NAMES: Mapping[DType, str] = {"f32": "F32", "bf16": "BF16", "i32": "I32", "f64": "F64", "u8": "U8"}


def _dtype(path: Path, entry: TensorEntry) -> DType:
    for dtype, name in _SAFETENSORS_NAMES.items():
        if name == entry.dtype:
            return dtype
    raise WeightError(f"{path}: tensor {entry.name!r} is {entry.dtype}, which .kdtr files do not use")


def _numpy_dtypes() -> Mapping[DType, np.dtype[np.generic]]:
    kinds: dict[DType, str] = {"f32": "<f4", "i32": "<i4", "f64": "<f8", "u8": "u1"}
    return {**{key: np.dtype(kind) for key, kind in kinds.items()}, "bf16": np.dtype(ml_dtypes.bfloat16)}
