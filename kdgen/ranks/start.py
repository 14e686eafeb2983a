"""Start the ranks of one job on this host, and see to it that all of them end.

Every rank is a process that finds its place in torchrun's environment variables, as it would under any other launcher.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from kdgen.errors import KdgenError
from kdgen.files.resources import import_path
from kdgen.ranks.group import signal_of

#: Seconds that the other ranks have to end by themselves once one has failed, and again once they were asked to.
PATIENCE = 4.0
#: Seconds after which ranks that were interrupted with this process have ended.
HEARING = 1.0
_POLL = 0.05


def own_command(arguments: Sequence[str]) -> list[str]:
    """``kdgen`` with ``arguments``, by this interpreter."""
    return [sys.executable, "-P", "-c", "from kdgen.cli import main; main()", *arguments]


def run_ranks(
    command: Sequence[str], ranks: int, environment: Mapping[str, str] | None = None, *,
    given: bytes | None = None, output: IO[bytes] | None = None, errors: IO[bytes] | None = None,
) -> int:  # fmt: skip
    """Run ``command`` once a rank and return the job's exit code, 0 when all ranks give 0.

    Rank 0 has ``given`` as its input, ``output`` as its stdout and ``errors`` as its stderr, or this process's own. What another rank
    writes to stderr is kept, and goes to rank 0's when it is a traceback, or that rank has failed and rank 0 has not said why. Raises
    KeyboardInterrupt once rank 0 has had the time to say how far it came. No rank is left when this returns or raises.
    """
    shared = dict(os.environ if environment is None else environment)
    shared |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "KDGEN_PORT": str(_free_port()), "KDGEN_JOB": secrets.token_hex(8)}
    shared |= {"KDGEN_PARENT": str(os.getpid()), "PYTHONPATH": import_path()}
    processes: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as files, _ended(processes):
        said: list[IO[bytes] | None] = []
        source: IO[bytes] | None = None
        if given is not None:
            source = files.enter_context(tempfile.TemporaryFile())
            source.write(given)
            source.seek(0)
        for rank in range(ranks):
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            log: IO[bytes] | None = files.enter_context(tempfile.TemporaryFile()) if rank else None
            said.append(log)
            try:
                processes.append(
                    subprocess.Popen(
                        command, env=own, stdin=subprocess.DEVNULL if rank else source,
                        stdout=subprocess.DEVNULL if rank else output, stderr=log or errors,
                    )
                )  # fmt: skip
            except OSError as error:
                raise KdgenError(f"rank {rank} cannot be started: {command[0]}: {error.strerror or error}") from error
        try:
            failed = _first_failure(processes)
        except KeyboardInterrupt:  # of a terminal all ranks hear, of a signal this process alone
            if not _wait_for(processes, HEARING):
                processes[0].send_signal(signal.SIGINT)
                _wait_for(processes, PATIENCE)
            raise
        if failed is None:
            return 0
        _wait_for(processes, PATIENCE)
        # ranks that a lost one took with them end with 2, too; the first to go knows why
        code, stderr = processes[failed].returncode, errors or sys.stderr.buffer
        texts = [b"" if log is None else _whole(log) for log in said]
        if bug := next((text for text in texts if b"Traceback" in text), b""):
            stderr.write(bug)  # a rank by itself knows where it is
        elif code != 2 or processes[0].returncode != 2:  # else rank 0 has made the same mistake, or was told why, and has said so
            stderr.write(texts[failed])
        # a rank that is interrupted says so, and one whose reader has enough has nothing to say
        if (name := signal_of(code)) and name not in ("SIGINT", "SIGPIPE"):
            stderr.write(f"kdgen: rank {failed} of {ranks} was ended by {name}\n".encode())
        stderr.flush()
        return max(code, 0) or 2


def _whole(log: IO[bytes]) -> bytes:
    log.seek(0)
    return log.read()


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until one rank has failed, and say which, or all have ended well."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return rank
        if None not in codes:
            return None
        time.sleep(_POLL)


def _wait_for(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> bool:
    """Whether all have ended in time."""
    stop = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        if time.monotonic() > stop:
            return False
        time.sleep(_POLL)
    return True


@contextlib.contextmanager
def _ended(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """When the block is left, however, every process has ended: asked to first, then made to."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.send_signal(signal.SIGCONT)  # a stopped one would not hear of it
        if not _wait_for(processes, PATIENCE):
            for process in processes:
                process.kill()
        for process in processes:
            process.wait()


def _free_port() -> int:
    """A port nobody listens on. Another process may take it before rank 0 does, which then says so."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
