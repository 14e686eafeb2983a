"""The command line: one module a command, each with a click command named ``command``, imported when it is called.

Results go to stdout, progress and errors to stderr. Exit codes: 0 ok, 1 a finding (drift, mismatch; ``ctx.exit(1)``), 2 a usage or
environment error, 130 interrupted, 143 terminated. A KdgenError is shown as its message alone; ``--debug`` adds the traceback.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import click

from kdgen import __version__


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
        """Resolve as click does, but let the error for an unknown command list the known ones."""
        if not args[0].startswith("-") and args[0] not in (known := self.list_commands(ctx)) and not ctx.resilient_parsing:
            ctx.fail(f"unknown command {args[0]!r}; kdgen knows {', '.join(known)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        listed = self.list_commands(ctx)
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, summary in self.summaries if name in listed])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run as click does, but a message that cannot be written to stderr is dropped and leaves the exit code as it is."""
        _ignore_write_errors(sys.stderr)
        return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command, and turn the exceptions it raises into the exit codes above."""
        from kdgen.cli.failures import report_failure  # not for --help

        _prepare_streams()
        try:
            with _ended_in_order():
                _clean_up()
                result: object = super().invoke(ctx)
            sys.stdout.flush()  # here, where a closed pipe or a full disk can still be handled
            return result
        except (click.exceptions.Exit, click.Abort):
            raise
        except (Exception, KeyboardInterrupt) as error:
            ctx.exit(report_failure(error, ctx.params["debug"]))


def _prepare_streams() -> None:
    """Make stdout and stderr usable: open where they were closed, able to write every character, and stdout named in errors."""
    from kdgen.cli.output import name_stdout, take_any_character  # not for --help

    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed before the start
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open as long as the process
        take_any_character(getattr(sys, name))
    name_stdout()


def _clean_up() -> None:
    """Remove what killed runs of kdgen left in the cache and among the system's temporary files."""
    from kdgen.codegen.cache import Cache
    from kdgen.files.temporary import remove_abandoned_scratch

    Cache.default().remove_abandoned()
    remove_abandoned_scratch()


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """While the block runs, SIGTERM and SIGHUP raise SystemExit, so that the process cleans up before it ends."""

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


def _ignore_write_errors(stream: TextIO | None) -> None:
    """Redirect ``stream`` to the null device at its first failing write, for example on a full disk."""
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


@click.group(cls=LazyGroup, context_settings={"auto_envvar_prefix": "KDGEN", "help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kdgen", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of errors.")
def main(debug: bool) -> None:
    """Turn a model spec into specialised CUDA C++, compile it, and decode with it: exactly, with or without draft trees."""
