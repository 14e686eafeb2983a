"""The GPU of this machine, by direct calls of the driver library. They are fast, and neither hang nor raise without a GPU."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass

from kdgen.errors import BackendError
from kdgen.plan.arch import arch_of_device

#: The oldest driver that loads CUDA 13's machine code, as cuDriverGetVersion numbers it.
OLDEST_DRIVER = 13000


@dataclass(frozen=True)
class Gpu:
    """The first GPU that the driver shows; CUDA_VISIBLE_DEVICES chooses it."""

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int  #: bytes of a multiprocessor
    memory_bytes: int
    driver_cuda: tuple[int, int]  #: the CUDA version the driver supports

    @property
    def arch(self) -> str:
        return arch_of_device(*self.compute_capability)


DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


def find_gpu() -> Gpu | str:
    """The GPU that kernels would run on, or the reason why there is none."""
    if os.environ.get("NUMBA_DISABLE_CUDA", "0") not in ("", "0"):
        return "NUMBA_DISABLE_CUDA is set"
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return f"no NVIDIA driver ({DRIVER} cannot be loaded)"
    status = driver.cuInit(0)
    if status != 0:
        return f"the NVIDIA driver does not start: {_error_name(driver, status)}"

    def number(function: str, *args: object) -> int:
        value = ctypes.c_int()
        failed = getattr(driver, function)(ctypes.byref(value), *args)
        return -1 if failed else value.value

    if number("cuDeviceGetCount") < 1:
        return "the NVIDIA driver shows no GPU"
    version = number("cuDriverGetVersion")
    driver_cuda = (version // 1000, version % 1000 // 10)
    if version < OLDEST_DRIVER:
        return f"the NVIDIA driver supports CUDA {driver_cuda[0]}.{driver_cuda[1]}, but 13.0 is needed (driver 580 or newer)"
    device = number("cuDeviceGet", 0)
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGetName(name, 256, device)
    memory = ctypes.c_size_t()
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, _COMPUTE_CAPABILITY_MAJOR, _MINOR
    attributes = (16, 75, 76, 81)
    multiprocessors, major, minor, shared_memory = (number("cuDeviceGetAttribute", attribute, device) for attribute in attributes)
    gpu_name = name.value.decode(errors="replace")
    if major < 8:
        return f"{gpu_name} has compute capability {major}.{minor}, but 8.0 is needed"
    return Gpu(gpu_name, (major, minor), multiprocessors, shared_memory, memory.value, driver_cuda)


def cuda_unusable() -> str | None:
    """Why the GPU backend cannot be used here, or None when it can."""
    gpu = find_gpu()
    return gpu if isinstance(gpu, str) else None


def use_gpu(local_rank: int) -> None:
    """Make GPU number ``local_rank`` of CUDA_VISIBLE_DEVICES the only visible one. Call it before anything initialises the driver.

    A list of one GPU stays, because then the launcher has assigned one to each rank. Raises BackendError when the list is too short, or
    when the driver is initialised: it has already read the list, so that all ranks would share a GPU.
    """
    if _driver_has_started():
        raise BackendError("the NVIDIA driver was initialised before this rank had chosen its GPU; nothing may use the driver before that")
    visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    if not visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(local_rank)
    elif len(visible) > 1:
        if local_rank >= len(visible):
            raise BackendError(f"CUDA_VISIBLE_DEVICES lists {len(visible)} GPUs, but this host has a rank {local_rank}, counted from 0")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[local_rank]


def _driver_has_started() -> bool:
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return bool(driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) != NOT_INITIALIZED)


def _error_name(driver: ctypes.CDLL, status: int) -> str:
    text = ctypes.c_char_p()
    driver.cuGetErrorName(status, ctypes.byref(text))
    return f"{text.value.decode() if text.value else 'error'} ({status})"
