"""Backends, on which generated kernels run. ``open_backend`` imports a backend's module and opens it."""

from __future__ import annotations

from kdgen.backends.base import Backend
from kdgen.errors import KdgenError


def backend_names() -> tuple[str, ...]:
    """The names that ``open_backend`` accepts: the GPU, and the CPU in its three modes (docs/cpu-backend.md)."""
    return ("cuda", "cpu", "cpu-shuffled", "cpu-checker")


def open_backend(name: str | None = None, seed: int = 0, threads: int | None = None) -> Backend:
    """The backend called ``name``; None chooses the GPU if one can be used, otherwise the CPU.

    ``seed`` determines the order of threads of ``cpu-shuffled`` and ``cpu-checker``. ``threads`` limits the OS threads of ``cpu``, by
    default all of the machine's.

    Raises BackendError, with the reason and what to do, when the backend cannot run here, and KdgenError for an unknown name.
    """
    if name is None:
        from kdgen.backends.gpu import cuda_unusable

        name = "cpu" if cuda_unusable() else "cuda"
    if name == "cuda":
        from kdgen.backends.cuda import CudaBackend

        return CudaBackend()
    if name not in backend_names():
        raise KdgenError(f"unknown backend {name!r}; there are {', '.join(backend_names())}")

    from kdgen.backends.cpu import CpuBackend, Mode

    modes: dict[str, Mode] = {"cpu": "plain", "cpu-shuffled": "shuffled", "cpu-checker": "checker"}
    return CpuBackend(modes[name], seed, threads)
