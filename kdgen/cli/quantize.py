"""``kdgen quantize``: round a published model's routed experts to INT4."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import click

from kdgen.cli.output import byte_progress, emit_json, printable, size_text
from kdgen.weights.quantize import QUANTIZATION, quantize_model


@dataclass(frozen=True)
class Quantized:
    """What was written: ``matrices`` is the number of quantized matrices; all other tensors are copies."""

    folder: str
    spec: str
    spec_sha256: str
    group_size: int
    matrices: int
    bytes: int
    seconds: float


@click.command("quantize", short_help="Round a model's routed experts to INT4, in the published format.")
@click.argument("model", type=click.Path(path_type=Path), metavar="DIR")
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema kdgen.quantize/1).")
def command(model: Path, out: Path, as_json: bool) -> None:
    """Write the published model in DIR to the folder OUT with its routed experts rounded to INT4.

    The format is that of Kimi K2: compressed-tensors pack-quantized, symmetric, groups of 32, scales in bf16. All other tensors are
    copied as they are. OUT appears whole or not at all.
    """
    began = time.perf_counter()
    with byte_progress(f"{model.name}: quantizing", f"{model.name}: quantizing") as bar:
        spec, matrices = quantize_model(model, out, bar)
    size = sum(file.stat().st_size for file in out.iterdir())
    seconds = time.perf_counter() - began
    report = Quantized(str(out), spec.name, spec.sha256, QUANTIZATION.group_size, matrices, size, seconds)
    if as_json:
        emit_json("kdgen.quantize/1", report)
        return
    where, group = printable(report.folder), report.group_size
    click.echo(f"{where}: {matrices} matrices in INT4 (groups of {group}), {size_text(size)}; {seconds:.1f} s")
