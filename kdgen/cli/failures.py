"""How a command fails: the message on stderr and the exit code for each kind of exception."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import sys
import traceback

import click

from kdgen.cli.output import printable, printable_lines
from kdgen.errors import KdgenError, RanksError

REPORT_SECONDS = 4.0  #: for which another rank tries to send its error to rank 0; rank 0 is not there if it failed in the same way


def report_failure(error: BaseException, debug: bool) -> int:
    """Write what went wrong to stderr, with the traceback if ``debug``, and return the exit code. Call it where ``error`` is handled."""
    if isinstance(error, click.ClickException):
        if _on_other_rank():
            _send_to_rank_0(error.format_message())
        else:
            error.show()
        return 2  # click's own code for some of them is 1, which means a finding here
    if isinstance(error, KeyboardInterrupt):
        click.echo("kdgen: interrupted", err=True)
        return 130
    if isinstance(error, BrokenPipeError):
        _discard_output()  # the reader of the pipe has closed it
        return 128 + 13
    if isinstance(error, KdgenError):
        return _known_error(error, debug)
    if isinstance(error, OSError):  # no stage expected it: a full disk, a name too long, a folder that was removed
        return _system_error(error, debug)
    if isinstance(error, MemoryError):
        if debug:
            traceback.print_exc()
        click.echo("kdgen: error: out of memory on the host", err=True)
        return 2
    if (code := _code_of_signal_before(error)) is not None:
        return code
    traceback.print_exc()
    click.echo("kdgen: this is a bug in kdgen; please report it with the lines above and `kdgen doctor --json`", err=True)
    return 2


def _known_error(error: KdgenError, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    elif isinstance(error, RanksError) and _on_other_rank():
        _send_to_rank_0(str(error))
    else:
        # names in files may hold control characters, which a terminal would obey
        click.echo(f"kdgen: error: {printable_lines(str(error).expandtabs())}", err=True)
    return 2


def _system_error(error: OSError, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    else:
        file = "" if error.filename is None else f"{printable(str(error.filename))}: "
        hints = {
            errno.ENOSPC: "; TMPDIR names another folder for temporary files",
            errno.EFBIG: "; ulimit -f limits this process",
        }
        hint = hints.get(error.errno or 0, "") if error.filename != "stdout" else ""
        click.echo(f"kdgen: error: {file}{error.strerror or error} (--debug shows where{hint})", err=True)
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
    return 2


def _on_other_rank() -> bool:
    """Whether a launcher started this process as a rank above 0. All ranks have the same command line, so rank 0 reports its errors."""
    from kdgen.ranks.place import place_in

    with contextlib.suppress(KdgenError):
        place = place_in(os.environ)
        return place is not None and place.rank > 0
    return False


def _send_to_rank_0(problem: str) -> None:
    """Send this rank's error to rank 0, which may have found no error in its own command and be waiting for this rank."""
    from kdgen.ranks.group import joined
    from kdgen.ranks.place import place_in

    with contextlib.suppress(KdgenError, KeyboardInterrupt):
        place = place_in(os.environ)
        if place is not None:
            with joined(dataclasses.replace(place, seconds=min(place.seconds, REPORT_SECONDS))) as group:
                if group is not None:
                    group.close(f"rank {place.rank}: {problem}")


def _code_of_signal_before(error: BaseException) -> int | None:
    """The exit code of the signal that caused ``error``, or None. A library that a signal interrupts may raise another exception."""
    cause = error.__context__
    while cause is not None and not isinstance(cause, SystemExit):
        cause = cause.__context__
    return cause.code if cause is not None and isinstance(cause.code, int) and cause.code > 128 else None


def _discard_output() -> None:
    """Redirect stdout to the null device, because Python flushes it once more at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
