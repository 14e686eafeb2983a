"""``kdgen inspect``: the tensors and metadata of a .kdtr or any other safetensors file, or of all those in a folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import click

from kdgen.cli.output import emit_json, emit_table, printable, size_text
from kdgen.errors import KdgenError
from kdgen.weights.header import Header, read_header
from kdgen.weights.kdtr import FORMAT, kdtr_metadata, open_kdtr

VERIFY_TAKES = "--verify takes a .kdtr file, into which `kdgen import` writes checksums"


@dataclass(frozen=True)
class TensorReport:
    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class FileReport:
    file: str
    format: str  #: "kdtr", "safetensors", or "folder" for all safetensors files of one
    file_bytes: int
    metadata: dict[str, str]
    tensors: tuple[TensorReport, ...]
    verified: bool = False  #: every byte is what was written, by the file's checksums; False: nobody looked


@click.command("inspect")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE|DIR")
@click.option("--verify", is_flag=True, help="Read a .kdtr FILE whole, and hold every byte against the checksums in it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema kdgen.inspect/1).")
def command(file: Path, verify: bool, as_json: bool) -> None:
    """Show what a .kdtr or .safetensors FILE holds, or a published model's folder; headers are checked, tensors are read with --verify."""
    if verify and file.is_dir():
        raise KdgenError(f"{file}: is a folder; {VERIFY_TAKES}")
    report = _folder(file) if file.is_dir() else _file(file)
    if verify:
        if report.format != "kdtr" or not (opened := open_kdtr(file)).has_checksums:
            raise KdgenError(f"{file}: has no checksums to hold it against; {VERIFY_TAKES}")
        opened.verify()
        report = replace(report, verified=True)
    if as_json:
        emit_json("kdgen.inspect/1", report)
        return
    state = "; all checksums match" if verify else ""
    click.echo(f"{printable(report.file)}: {report.format}, {len(report.tensors)} tensors, {size_text(report.file_bytes)}{state}")
    for key, value in sorted(report.metadata.items()):
        shown = value if len(value) <= 200 else f"{value[:200]}… ({len(value)} characters)"
        click.echo(f"  {printable(key)}: {printable(shown)}")
    if report.tensors:
        rows = [(t.name, t.dtype, "×".join(map(str, t.shape)) or "scalar", size_text(t.bytes)) for t in report.tensors]
        emit_table(("tensor", "dtype", "shape", "size"), rows, right=(3,))


def _file(file: Path) -> FileReport:
    header = read_header(file)
    is_kdtr = header.metadata.get("format") == FORMAT
    if is_kdtr or file.suffix == ".kdtr":
        kdtr_metadata(header)  # says what is wrong with it
    return FileReport(str(file), "kdtr" if is_kdtr else "safetensors", header.file_bytes, dict(header.metadata), _tensors(header))


def _folder(folder: Path) -> FileReport:
    headers = [read_header(file) for file in sorted(folder.glob("*.safetensors"))]
    if not headers:
        raise KdgenError(f"{folder}: a folder that holds no safetensors file: name a file, or a published model's folder")
    metadata = {key: value for header in headers for key, value in header.metadata.items()}
    tensors = tuple(tensor for header in headers for tensor in _tensors(header))
    return FileReport(str(folder), "folder", sum(header.file_bytes for header in headers), metadata, tensors)


def _tensors(header: Header) -> tuple[TensorReport, ...]:
    return tuple(TensorReport(t.name, t.dtype, t.shape, t.nbytes) for t in header.tensors)
