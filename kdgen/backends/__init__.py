"""Where generated kernels run. ``open_backend`` is the way in; the modules are imported when their backend is opened."""

from __future__ import annotations

from kdgen.backends.base import Backend
from kdgen.errors import KdgenError


def backend_names() -> tuple[str, ...]:
    """What ``open_backend`` takes: the GPU, and the CPU in its three modes (docs/cpu-backend.md)."""
    return ("cuda", "cpu", "cpu-shuffled", "cpu-checker")


def open_backend(name: str | None = None, seed: int = 0, threads: int | None = None) -> Backend:
    """The backend called ``name``; with None the GPU if one can be used, else the CPU.

    ``seed`` orders the threads of ``cpu-shuffled`` and ``cpu-checker``. ``threads`` is how many of the machine's ``cpu`` may use, all of
    them without it.

    Raises BackendError (why it cannot run here, and what to do), KdgenError for an unknown name.
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
