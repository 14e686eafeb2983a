"""Published checkpoints: safetensors folders, read tensor by tensor.

Only headers are read up front. Each tensor is mapped when asked for and unmapped when dropped, so that a model of any
size streams through the memory of its largest tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kdgen.draft_spec import DraftSpec
from kdgen.errors import WeightError
from kdgen.fields import TensorGroup, show_key
from kdgen.inputs import parse_json, read_input
from kdgen.spec import Spec
from kdgen.weights.header import read_header

Array = NDArray[Any]

#: safetensors' element types that NumPy (with ml_dtypes) can hold.
DTYPES: Mapping[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "I16": np.dtype(np.int16),
    "U16": np.dtype(np.uint16),
    "I32": np.dtype(np.int32),
    "U32": np.dtype(np.uint32),
    "I64": np.dtype(np.int64),
    "U64": np.dtype(np.uint64),
}
_MAX_SHOWN = 20
#: Problems after which the rest is not looked at: a config may claim billions of layers.
_MAX_COUNTED = 10_000
PREFIX = "language_model."
#: Parts of the wrapped multimodal models that decoding text does not touch.
_SKIPPED = ("vision_tower.", "mm_projector.", "multi_modal_projector.", "visual.")
#: What layers beyond the last decoder layer hold in a multi-token-prediction module and in no decoder layer.
_MTP_MARK = "eh_proj.weight"


def _raise(problems: Iterable[str]) -> None:
    """One WeightError for all problems, if there are any, a line each; a long list is cut, with a count."""
    lines = [problem.replace("\n", "\\n") for problem in problems]  # a tensor's name may hold anything
    if lines:
        count = len(lines) - _MAX_SHOWN if len(lines) < _MAX_COUNTED else "thousands"
        more = [f"… and {count} more"] if len(lines) > _MAX_SHOWN else []
        raise WeightError("\n".join(lines[:_MAX_SHOWN] + more))


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: its file, first byte, safetensors dtype and shape."""

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.numpy_dtype.itemsize


