"""The command line: one module a command, each with a click command named ``command``, imported when it is called.

Results go to stdout, progress and errors to stderr. Exit codes: 0 ok, 1 a finding (drift, mismatch; ``ctx.exit(1)``), 2 a usage or
environment error, 130 interrupted, 143 terminated. A KdgenError is its message alone; ``--debug`` adds the traceback.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import importlib.util
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import click

from kdgen import __version__
from kdgen.errors import KdgenError, RanksError

#: How long a rank with a bad command looks for rank 0, which is not there if it has made the same mistake.
TELL_SECONDS = 4.0


class LazyGroup(click.Group):
    """A group whose commands are listed here with their summaries, so that ``kdgen --help`` imports none of them."""

    summaries = (
        ("build", "Generate and compile the kernels of model specs."),
        ("verify", "Check kernels and decoding against references, bit for bit where promised."),
        ("demo", "Decode with draft trees and plainly, and compare."),
        ("plan", "Show what a model needs on some GPUs, and its fastest steps there."),
        ("generate", "Continue text or token ids with a model's weights, plainly or with draft trees."),
        ("import", "Pack a published model into one .kdtr file that loads as it is."),
        ("quantize", "Round a model's routed experts to INT4, in the published format."),
        ("spec", "Print the spec of a published model as YAML."),
        ("bench", "Time kernels and steps on a GPU against the physical floor."),
        ("inspect", "Show what a .kdtr or .safetensors file or a model's folder holds."),
        ("doctor", "Report versions, compilers, GPU and cache, for bug reports."),
        ("cache", "Show or clear the cache of compiled kernels."),
    )

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, _ in self.summaries if importlib.util.find_spec(f"kdgen.cli.{name}")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = importlib.import_module(f"kdgen.cli.{cmd_name}").command
        if not isinstance(command, click.Command):
            raise TypeError(f"kdgen.cli.{cmd_name}.command is not a click command")
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """As click has it, but whoever mistypes a command is told which there are."""
        if not args[0].startswith("-") and args[0] not in (known := self.list_commands(ctx)) and not ctx.resilient_parsing:
            ctx.fail(f"unknown command {args[0]!r}; kdgen knows {', '.join(known)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        listed = self.list_commands(ctx)
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, summary in self.summaries if name in listed])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """As click has it, but messages that cannot be written change nothing, the exit code least of all."""
        _lose_what_cannot_be_written(sys.stderr)
        return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command and turn what it raises into the exit codes above."""
        from kdgen.cli.output import name_stdout, printable, printable_lines, take_any_character  # not for --help

        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed before the start
                setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open as long as the process
            take_any_character(getattr(sys, name))
        name_stdout()
        try:
            with _ended_in_order():
                _clean_up()
                result: object = super().invoke(ctx)
            sys.stdout.flush()  # here, where a closed pipe or a full disk can still be handled
            return result
        except (click.exceptions.Exit, click.Abort):
            raise
        except click.ClickException as error:
            if _told_by_rank_0():
                _tell_rank_0(error.format_message())
            else:
                error.show()
            ctx.exit(2)  # click's own code for some is 1, which here means a finding
        except KdgenError as error:
            if ctx.params["debug"]:
                traceback.print_exc()
            elif isinstance(error, RanksError) and _told_by_rank_0():
                _tell_rank_0(str(error))
            else:
                # names in files may hold what a terminal would obey
                text = printable_lines(str(error).expandtabs())
                click.echo(f"kdgen: error: {text}", err=True)
            ctx.exit(2)
        except KeyboardInterrupt:
            click.echo("kdgen: interrupted", err=True)
            ctx.exit(130)
        except BrokenPipeError:
            _discard_output()  # whoever read it has enough
            ctx.exit(128 + 13)
        except OSError as error:  # what no stage expected of the file system: a full disk, a name too long, a folder that is gone
            if ctx.params["debug"]:
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
            ctx.exit(2)
        except MemoryError:
            if ctx.params["debug"]:
                traceback.print_exc()
            click.echo("kdgen: error: out of memory on the host", err=True)
            ctx.exit(2)
        except Exception as error:
            if (code := _end_behind(error)) is not None:
                ctx.exit(code)
            traceback.print_exc()
            click.echo("kdgen: this is a bug in kdgen; please report it with the lines above and `kdgen doctor --json`", err=True)
            ctx.exit(2)


def _clean_up() -> None:
    """Remove what killed runs of kdgen left in the cache and among the system's temporary files."""
    from kdgen.codegen.cache import Cache
    from kdgen.files.temporary import remove_abandoned_scratch

    Cache.default().remove_abandoned()
    remove_abandoned_scratch()


def _told_by_rank_0() -> bool:
    """Whether this process is another rank of a launcher's, which gives all ranks one command line: what is wrong with that is wrong for
    all.
    """
    from kdgen.ranks.place import place_in

    with contextlib.suppress(KdgenError):
        place = place_in(os.environ)
        return place is not None and place.rank > 0
    return False


def _tell_rank_0(problem: str) -> None:
    """What is wrong with this rank's command, where rank 0 has found nothing wrong with its own and waits for this one."""
    from kdgen.ranks.group import joined
    from kdgen.ranks.place import place_in

    with contextlib.suppress(KdgenError, KeyboardInterrupt):
        place = place_in(os.environ)
        if place is not None:
            with joined(dataclasses.replace(place, seconds=min(place.seconds, TELL_SECONDS))) as group:
                if group is not None:
                    group.close(f"rank {place.rank}: {problem}")


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """While the block runs, a request to end (``kill``, a terminal that closes) raises SystemExit, so that nothing is left behind."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    taken = []
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, end)
                taken.append(number)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _end_behind(error: Exception) -> int | None:
    """The exit code of a request to end in whose wake ``error`` came, if it did: a library that was interrupted with a lock half taken
    raises another error, which is no bug.
    """
    behind = error.__context__
    while behind is not None and not isinstance(behind, SystemExit):
        behind = behind.__context__
    return behind.code if behind is not None and isinstance(behind.code, int) and behind.code > 128 else None


def _lose_what_cannot_be_written(stream: TextIO | None) -> None:
    """From the first error on, such as a full disk, ``stream`` writes to nowhere."""
    if not isinstance(stream, io.TextIOWrapper):
        return

    def forgiving(call: Callable[..., Any]) -> Callable[..., Any]:
        def tried(*args: Any) -> Any:
            try:
                return call(*args)
            except BrokenPipeError:
                raise
            except OSError:
                with contextlib.suppress(OSError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
                    return call(*args)

        return tried

    stream.write, stream.flush = forgiving(stream.write), forgiving(stream.flush)  # type: ignore[method-assign]


def _discard_output() -> None:
    """Python flushes stdout once more at exit; give it somewhere to go."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(cls=LazyGroup, context_settings={"auto_envvar_prefix": "KDGEN", "help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kdgen", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of errors.")
def main(debug: bool) -> None:
    """Turn a model spec into specialised CUDA C++, compile it, and decode with it: exactly, with or without draft trees."""
