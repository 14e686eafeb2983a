"""Published checkpoints: safetensors folders, read tensor by tensor.

Only headers are read up front. Each tensor is mapped when asked for and unmapped when dropped, so that a model of any
size streams through the memory of its largest tensor.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kdgen.errors import WeightError
from kdgen.files.inputs import parse_json, read_input
from kdgen.spec.drafter import DraftSpec
from kdgen.spec.fields import TensorGroup, show_key
from kdgen.spec.model import Spec
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
#: After so many problems the check stops: a config may claim billions of layers.
_MAX_COUNTED = 10_000
#: Two tensors are compared in parts of so many bytes.
_COMPARED_BYTES = 2**26
PREFIX = "language_model."
#: Parts of the wrapped multimodal models that decoding text does not touch.
_SKIPPED = ("vision_tower.", "mm_projector.", "multi_modal_projector.", "visual.")
#: A tensor that a multi-token-prediction module has and no decoder layer.
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
    nbytes: int

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Raises WeightError for an element type that NumPy lacks."""
        if self.dtype not in DTYPES:
            raise WeightError(f"{self.file}: element type {self.dtype} is not supported")
        return DTYPES[self.dtype]


def entries_of(file: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file, of whatever element type. Raises WeightError when it is missing or damaged."""
    tensors = read_header(file).tensors
    return {tensor.name: Entry(file, tensor.begin, tensor.dtype, tensor.shape, tensor.nbytes) for tensor in tensors}


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

    A folder holds ``model.safetensors``, or shards and their ``*.safetensors.index.json``, or shards alone. An index decides where a
    tensor is: copies of it in other shards do not count, nor do tensors that it does not list. Vision towers are left out, and so are
    the buffers of rotary embeddings. Opening raises one WeightError that names every missing, truncated or damaged file, and every
    tensor that is not where the index has it. ``shards`` has, by file, the tensors that count, under the names that they have there.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        weight_map: dict[str, str] | None = None
        if self.path.is_file():
            files = [self.path]
        elif (self.path / "model.safetensors").exists():
            files = [self.path / "model.safetensors"]
        elif indices := sorted(self.path.glob("*.safetensors.index.json")):
            standard = self.path / "model.safetensors.index.json"
            if len(indices) > 1 and standard not in indices:
                names = ", ".join(show_key(file.name) for file in indices)
                raise WeightError(f"{self.path}: holds several index files ({names}) and none is {standard.name}: which one counts?")
            index = standard if standard in indices else indices[0]
            weight_map = _index(index)
            files = [self.path / name for name in sorted(set(weight_map.values()))]
        else:
            files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise WeightError(f"{self.path}: holds no safetensors file; expected model.safetensors, or shards with an index")
        problems: list[str] = []
        headers: dict[Path, dict[str, Entry]] = {}
        for file in files:
            if not file.is_file():
                wanted = sum(name == file.name for name in (weight_map or {}).values())
                what = f"missing, and the index has {wanted} tensors in it" if weight_map else "is no file, or a link that leads nowhere"
                problems.append(f"{file}: {what}; download it again")
                continue
            try:
                headers[file] = entries_of(file)
            except WeightError as error:
                problems.append(str(error))
        _raise(problems)
        #: tensors that shards have and their index does not
        self._unlisted: dict[str, Path] = {}
        if weight_map is not None:
            places = {name: self.path / name for name in set(weight_map.values())}
            listed: dict[Path, dict[str, Entry]] = {file: {} for file in files}
            for key, name in weight_map.items():
                if (entry := headers[places[name]].get(key)) is None:
                    problems.append(f"{index}: {show_key(key)} is not in {show_key(name)}")
                else:
                    listed[entry.file][key] = entry
            for file, header in headers.items():
                self._unlisted |= {key.removeprefix(PREFIX): file for key in header if key not in weight_map}
            headers = listed
        self.shards: Mapping[Path, Mapping[str, Entry]] = headers
        self._entries: dict[str, Entry] = {}
        for key, entry in ((key, entry) for header in headers.values() for key, entry in header.items()):
            if key.startswith(_SKIPPED) or key.endswith("rotary_emb.inv_freq"):
                continue
            short = key.removeprefix(PREFIX)
            if (other := self._entries.get(short)) is not None and other.file != entry.file:
                problems.append(f"{entry.file}: {key} is also in {other.file.name}")
            elif other is not None:
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
        """Check every tensor against the spec: there, nothing beside, right shape and type, shapes of quantized matrices as stored.

        Raises one WeightError listing everything wrong. Multi-token-prediction layers behind the last decoder layer are allowed,
        and so is an ``lm_head.weight`` beside tied embeddings; neither is used. Values are not read, but for those shapes.
        """
        problems: list[str] = []
        expected: set[str] = set()
        missing: dict[str, TensorGroup] = {}
        for key, group in ((key, each) for each in spec.tensors() for key in each.names()):
            if len(problems) + len(missing) >= _MAX_COUNTED:
                break
            expected.add(key)
            if key not in self._entries:
                missing[key] = group
            else:
                problems += self._mismatches(key, group, spec)
        if (renamed := self._renamed(missing)) is not None:
            _raise([renamed])
        for key, group in missing.items():
            what = f"is not in the index, though {self._unlisted[key].name} has it" if key in self._unlisted else "is missing"
            problems.append(f"{self.path}: tensor {key} {list(group.shape)} {what}")
        if len(problems) >= _MAX_COUNTED:
            _raise(problems)
        allowed = {"lm_head.weight"} if isinstance(spec, Spec) and spec.tie_word_embeddings else set()
        for key in sorted(self._entries.keys() - expected - allowed):
            if not self._is_mtp(key, spec):
                problems.append(f"{self._entries[key].file}: tensor {key} {list(self._entries[key].shape)} is not part of this model")
        _raise(problems)

    def _renamed(self, missing: Collection[str]) -> str | None:
        """A message where every missing tensor is there under another name, and all names differ from ours by the same prefix."""
        longest = max(missing, key=len, default="")
        for count in range(min(3, longest.count("."))):
            ours = "".join(f"{part}." for part in longest.split(".")[:count])
            rest = longest.removeprefix(ours)
            for stored in (key for key in self._entries if key == rest or key.endswith(f".{rest}")):
                theirs = stored.removesuffix(rest)
                if all(key.startswith(ours) and f"{theirs}{key.removeprefix(ours)}" in self._entries for key in missing):
                    count_all, called = len(missing), f"{longest} is called {show_key(stored)}"
                    instead = f"have {show_key(theirs)!r} for {ours!r}" if theirs and ours else f"have {show_key(theirs)!r} before them"
                    how = instead if theirs else f"lack {ours!r}"
                    return f"{self.path}: the names of {count_all} tensors {how} ({called}): name them as published models do"
        return None

    def same(self, key: str, other: str) -> bool:
        """Whether two tensors hold the same values, read in parts."""
        a, b = self[key], self[other]
        if a.shape != b.shape:
            return False
        parts = max(1, a.nbytes // _COMPARED_BYTES)
        pairs = zip(np.array_split(a.reshape(-1), parts), np.array_split(b.reshape(-1), parts), strict=True)
        if a.dtype == b.dtype:
            return all(left.tobytes() == right.tobytes() for left, right in pairs)
        return all(np.array_equal(left.astype(np.float32), right.astype(np.float32)) for left, right in pairs)

    def _mismatches(self, key: str, group: TensorGroup, spec: Spec | DraftSpec) -> Iterator[str]:
        entry, where = self._entries[key], self._entries[key].file
        matrix = ("BF16",) if spec.dtype == "bfloat16" else ("F32", "BF16")
        allowed = group.stored or (("BF16", "F32") if group.kind == "small" else matrix)
        if entry.shape != group.shape:
            yield f"{where}: {key} has shape {list(entry.shape)}, the config says {list(group.shape)}"
        elif entry.dtype not in allowed:
            yield f"{where}: {key} is stored as {entry.dtype}, expected {' or '.join(allowed)}"
        elif group.kind == "shape" and (stored := [int(n) for n in self[key]]) != [*(group.matrix or ())]:
            yield f"{where}: {key} says {stored}, the config says {[*(group.matrix or ())]}"

    def _is_mtp(self, key: str, spec: Spec | DraftSpec) -> bool:
        match = re.match(r"model\.layers\.([0-9]{1,10})\.", key)
        return bool(match and int(match[1]) >= spec.num_hidden_layers and match[0] + _MTP_MARK in self._entries)


def as_stored(spec: Spec, checkpoint: Checkpoint) -> Spec:
    """``spec`` with what its weights say and its config does not.

    A head that is stored and differs from the embedding is used, whatever ``tie_word_embeddings`` says, as transformers has it. A router
    stored in float32 stays so: what it chooses must not depend on rounding.
    """
    stored: dict[str, Any] = {}
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if spec.tie_word_embeddings and head in checkpoint and embedding in checkpoint and not checkpoint.same(head, embedding):
        stored["tie_word_embeddings"] = False
    if spec.has_moe and spec.dtype != "float32":
        gates = (f"model.layers.{layer}.mlp.gate.weight" for layer in range(*spec.moe_layers))
        if "F32" in {checkpoint.entry(gate).dtype for gate in gates if gate in checkpoint}:
            stored["router_dtype"] = "float32"
    return spec.model_copy(update=stored)
