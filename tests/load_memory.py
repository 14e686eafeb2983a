"""How much host memory loading a model folder takes, where the device's memory is not the host's: ``python tests/load_memory.py DIR``.

The engine loads as it does for a GPU; what it writes is counted and dropped. ``tests/large_checkpoint.py`` makes folders to try.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kdgen.backends.base import Argument, Backend, DeviceArray
from kdgen.codegen.source import Source
from kdgen.plan.build import build_plan
from kdgen.plan.ir import ITEM_BYTES, DType, Limits
from kdgen.runtime.model import open_model
from kdgen.runtime.pipeline import start_engine


class Elsewhere(Backend):
    """A device whose memory is somewhere else. Every page that is written to it is read, as a copy would."""

    name = "elsewhere"
    description = "memory that is not this machine's"
    written = 0
    read = 0

    def load(self, sources: Sequence[Source]) -> None: ...

    def empty(self, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
        return DeviceArray(shape, dtype, 256, math.prod(shape) * ITEM_BYTES[dtype], None)

    def to_host(self, array: DeviceArray, rows: int | None = None) -> Any:
        raise NotImplementedError

    def write(self, array: DeviceArray, values: Any, offset: int = 0) -> None:
        self.written += values.nbytes
        self.read += int(values.reshape(-1).view(np.uint8)[::4096].sum())

    def copy(self, array: DeviceArray, source: int, target: int, count: int) -> None: ...

    def free(self, array: DeviceArray) -> None: ...

    def launch(self, kernel: str, grid: tuple[int, int, int], block: int, smem: int, args: Sequence[Argument]) -> None: ...

    def synchronize(self) -> None: ...


def main() -> None:
    model, backend = open_model(Path(sys.argv[1])), Elsewhere()
    began = time.perf_counter()
    start_engine(model.spec, build_plan(model.spec, None, Limits(max_context=128)), backend, model.weights)
    seconds, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    print(
        f"{backend.written / 1e9:.1f} GB in {seconds:.1f} s, {used.ru_utime + used.ru_stime:.0f} s of CPU; "
        f"largest resident memory {used.ru_maxrss / 1e6:.2f} GB"
    )


if __name__ == "__main__":
    main()
