"""Packed weights in a .kdtr file: written once, loaded as they are.

A drafter's weights are not among them: they stay in their published folder, and any drafter may join a packed target.

The file's tensors are the plan's device tensors under their names, flat. Its metadata holds the spec, the tokenizer's files, and the
layout: the version of the layouts, the compute type, and every weight as the plan has it. A file whose layout is not the plan's, to
the last field, is refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kdgen.errors import WeightError
from kdgen.plan.ir import ITEM_BYTES, Compute, Plan, Weight
from kdgen.spec.model import Spec
from kdgen.text.tokenizer import TextFiles
from kdgen.weights.formats import first_bad_value
from kdgen.weights.kdtr import KdtrMetadata, TensorInfo, open_kdtr, write_kdtr_parts
from kdgen.weights.pack import LAYOUT_VERSION, PackedWeights
from kdgen.weights.pools import Array

KIND = "packed"


def write_packed(path: Path, spec: Spec, plan: Plan, weights: PackedWeights, text: TextFiles, progress: Callable[[int, int], None]) -> None:
    """Write every weight of ``plan`` to ``path``, and the files of ``text``; it appears whole or not at all. ``progress`` is called with
    bytes done and in all.

    Raises WeightError when the weights do not fit the plan or are damaged, or the file cannot be written, and KdgenError when a file of
    ``text`` is not text.
    """
    weights.check(plan)
    total, done = sum(weight.total_bytes for weight in plan.weights), 0

    def parts() -> Iterator[tuple[str, Array]]:
        nonlocal done
        for weight, layer in _device_tensors(plan):
            for part in weights.parts(weight, layer):
                yield weight.device_name(layer), part
                done += part.nbytes
                progress(done, total)

    progress(done, total)
    files = json.dumps({name: text.text(name) for name in text.contents}, ensure_ascii=False)
    metadata = KdtrMetadata(KIND, json.dumps(spec.with_draft(None).model_dump(mode="json")), _layout(plan), files)
    write_kdtr_parts(path, _infos(plan), parts(), metadata)


class PackedFile(PackedWeights):
    """A file that ``write_packed`` wrote. ``spec`` is its model, ``compute`` the compute type that it was packed for, ``text`` the
    tokenizer and the other files for text that it came with.

    Opening raises WeightError when it is damaged, cut off or holds something else, and SpecError when its spec is not valid.
    """

    def __init__(self, path: Path) -> None:
        self._file, self.where = open_kdtr(path), str(path)
        metadata = self._file.metadata
        if metadata.kind != KIND:
            raise WeightError(f"{path}: holds {metadata.kind!r}, not packed weights")
        self._layout = json.loads(metadata.layout)
        values = json.loads(metadata.spec)
        compute = self._layout.get("compute") if isinstance(self._layout, dict) else None
        if compute not in ("f32", "bf16") or not isinstance(values, dict):
            raise WeightError(f"{path}: damaged .kdtr metadata: no spec, or no compute type")
        self.compute: Compute = compute
        self.spec = Spec.from_mapping(values, str(path))
        files = json.loads(metadata.text)
        if not isinstance(files, dict) or not all(isinstance(content, str) for content in files.values()):
            raise WeightError(f"{path}: damaged .kdtr metadata: 'text' is no table of files")
        self.text = TextFiles(str(path), {name: content.encode("utf-8", "surrogatepass") for name, content in files.items()})

    def check(self, plan: Plan) -> None:
        """Raises WeightError when the file was packed for other layouts, or its tensors are not those it announces."""
        path = self._file.path
        if not self._file.has_checksums:
            raise WeightError(f"{path}: has no checksums (.kdtr format 1), so damage would not show; `kdgen import` the model again")
        if not plan.shard.whole:
            raise WeightError(f"{path}: is packed for one rank; several load the model's published folder")
        expected = json.loads(_layout(plan))
        if self._layout != expected:
            raise WeightError(
                f"{path}: was packed for other layouts ({_difference(self._layout, expected)}); `kdgen import` the model again"
            )
        if self._file.tensors != tuple(_infos(plan)):
            raise WeightError(f"{path}: its tensors are not those that its metadata announces; `kdgen import` the model again")

    def parts(self, weight: Weight, layer: int) -> Iterator[Array]:
        name = weight.device_name(layer)

        def need_finite(start: int, part: Array) -> None:
            found = first_bad_value(weight, start, part)
            if found is not None:
                place = f"byte {start + found}" if weight.dtype == "u8" else f"element {start // part.itemsize + found}"
                what = f"{place} of tensor {name} begins a value that is NaN or infinite"
                raise WeightError(f"{self._file.path}: {what}; `kdgen import` the model again")

        return self._file.parts(name, need_finite)


def _device_tensors(plan: Plan) -> Iterator[tuple[Weight, int]]:
    for weight in plan.weights:
        for layer in range(*weight.layers) if weight.layers else (0,):
            yield weight, layer


def _infos(plan: Plan) -> list[TensorInfo]:
    return [
        TensorInfo(weight.device_name(layer), weight.dtype, (weight.stored_bytes // ITEM_BYTES[weight.dtype],))
        for weight, layer in _device_tensors(plan)
    ]


def _layout(plan: Plan) -> str:
    weights = [{key: value for key, value in dataclasses.asdict(weight).items() if key != "part"} for weight in plan.weights]
    return json.dumps({"version": LAYOUT_VERSION, "compute": plan.compute, "weights": weights})


def _difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """The first thing that differs, in words."""
    for key in ("version", "compute"):
        if found.get(key) != expected[key]:
            return f"{key} {found.get(key)}, now {expected[key]}"
    return "its list of weights is another"
