"""What commands share: results as a table or as JSON of the same dataclass on stdout, progress and warnings on stderr."""

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


NOTE_SECONDS = 1.0  #: of compiling, after which it is said
NARROWEST = 60  #: columns that tables and trees are laid out for at least; a narrower terminal breaks their lines


def console(stream: TextIO | None = None) -> Console:
    """A rich console on ``stream`` (stdout). NO_COLOR is honoured; where there is no terminal, nothing is cut to its width."""
    from rich.console import Console

    file = stream or sys.stdout
    out = Console(file=file, highlight=False, markup=False, emoji=False, width=None if file.isatty() else 1000)
    if stream is None and out.width < NARROWEST:  # rich leaves out what does not fit; status lines on stderr may be cut
        out.width = NARROWEST
    return out


def take_any_character(stream: TextIO) -> None:
    """See to it that no character ends a command: one that the locale's encoding lacks is written as an escape. ASCII becomes UTF-8,
    for a terminal with no locale set nearly always knows it; click writes so, too."""
    if not isinstance(stream, io.TextIOWrapper) or _speaks_utf8(stream):
        return
    if codecs.lookup(stream.encoding).name == "ascii":
        stream.reconfigure(encoding="utf-8")
    else:
        stream.reconfigure(errors="backslashreplace")


class _Stdout(io.FileIO):
    """Standard output that is named in the errors of writing to it, as every other file is: a full disk may be its own or another."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = "stdout"
            raise


def name_stdout() -> None:
    """Let errors of writing to standard output name it, unless something else than a file stands in for it."""
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
    """Raises KdgenError when ``file`` cannot be written later, so that long work is not done in vain."""
    if file is None:
        return
    folder = file.parent
    if not folder.is_dir():
        raise KdgenError(f"{file}: cannot be written: there is no folder {folder}")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise KdgenError(f"{file}: cannot be written: {os.strerror(errno.EACCES)}")


def emit_json(schema: str, report: DataclassInstance) -> None:
    """``report`` on stdout as one JSON object. ``schema`` (``kdgen.<command>/<version>``) comes first, with a version for readers.

    Numbers that JSON does not know (NaN, infinity) are null; bytes of a path that are no UTF-8 are escaped, and so is all that is not
    ASCII where stdout does not speak UTF-8.
    """
    values = _finite({"schema": schema, **dataclasses.asdict(report)})
    text = json.dumps(values, indent=2, default=_plain, ensure_ascii=not _speaks_utf8(sys.stdout), allow_nan=False)
    click.echo(re.sub("[\ud800-\udfff]", lambda lone: f"\\u{ord(lone[0]):04x}", text))


def emit_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """A table on stdout; the columns numbered in ``right`` are aligned to the right. No header when the columns have no names."""
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
    """A progress bar on stderr while the block runs; call the value with what was just finished. Silent without a terminal."""
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
    """A progress bar on stderr while the block runs; call the value with (bytes done, bytes in all). Silent without a terminal.

    It is called ``before`` until the first call, when there are no bytes to show, and ``during`` from then on.
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
    """While the block compiles ``what``, which then is in the cache: a line on stderr if that takes more than ``NOTE_SECONDS``. On a
    terminal nothing, for a status line or a bar is shown there."""
    if sys.stderr.isatty():
        yield
        return
    line = printable(f"kdgen: compiling {what}, once; later runs take them from {Cache.default().path}")
    timer = threading.Timer(NOTE_SECONDS, lambda: click.echo(line, err=True))
    timer.daemon = True  # a command that ends meanwhile does not wait for it
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """What is being done, on stderr, while the block runs; call the value to say something else. Silent without a terminal."""
    with log() as (doing, _):
        yield doing


@contextlib.contextmanager
def log() -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """(doing, line) for a long command: what is being done, shown on stderr while the block runs where that is a terminal, and lines that
    stay, terminal or not."""
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
    """Bytes for people: ``1.5 MiB``."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def printable(text: str) -> str:
    """``text`` with everything a terminal could obey written as an escape: names in files are not ours."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """``printable`` of each line, so that the line breaks stay."""
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
    raise TypeError(f"{type(value).__name__} does not go into JSON")
