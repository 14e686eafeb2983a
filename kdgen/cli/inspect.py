"""``kdgen inspect``: the tensors and metadata of a .kdtr file, of another safetensors file, or of all those in a folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import click

from kdgen.cli.output import emit_json, emit_table, printable, size_text
from kdgen.errors import KdgenError
from kdgen.weights.header import Header, read_header
from kdgen.weights.kdtr import FORMAT, kdtr_metadata, open_kdtr

VERIFY_TAKES = "--verify takes a .kdtr file, because `kdgen import` writes checksums into it"


@dataclass(frozen=True)
class TensorReport:
    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class FileReport:
    file: str
    format: str  #: "kdtr", "safetensors", or "folder" for all safetensors files of a folder
    file_bytes: int
    metadata: dict[str, str]
    tensors: tuple[TensorReport, ...]
    verified: bool = False  #: the file's checksums match every byte; False: they were not compared


@click.command("inspect")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE|DIR")
@click.option("--verify", is_flag=True, help="Read the whole .kdtr FILE and compare it with the checksums in it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema kdgen.inspect/1).")
def command(file: Path, verify: bool, as_json: bool) -> None:
    """Show the tensors and metadata of a .kdtr or .safetensors FILE, or of a published model's folder. Headers are checked;
    tensors are read only with --verify."""
    if verify and file.is_dir():
        raise KdgenError(f"{file}: this is a folder; {VERIFY_TAKES}")
    report = _folder(file) if file.is_dir() else _file(file)
    if verify:
        if report.format != "kdtr" or not (opened := open_kdtr(file)).has_checksums:
            raise KdgenError(f"{file}: holds no checksums to compare with; {VERIFY_TAKES}")
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
        kdtr_metadata(header)  # raises when it is damaged
    return FileReport(str(file), "kdtr" if is_kdtr else "safetensors", header.file_bytes, dict(header.metadata), _tensors(header))


def _folder(folder: Path) -> FileReport:
    headers = [read_header(file) for file in sorted(folder.glob("*.safetensors"))]
    if not headers:
        raise KdgenError(f"{folder}: the folder holds no safetensors file: name a file, or a published model's folder")
    metadata = {key: value for header in headers for key, value in header.metadata.items()}
    tensors = tuple(tensor for header in headers for tensor in _tensors(header))
    return FileReport(str(folder), "folder", sum(header.file_bytes for header in headers), metadata, tensors)


def _tensors(header: Header) -> tuple[TensorReport, ...]:
    return tuple(TensorReport(t.name, t.dtype, t.shape, t.nbytes) for t in header.tensors)
