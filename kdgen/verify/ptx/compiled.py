"""CUDA C++ to PTX by NVRTC, with the flags of every kernel. It needs no GPU and no driver."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdgen.codegen.compile import Flags, nvrtc_version
from kdgen.errors import BackendError, CompileError


def compile_ptx(text: str, arch: str, include: Path, macros: Sequence[str] = ()) -> str:
    """The PTX of ``text`` for ``arch`` (``sm_90a``), with the headers of folder ``include`` and ``macros`` defined.

    Raises BackendError when NVRTC cannot be loaded, CompileError with the compiler's log when the text does not compile.
    """
    nvrtc_version()  # says what to install where there is none
    from cuda.bindings import nvrtc

    def call(function: Any, *arguments: object) -> Any:
        status, *values = function(*arguments)
        if int(status) != 0:
            raise BackendError(f"NVRTC refuses {function.__name__}: {status.name}")
        return values[0] if values else None

    flags = Flags()
    options = [f"-arch={arch.replace('sm_', 'compute_')}", f"-I{include}", f"-std={flags.std}"]
    for name, value in (("fmad", flags.fma), ("ftz", flags.ftz), ("prec-div", flags.prec_div), ("prec-sqrt", flags.prec_sqrt)):
        options.append(f"-{name}={str(value).lower()}")
    options += [f"-D{macro}" for macro in macros]
    program = call(nvrtc.nvrtcCreateProgram, text.encode(), b"primitives.cu", 0, [], [])
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(status) != 0:
            log = b" " * call(nvrtc.nvrtcGetProgramLogSize, program)
            call(nvrtc.nvrtcGetProgramLog, program, log)
            raise CompileError(f"the primitives do not compile for {arch}:\n{log.decode(errors='replace').strip(chr(0))}")
        ptx: bytes = b" " * call(nvrtc.nvrtcGetPTXSize, program)
        call(nvrtc.nvrtcGetPTX, program, ptx)
        return ptx.decode().strip("\0")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