def entries_of(file: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file. Raises WeightError when it is missing, damaged, or has element types that are unknown here."""
    header = read_header(file)
    for tensor in header.tensors:
        if tensor.dtype not in DTYPES:
            raise WeightError(f"{file}: {tensor.name}: element type {tensor.dtype} is not supported")
    return {tensor.name: Entry(file, tensor.begin, tensor.dtype, tensor.shape) for tensor in header.tensors}


def _index(file: Path) -> dict[str, str]:
    """``weight_map`` of an index file: tensor name to shard name. Raises WeightError when damaged or pointing outside its folder."""
    try:
        found = parse_json(read_input(file))
        weight_map: Any = found["weight_map"] if isinstance(found, dict) else None
        fine = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
    except OSError as error:
        raise WeightError(f"{file}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        fine = False
    if not fine:
        raise WeightError(f"{file}: is no index: it must hold a weight_map from tensor names to file names")
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if PurePosixPath(name).is_absolute() or not _inside(name)]
    _raise(f"{file}: points outside its folder: {show_key(name)!r}" for name in outside)
    return dict(weight_map)


def _inside(name: str) -> bool:
    return bool(PurePosixPath(name).parts) and not re.search(r"[\\:\0]", name) and ".." not in PurePosixPath(name).parts


class Checkpoint(Mapping[str, Array]):
    """The tensors of a published model folder (or of one ``.safetensors`` file) by key, without a ``language_model.`` prefix.

    A folder holds ``model.safetensors``, or shards and their ``*.safetensors.index.json``, or shards alone. Vision towers are
    left out, and so are the buffers of rotary embeddings. Opening raises one WeightError that names every missing, truncated
    or damaged file, and every tensor on which index and shards disagree. ``files`` are those it consists of.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        weight_map: dict[str, str] | None = None
        if self.path.is_file():
            files = [self.path]
        elif (self.path / "model.safetensors").exists():
            files = [self.path / "model.safetensors"]
        elif indices := sorted(self.path.glob("*.safetensors.index.json")):
            if len(indices) > 1:
                raise WeightError(f"{self.path}: holds {len(indices)} index files, and which one counts is unclear")
            self._index = indices[0]
            weight_map = _index(indices[0])
            files = [self.path / name for name in sorted(set(weight_map.values()))]
        else:
            files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise WeightError(f"{self.path}: holds no safetensors file; expected model.safetensors, or shards with an index")
        self.files = tuple(files)
        problems: list[str] = []
        found: dict[str, Entry] = {}
        for file in files:
            if not file.is_file():
                wanted = sum(name == file.name for name in (weight_map or {}).values())
                what = f"missing, and the index has {wanted} tensors in it" if weight_map else "is no file, or a link that leads nowhere"
                problems.append(f"{file}: {what}; download it again")
                continue
            try:
                header = entries_of(file)
            except WeightError as error:
                problems.append(str(error))
                continue
            problems += [f"{file}: {key} is also in {found[key].file.name}" for key in header.keys() & found.keys()]
            found |= header
        if weight_map is not None and not problems:
            for key, name in weight_map.items():
                if key not in found or found[key].file != self.path / name:
                    problems.append(f"{self._index}: {key} is not in {name}")
            problems += [f"{found[key].file}: {key} is not in the index" for key in sorted(found.keys() - weight_map.keys())]
        _raise(problems)
        self._entries: dict[str, Entry] = {}
        for key, entry in found.items():
            if key.startswith(_SKIPPED) or key.endswith("rotary_emb.inv_freq"):
                continue
            short = key.removeprefix(PREFIX)
            if short in self._entries:
                problems.append(f"{entry.file}: {short} is there with and without the prefix {PREFIX}")
            self._entries[short] = entry
        _raise(problems)

    def names(self) -> list[str]:
        """Every tensor's key, sorted."""
        return sorted(self._entries)

    def entry(self, key: str) -> Entry:
        """Where a tensor lies and what it is, without reading it. Raises WeightError when there is none."""
        if key not in self._entries:
            raise WeightError(f"{self.path}: tensor {key} is missing")
        return self._entries[key]

    def __getitem__(self, key: str) -> Array:
        """The tensor as a read-only array mapped from the file (bfloat16 as ml_dtypes'); dropping it unmaps it.

        Raises WeightError for a missing key; so does ``get``. Values are checked when they are packed.
        """
        entry = self.entry(key)
        dtype = entry.numpy_dtype
        if entry.nbytes == 0:
            return np.zeros(entry.shape, dtype)
        raw = np.memmap(entry.file, np.uint8, "r", entry.offset, (entry.nbytes,))
        array = np.ndarray(entry.shape, dtype, raw)
        if not array.flags.aligned:  # a header whose length is no multiple of the item size
            array = array.copy()
        return array

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._entries)

    def validate(self, spec: Spec | DraftSpec) -> None:
        """Check every tensor against the spec: there, nothing beside, right shape and type, INT4 shapes as stored.

        Raises one WeightError listing everything wrong. Multi-token-prediction layers behind the last decoder layer are allowed,
        and so is an ``lm_head.weight`` beside tied embeddings; neither is used. Values are not read, but for INT4's shapes.
        """
        problems: list[str] = []
        expected: set[str] = set()
        for group in spec.tensors():
            for key in group.names():
                if len(problems) >= _MAX_COUNTED:
                    _raise(problems)
                expected.add(key)
                if key not in self._entries:
                    problems.append(f"{self.path}: tensor {key} {list(group.shape)} is missing")
                else:
                    problems += self._mismatches(key, group, spec)
        allowed = {"lm_head.weight"} if isinstance(spec, Spec) and spec.tie_word_embeddings else set()
        for key in sorted(self._entries.keys() - expected - allowed):
            if not self._is_mtp(key, spec):
                problems.append(f"{self._entries[key].file}: tensor {key} {list(self._entries[key].shape)} is not part of this model")
        _raise(problems)

    def _mismatches(self, key: str, group: TensorGroup, spec: Spec | DraftSpec) -> Iterator[str]:
        entry, where = self._entries[key], self._entries[key].file
        allowed = {
            "matrix": ("BF16",) if spec.dtype == "bfloat16" else ("F32", "BF16"),
            "small": ("BF16", "F32"),
            "packed": ("I32",),
            "scale": ("BF16",),
            "shape": ("I64", "I32"),
        }[group.kind]
        if entry.shape != group.shape:
            yield f"{where}: {key} has shape {list(entry.shape)}, the config says {list(group.shape)}"
        elif entry.dtype not in allowed:
            yield f"{where}: {key} is stored as {entry.dtype}, expected {' or '.join(allowed)}"
        elif group.kind == "shape":
            packed = self._entries.get(key.removesuffix("_shape") + "_packed")
            stored = [int(n) for n in self[key]]
            if packed is not None and len(packed.shape) == 2 and stored != [packed.shape[0], packed.shape[1] * 8]:
                yield f"{where}: {key} says {stored}, the packed weights hold {[packed.shape[0], packed.shape[1] * 8]}"

    def _is_mtp(self, key: str, spec: Spec | DraftSpec) -> bool:
        match = re.match(r"model\.layers\.([0-9]{1,10})\.", key)
        return bool(match and int(match[1]) >= spec.num_hidden_layers and match[0] + _MTP_MARK in self._entries)
