"""Start the ranks of one job on this host, and make sure that all of them end.

Every rank is a process that reads its place from torchrun's environment variables, as under torchrun itself.
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

#: Seconds for the other ranks to end by themselves after one has failed, and again after SIGTERM.
PATIENCE = 4.0
#: Seconds for ranks that were interrupted together with this process to end.
HEARING = 1.0
_POLL = 0.05


def own_command(arguments: Sequence[str]) -> list[str]:
    """``kdgen`` with ``arguments``, by this interpreter."""
    return [sys.executable, "-P", "-c", "from kdgen.cli import main; main()", *arguments]


def run_ranks(
    command: Sequence[str], ranks: int, environment: Mapping[str, str] | None = None, *,
    given: bytes | None = None, output: IO[bytes] | None = None, errors: IO[bytes] | None = None,
) -> int:  # fmt: skip
    """Run ``command`` in a process for each rank. Returns the job's exit code: 0 if all ranks return 0.

    Rank 0 reads ``given`` as its stdin, and writes to ``output`` and ``errors``, by default this process's own. The stderr of other ranks
    is kept. It is copied to rank 0's if it holds a traceback, or if that rank failed and rank 0 has not reported why. Raises
    KeyboardInterrupt after rank 0 has had time to print statistics. No rank is running when this returns or raises.
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
        except KeyboardInterrupt:  # a terminal's Ctrl-C reaches all ranks, a signal only this process
            if not _wait_for(processes, HEARING):
                processes[0].send_signal(signal.SIGINT)
                _wait_for(processes, PATIENCE)
            raise
        if failed is None:
            return 0
        _wait_for(processes, PATIENCE)
        # ranks that end because of a lost one also return 2; the first rank to end has the reason
        code, stderr = processes[failed].returncode, errors or sys.stderr.buffer
        texts = [b"" if log is None else _whole(log) for log in said]
        if bug := next((text for text in texts if b"Traceback" in text), b""):
            stderr.write(bug)  # only that rank knows where the bug is
        elif code != 2 or processes[0].returncode != 2:  # otherwise rank 0 has reported it
            stderr.write(texts[failed])
        # an interrupted rank reports that itself, and a closed pipe is no failure
        if (name := signal_of(code)) and name not in ("SIGINT", "SIGPIPE"):
            stderr.write(f"kdgen: rank {failed} of {ranks} was ended by {name}\n".encode())
        stderr.flush()
        return max(code, 0) or 2


def _whole(log: IO[bytes]) -> bytes:
    log.seek(0)
    return log.read()


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until one rank has failed, and return it, or until all have succeeded."""
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
    """End all processes when the block is left, also by an exception: by SIGTERM, and later by SIGKILL."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.send_signal(signal.SIGCONT)  # a stopped process would not handle SIGTERM
        if not _wait_for(processes, PATIENCE):
            for process in processes:
                process.kill()
        for process in processes:
            process.wait()


def _free_port() -> int:
    """A free port. If another process takes it before rank 0 does, rank 0 reports that."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
