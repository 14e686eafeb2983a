"""Runs of the kdgen command in child processes, under limits of time and memory."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import kdgen

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ("-c", "from kdgen.cli import main; main()")
#: What a command on a small input may take. The address space is bounded so that a runaway cannot take the machine with it.
MOST_SECONDS = 120.0
MOST_BYTES = 1 << 30
ADDRESS_SPACE = 6 << 30


@dataclass(frozen=True)
class Outcome:
    """How a command ended. ``code`` is negative for a signal, as in ``subprocess``; ``peak_bytes`` is its resident memory's peak."""

    arguments: tuple[str, ...]
    code: int
    stdout: str
    stderr: str
    seconds: float
    peak_bytes: int
    timed_out: bool


def environment(cache: Path, **more: str) -> dict[str, str]:
    """The variables of a run: this checkout's kdgen, a cache folder, and one OS thread a numerical library."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KDGEN_")}
    return {**kept, "PYTHONPATH": str(ROOT), "KDGEN_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", **more}


def start(arguments: Sequence[str], folder: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """``kdgen ARGUMENTS`` in a process group of its own, so that a kill reaches whatever it started."""
    return subprocess.Popen(
        [sys.executable, *COMMAND, *arguments], cwd=folder, env=dict(variables), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def finished(process: subprocess.Popen[bytes], arguments: Sequence[str], most_seconds: float = MOST_SECONDS) -> Outcome:
    """The outcome of a started command, which is killed after ``most_seconds``. Its peak of memory is not known (0)."""
    began, timed_out = time.perf_counter(), False
    try:
        out, err = process.communicate(timeout=most_seconds)
    except subprocess.TimeoutExpired:
        timed_out = True
        kill_group(process.pid)
        out, err = process.communicate()
    texts = out.decode(errors="replace"), err.decode(errors="replace")
    return Outcome(tuple(arguments), process.returncode, *texts, time.perf_counter() - began, 0, timed_out)


def run(arguments: Sequence[str], folder: Path, variables: Mapping[str, str], most_seconds: float = MOST_SECONDS) -> Outcome:
    """Start ``kdgen ARGUMENTS`` and wait for it."""
    return finished(start(arguments, folder, variables), arguments, most_seconds)


def kill_group(group: int) -> None:
    """SIGKILL to every process of the group, where one is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def import_everything() -> None:
    """Import all of kdgen's modules and the libraries that read tokenizers, which commands otherwise import when they need them: forks are
    faster, and every one of them runs the same text, whatever happens to the checkout meanwhile."""
    for name in ("tokenizers", "tiktoken", *(module.name for module in pkgutil.walk_packages(kdgen.__path__, "kdgen."))):
        if not name.startswith("kdgen.demo."):  # training, which needs torch
            importlib.import_module(name)


def run_forked(arguments: Sequence[str], folder: Path, variables: Mapping[str, str], most_seconds: float = MOST_SECONDS) -> Outcome:
    """``kdgen ARGUMENTS`` in a fork of this process, milliseconds instead of a second a command after ``import_everything``.

    The caller must have run no kernels and started no threads.
    """
    files = [folder / f".campaign-{name}" for name in ("out", "err")]
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        _in_child(arguments, folder, variables, files)
    status, used, timed_out = _wait(child, began + most_seconds)
    kill_group(child)  # what the command has left behind
    seconds = time.perf_counter() - began
    out, err = (file.read_bytes().decode(errors="replace") if file.exists() else "" for file in files)
    for file in files:
        file.unlink(missing_ok=True)
    return Outcome(tuple(arguments), os.waitstatus_to_exitcode(status), out, err, seconds, used.ru_maxrss * 1024, timed_out)


def _wait(child: int, deadline: float) -> tuple[int, resource.struct_rusage, bool]:
    """The child's status and use of resources, and whether it had to be killed at the deadline."""
    pause, timed_out = 0.001, False
    while True:
        pid, status, used = os.wait4(child, os.WNOHANG)
        if pid:
            return status, used, timed_out
        if time.perf_counter() > deadline and not timed_out:
            timed_out = True
            kill_group(child)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)


def _in_child(arguments: Sequence[str], folder: Path, variables: Mapping[str, str], files: Sequence[Path]) -> None:
    """Become the command; never returns."""
    code = 70
    try:
        os.setsid()
        for number, file in zip((1, 2), files, strict=True):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)  # not a test runner's
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.argv = ["kdgen", *arguments]
        from kdgen.cli import main

        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        except BaseException:
            traceback.print_exc()
            code = 1
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(code)
