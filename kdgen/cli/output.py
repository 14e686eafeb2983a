"""Output of all commands: results on stdout, as a table or as JSON of the same dataclass; progress and warnings on stderr."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import errno
import io
import json
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from kdgen.codegen.cache import Cache
from kdgen.errors import KdgenError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.console import Console


NOTE_SECONDS = 1.0  #: after which a note says that kernels are being compiled
NARROWEST = 60  #: the least width, in columns, of tables and trees; a narrower terminal breaks their lines


def console(stream: TextIO | None = None) -> Console:
    """A rich console on ``stream``, by default stdout. It honours NO_COLOR. Output that goes to no terminal is not cut to a width."""
    from rich.console import Console

    file = stream or sys.stdout
    out = Console(file=file, highlight=False, markup=False, emoji=False, width=None if file.isatty() else 1000)
    if stream is None and out.width < NARROWEST:  # rich cuts what does not fit, which only status lines on stderr may be
        out.width = NARROWEST
    return out


def take_any_character(stream: TextIO) -> None:
    """Let ``stream`` write every character: one that the locale's encoding lacks is written as an escape. ASCII becomes UTF-8, as in
    click, because a terminal without a locale nearly always understands UTF-8."""
    if not isinstance(stream, io.TextIOWrapper) or _speaks_utf8(stream):
        return
    if codecs.lookup(stream.encoding).name == "ascii":
        stream.reconfigure(encoding="utf-8")
    else:
        stream.reconfigure(errors="backslashreplace")


class _Stdout(io.FileIO):
    """Standard output whose write errors name it, as the errors of other files do, so that a user sees which disk is full."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = "stdout"
            raise


def name_stdout() -> None:
    """Let write errors of standard output name it, unless it was replaced by something that is not a file."""
    stream = sys.stdout
    if stream is not sys.__stdout__ or not isinstance(stream, io.TextIOWrapper):
        return
    stream.flush()
    raw = _Stdout(stream.fileno(), "wb", closefd=False)
    unbuffered = isinstance(stream.buffer, io.FileIO)  # by PYTHONUNBUFFERED
    sys.stdout = io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=unbuffered,
    )


def check_writable(file: Path | None) -> None:
    """Raises KdgenError when ``file`` cannot be written. Call it before long work whose result goes there."""
    if file is None:
        return
    folder = file.parent
    if not folder.is_dir():
        raise KdgenError(f"{file}: cannot be written: there is no folder {folder}")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise KdgenError(f"{file}: cannot be written: {os.strerror(errno.EACCES)}")


def emit_json(schema: str, report: DataclassInstance) -> None:
    """Write ``report`` to stdout as one JSON object. Its first key is ``schema``: ``kdgen.<command>/<version>``.

    NaN and infinity, which JSON lacks, are null. Bytes of a path that are not UTF-8 are escaped. If stdout is not UTF-8, all characters
    outside ASCII are escaped.
    """
    values = _finite({"schema": schema, **dataclasses.asdict(report)})
    text = json.dumps(values, indent=2, default=_plain, ensure_ascii=not _speaks_utf8(sys.stdout), allow_nan=False)
    click.echo(re.sub("[\ud800-\udfff]", lambda lone: f"\\u{ord(lone[0]):04x}", text))


def emit_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Write a table to stdout, the columns numbered in ``right`` aligned to the right. Without column names it has no header."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=any(columns))
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i in right else "left", overflow="fold", no_wrap=i == 0)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    out = console()
    with out.capture() as lines:
        out.print(table)
    click.echo("\n".join(line.rstrip() for line in lines.get().splitlines()))


@contextlib.contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr while the block runs. Call the value with the name of what was just finished. Silent without a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[last]}"))
    with Progress(*columns, console=console(sys.stderr), transient=True) as bar:
        task = bar.add_task(description, total=total, last="")
        yield lambda finished: bar.update(task, advance=1, last=printable(finished))


@contextlib.contextmanager
def byte_progress(before: str, during: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr while the block runs. Call the value with (bytes done, bytes in all). Silent without a terminal.

    The bar's title is ``before`` until the first call, as there are no bytes to show yet, and ``during`` from then on.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, Task, TextColumn, TimeElapsedColumn, TransferSpeedColumn
    from rich.text import Text

    class Bytes(DownloadColumn):
        def render(self, task: Task) -> Text:
            return Text() if task.total is None else super().render(task)

    class Speed(TransferSpeedColumn):
        def render(self, task: Task) -> Text:
            return Text() if task.total is None else super().render(task)

    columns = (TextColumn("{task.description}"), BarColumn(), Bytes(), Speed(), TimeElapsedColumn())
    with Progress(*columns, console=console(sys.stderr), transient=True) as bar:
        task = bar.add_task(before, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total, description=during)


@contextlib.contextmanager
def compile_note(what: str) -> Iterator[None]:
    """While the block compiles ``what`` into the cache, write one line to stderr if that takes more than ``NOTE_SECONDS``. A terminal shows
    a status line or a bar instead."""
    if sys.stderr.isatty():
        yield
        return
    line = printable(f"kdgen: compiling {what}, once; later runs read them from {Cache.default().path}")
    timer = threading.Timer(NOTE_SECONDS, lambda: click.echo(line, err=True))
    timer.daemon = True  # a command that ends earlier does not wait for it
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """A status line on stderr while the block runs. Call the value to set its text. Silent without a terminal."""
    with log() as (doing, _):
        yield doing


@contextlib.contextmanager
def log() -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """(doing, line) for a long command: ``doing`` sets a status line on stderr while the block runs, if that is a terminal; ``line`` writes
    a line to stderr that stays."""
    if not sys.stderr.isatty():
        yield (lambda _: None), (lambda text: click.echo(printable_lines(text), err=True))
        return
    out = console(sys.stderr)
    with out.status("") as shown:
        yield (lambda doing: shown.update(printable(doing))), (lambda text: out.print(printable_lines(text)))


def warn(message: str) -> None:
    """One line on stderr."""
    click.echo(f"kdgen: warning: {message}", err=True)


def size_text(count: int) -> str:
    """Bytes in a readable unit: ``1.5 MiB``."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def printable(text: str) -> str:
    """``text`` with control characters as escapes: names in files may hold some, and a terminal would obey them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """``printable`` applied to each line, which keeps line breaks."""
    return "\n".join(printable(line) for line in text.split("\n"))


def _speaks_utf8(stream: TextIO) -> bool:
    return codecs.lookup(stream.encoding or "ascii").name.startswith("utf-")


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
