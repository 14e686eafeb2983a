"""The GPU backend: arrays and the stream are numba-cuda's, modules and launches are cuda.core's. Both are imported when it is opened."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kdgen.backends import cuda_launch as decided
from kdgen.backends.base import AllGather, Argument, Backend, DeviceArray, Launch, Mailbox, Replay, Work
from kdgen.backends.gpu import find_gpu
from kdgen.backends.nccl import Nccl
from kdgen.backends.peers import shared_zeros
from kdgen.codegen.cache import Cache
from kdgen.codegen.compile import Cubin, compile_all, everywhere
from kdgen.codegen.source import Source
from kdgen.errors import BackendError
from kdgen.files.resources import templates_dir
from kdgen.plan.arch import target_for
from kdgen.plan.ir import ITEM_BYTES, DType
from kdgen.plan.shard import Exchange
from kdgen.ranks.group import Group

if TYPE_CHECKING:
    from cuda.core import Kernel, Stream
    from cuda.core.graph import GraphBuilder


class CudaBackend(Backend):
    """The first GPU. One stream orders all work. Errors name the kernels that can have caused them.

    Raises BackendError when there is no usable GPU.
    """

    name = "cuda"
    rounds_ahead = 1

    def __init__(self, cache: Cache | None = None) -> None:
        gpu = find_gpu()
        if isinstance(gpu, str):
            raise BackendError(f"no GPU can be used: {gpu}; the CPU backend runs the same kernels without one")
        self.gpu = gpu
        self.arch = gpu.arch
        self.processors = gpu.multiprocessors
        self.family = target_for(gpu.arch).family
        self.description = f"{gpu.name} ({gpu.arch}, {gpu.multiprocessors} SMs, {gpu.memory_bytes / 2**30:.0f} GiB)"
        self.cubins: dict[str, Cubin] = {}
        self._cache = cache or Cache.default()
        self._kernels: dict[str, Kernel] = {}
        self._clusters: dict[str, int] = {}  # by kernel: blocks of its cluster, among which its threads are divided
        self._overlapping: set[str] = set()  # kernels that execute griddepcontrol.wait, and so may start early
        # numba frees memory with its array object, so the objects are kept here; DeviceArray.handle is the key
        self._arrays: dict[int, Any] = {}
        self._handles = itertools.count(1)
        self._unfinished: dict[str, None] = {}  # kernels launched since the last wait, in order
        self._nccl: Nccl | None = None
        self._after_collective = False  # a collective was started last, after which no kernel may start early
        with self._reporting("opening the GPU"):
            from cuda.core import Device
            from numba import cuda as numba_cuda

            self._numba: Any = numba_cuda
            self._stream: Any = numba_cuda.stream()  # creates the primary context, which cuda.core then shares
            device = Device(0)
            device.set_current()
            self._launch_stream = device.create_stream(self._stream)

    # ---- ranks ------------------------------------------------------------

    def join(self, group: Group) -> Exchange:
        """Every rank has its own GPU, chosen by ``use_gpu`` before its backend was opened."""
        self.group = group
        self.description += f", one of {group.ranks} ranks"
        if not group.one_host:
            return "gather"
        try:
            with self._reporting("sharing memory with other GPUs"):
                shared_zeros(group, 1 << 12)
        except BackendError:
            group.check()
            return "gather"
        return "peer"

    def inbox(self, shape: tuple[int, ...], dtype: DType) -> tuple[DeviceArray, DeviceArray]:
        """The memory is never freed, and the host can neither read nor write it."""
        if self.group is None:
            return super().inbox(shape, dtype)
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        with self._reporting(f"sharing {nbytes} bytes of {self.gpu.name} with the other ranks"):
            address, everywhere = shared_zeros(self.group, nbytes)
        table = self.to_device(decided.address_table(everywhere), "i32")
        return DeviceArray(shape, dtype, address, nbytes, None), table

    def gather(self, work: AllGather) -> None:
        if self.group is None:
            return super().gather(work)
        source, target = decided.address_of(work.source), decided.address_of(work.target)
        with self._reporting(work.name):
            self._communicator().all_gather(source, target, work.nbytes, int(self._launch_stream.handle))
        self._after_collective = True
        self._unfinished[work.name] = None

    def _communicator(self) -> Nccl:
        if self._nccl is None and self.group is not None:
            self._nccl = Nccl(self.group)
        assert self._nccl is not None
        return self._nccl

    # ---- kernels ----------------------------------------------------------

    def load(self, sources: Sequence[Source]) -> None:
        from cuda.core import ObjectCode

        include = templates_dir() / "lib" / "gpu"
        cubins = compile_all(everywhere(sources, [self.arch]), include, cache=self._cache, compiling=self.compiling_kernels)
        self._clusters |= {source.name: decided.blocks_of_cluster(self.gpu.compute_capability, source.cluster) for source in sources}
        blocks = {source.name: source.block // self._clusters[source.name] for source in sources}
        for cubin in cubins:
            with self._reporting(f"loading kernel {cubin.name}"):
                kernel = ObjectCode.from_cubin(cubin.code, name=cubin.name).get_kernel(cubin.name)
                self._divide_l1(kernel, cubin, blocks[cubin.name])
            self._kernels[cubin.name] = kernel
            self.cubins[cubin.name] = cubin
        self._overlapping -= {source.name for source in sources}
        self._overlapping |= {source.name for source in sources if source.overlaps}

    def empty(self, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
        count = math.prod(shape)
        nbytes = count * ITEM_BYTES[dtype]
        with self._reporting(f"allocating {nbytes} bytes on {self.gpu.name}"):
            array = self._numba.device_array(count, _numba_dtype(dtype), stream=self._stream)
        handle = next(self._handles)
        self._arrays[handle] = array
        return DeviceArray(shape, dtype, int(array.device_ctypes_pointer.value or 0), nbytes, handle)

    def memory_limit(self) -> int | None:
        return self.gpu.memory_bytes

    def to_host(self, array: DeviceArray, rows: int | None = None) -> npt.NDArray[np.generic]:
        shape, count = decided.elements(array.shape, rows)
        source = self._array(array)[:count]
        self.synchronize()  # first, so that a failed kernel is reported as such
        with self._reporting("copying from the GPU"):
            values: npt.NDArray[np.generic] = source.copy_to_host(stream=self._stream)
            self._stream.synchronize()
        if array.dtype == "bf16":
            values = values.view(ml_dtypes.bfloat16)
        return values.reshape(shape)

    def write(self, array: DeviceArray, values: npt.NDArray[np.generic], offset: int = 0) -> None:
        expected = np.dtype(ml_dtypes.bfloat16) if array.dtype == "bf16" else _numba_dtype(array.dtype)
        if values.dtype != expected or not values.flags.c_contiguous:
            raise ValueError(f"write needs C-contiguous {expected}, not {values.dtype}")
        if offset < 0 or offset + values.size > math.prod(array.shape):
            raise ValueError(f"{values.size} elements at {offset} do not fit an array of {array.shape}")
        if values.size:
            flat = values.reshape(-1).view(_numba_dtype(array.dtype))
            with self._reporting("copying to the GPU"):
                self._array(array)[offset : offset + flat.size].copy_to_device(flat, stream=self._stream)

    def copy(self, array: DeviceArray, source: int, target: int, count: int) -> None:
        whole = self._array(array)
        with self._reporting("copying on the GPU"):
            whole[target : target + count].copy_to_device(whole[source : source + count], stream=self._stream)

    def free(self, array: DeviceArray) -> None:
        self._array(array)
        del self._arrays[self._key(array)]
        with self._reporting("freeing GPU memory"):
            self._numba.current_context().memory_manager.deallocations.clear()  # otherwise numba delays some of the frees

    def launch(self, kernel: str, grid: tuple[int, int, int], block: int, smem: int, args: Sequence[Argument]) -> None:
        with self._reporting(f"launching kernel {kernel} with grid {grid}, {block} threads and {smem} bytes of shared memory"):
            self._start(self._launch_stream, Launch(kernel, grid, block, smem, tuple(args)))
        self._unfinished[kernel] = None

    def _start(self, where: Stream | GraphBuilder, each: Launch) -> None:
        from cuda.core import LaunchConfig, launch

        loaded = self._kernels.get(each.kernel)
        if loaded is None:
            raise BackendError(f"kernel {each.kernel} is not loaded")
        cubin = self.cubins[each.kernel]
        if each.smem > cubin.dynamic_smem:
            raise BackendError(f"kernel {each.kernel}: {each.smem} bytes of dynamic shared memory, but loaded for {cubin.dynamic_smem}")
        if len(each.args) != loaded.num_arguments:
            raise BackendError(f"kernel {each.kernel}: {len(each.args)} arguments, {loaded.num_arguments} expected")
        waits_itself, after_collective = each.kernel in self._overlapping, self._after_collective
        self._after_collective = False
        shape = decided.shape_of(each, self.gpu.compute_capability, self._clusters[each.kernel], waits_itself, after_collective)
        config = LaunchConfig(
            grid=shape.grid,
            cluster=shape.cluster,
            block=shape.block,
            shmem_size=shape.smem,
            programmatic_stream_serialization=shape.early,
        )
        launch(where, config, loaded, *map(decided.scalar, each.args))

    def record(self, work: Sequence[Work]) -> Replay:
        """Record a CUDA graph: one call by the host starts all launches, and the GPU proceeds from each to the next by itself."""
        kernels = dict.fromkeys(each.kernel for each in work if isinstance(each, Launch))
        names = ", ".join(kernels)
        with self._reporting(f"recording kernels {names}"):
            for name in kernels:
                self._load_now(name)
            if any(isinstance(each, AllGather) for each in work):
                self._communicator()  # created now, because its creation cannot be recorded
            self._after_collective = False
            builder = self._launch_stream.create_graph_builder()
            builder.begin_building()
            for each in work:
                if isinstance(each, Launch):
                    self._start(builder, each)
                else:
                    self.gather(each)
            graph = builder.end_building().complete()
            graph.upload(self._launch_stream)

        def replay() -> None:
            with self._reporting(f"starting the recorded kernels {names}"):
                graph.launch(self._launch_stream)
            self._unfinished[names] = None

        return replay

    def _load_now(self, name: str) -> None:
        """Load a kernel's code. By default the driver loads it at the first launch, which must not happen while recording."""
        from cuda.bindings import driver

        if (kernel := self._kernels.get(name)) is not None:
            status, function = driver.cuKernelGetFunction(kernel.handle)
            if status == driver.CUresult.CUDA_SUCCESS:
                (status,) = driver.cuFuncLoad(function)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise BackendError(f"kernel {name} does not load: {status.name}")

    def recorded_context(self, context: int) -> int:
        """Longer contexts are rounded more coarsely. Blocks beyond the true context end at once, but recording a deep model takes tens
        of milliseconds."""
        return decided.recorded_context(context)

    def mailbox(self, arrays: Sequence[DeviceArray]) -> Mailbox:
        return _PinnedMailbox(self, arrays)

    def timer(self) -> Callable[[], float]:
        start, end = self._numba.event(), self._numba.event()
        start.record(self._stream)

        def stop() -> float:
            end.record(self._stream)
            end.synchronize()
            return decided.seconds(float(start.elapsed_time(end)))

        return stop

    def synchronize(self) -> None:
        with self._reporting(f"waiting for kernels ({self._launched()})"):
            self._stream.synchronize()

    def _launched(self) -> str:
        """The kernels launched since the last wait, for the message if this wait fails. Clears the list."""
        launched, self._unfinished = ", ".join(self._unfinished) or "none", {}
        return f"launched: {launched}; with CUDA_LAUNCH_BLOCKING=1 the message names the one that failed"

    def _divide_l1(self, kernel: Kernel, cubin: Cubin, block: int) -> None:
        """Set the kernel's limit of dynamic shared memory, and its preferred carveout: the part of an SM's L1 that is shared memory. It is
        what the blocks on an SM need, but at least half.

        An SM reduces its shared memory only while it is idle. Kernels that start early leave it no idle moment: after attention, which
        needs nearly all of it, experts had 28 KiB of L1 for their inputs and took a fifth longer. With less than half for the small
        kernels, later kernels waited for the change. A verify step of 8 rows of K2.6 cut to 8 layers took, on one H200 (2026-11-30): 4,169
        µs with the driver's choice, 3,859 with what blocks need, 3,825 with that but at least half, 3,933 with the least, 4,149 with the
        most.
        """
        from cuda.bindings import driver

        attributes, device = driver.CUfunction_attribute, driver.CUdevice(0)
        if decided.needs_opt_in(cubin.dynamic_smem):
            (status,) = driver.cuKernelSetAttribute(
                attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, cubin.dynamic_smem, kernel.handle, device
            )
            if status != driver.CUresult.CUDA_SUCCESS:
                raise BackendError(f"{cubin.dynamic_smem} bytes of dynamic shared memory are refused: {status.name}")
        together = kernel.occupancy.max_active_blocks_per_multiprocessor(block, cubin.dynamic_smem)
        percent = decided.carveout(together, cubin.smem, self.gpu.shared_memory)
        (status,) = driver.cuKernelSetAttribute(
            attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, percent, kernel.handle, device
        )
        if status != driver.CUresult.CUDA_SUCCESS:
            raise BackendError(f"{percent} % of L1 as shared memory is refused: {status.name}")

    def _array(self, array: DeviceArray) -> Any:
        found = self._arrays.get(self._key(array))
        if found is None:
            raise ValueError("this array was freed, or belongs to another backend")
        return found

    @staticmethod
    def _key(array: DeviceArray) -> int:
        return array.handle if isinstance(array.handle, int) else 0

    @contextlib.contextmanager
    def _reporting(self, doing: str) -> Iterator[None]:
        # numba raises CudaAPIError; cuda.core raises a CUDAError that no public module exports. Both may report earlier failures
        try:
            yield
        except BackendError:
            raise
        except Exception as error:
            raise BackendError(f"{doing}: {error}") from error


