"""``kdgen inspect FILE``: the tensors and metadata of a .kdtr or any other safetensors file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from kdgen.cli.output import emit_json, emit_table, printable, size_text
from kdgen.weights.kdtr import FORMAT, kdtr_metadata, read_header


@dataclass(frozen=True)
class TensorReport:
    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class FileReport:
    file: str
    format: str  #: "kdtr" or "safetensors"
    file_bytes: int
    metadata: dict[str, str]
    tensors: tuple[TensorReport, ...]


@click.command("inspect")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema kdgen.inspect/1).")
def command(file: Path, as_json: bool) -> None:
    """Show what a .kdtr or .safetensors FILE holds; its header is checked, its tensors are not read."""
    header = read_header(file)
    is_kdtr = header.metadata.get("format") == FORMAT
    if is_kdtr or file.suffix == ".kdtr":
        kdtr_metadata(header)  # says what is wrong with it
    report = FileReport(
        str(file),
        "kdtr" if is_kdtr else "safetensors",
        header.file_bytes,
        dict(header.metadata),
        tuple(TensorReport(t.name, t.dtype, t.shape, t.nbytes) for t in header.tensors),
    )
    if as_json:
        emit_json("kdgen.inspect/1", report)
        return
    click.echo(f"{printable(report.file)}: {report.format}, {len(report.tensors)} tensors, {size_text(report.file_bytes)}")
    for key, value in sorted(report.metadata.items()):
        shown = value if len(value) <= 200 else f"{value[:200]}… ({len(value)} characters)"
        click.echo(f"  {printable(key)}: {printable(shown)}")
    if report.tensors:
        rows = [(t.name, t.dtype, "×".join(map(str, t.shape)) or "scalar", size_text(t.bytes)) for t in report.tensors]
        emit_table(("tensor", "dtype", "shape", "size"), rows, right=(3,))