class _PinnedMailbox(Mailbox):
    """Copies to pinned memory, in the stream, each followed by an event for which ``take`` waits."""

    def __init__(self, backend: CudaBackend, arrays: Sequence[DeviceArray]) -> None:
        super().__init__(backend, arrays)
        self._cuda = backend
        with backend._reporting("allocating pinned memory"):
            pinned = backend._numba.pinned_array
            self._slots = [
                ([pinned(math.prod(a.shape), _numba_dtype(a.dtype)) for a in self._arrays], backend._numba.event(timing=False))
                for _ in range(2)
            ]
        self._ring = decided.Ring(len(self._slots))
        self._launched = [""] * len(self._slots)

    def post(self) -> None:
        slot = self._ring.post()
        copies, event = self._slots[slot]
        self._launched[slot] = self._cuda._launched()
        with self._cuda._reporting("copying from the GPU"):
            for array, copy in zip(self._arrays, copies, strict=True):
                self._cuda._array(array).copy_to_host(copy, stream=self._cuda._stream)
            event.record(self._cuda._stream)

    def take(self) -> tuple[npt.NDArray[np.generic], ...]:
        slot = self._ring.take()
        copies, event = self._slots[slot]
        with self._cuda._reporting(f"waiting for kernels ({self._launched[slot]})"):
            event.synchronize()
        return tuple(copy.reshape(array.shape).copy() for array, copy in zip(self._arrays, copies, strict=True))

    def clear(self) -> None:
        self._ring.clear()


def _numba_dtype(dtype: DType) -> np.dtype[np.generic]:
    """The dtype of numba's array. numba lacks bf16, so that is stored as uint16."""
    names: dict[DType, str] = {"f32": "float32", "bf16": "uint16", "i32": "int32", "f64": "float64", "u8": "uint8"}
    return np.dtype(names[dtype])
