"""``kdgen import``: pack a published model into one file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import click

from kdgen.cli.output import byte_progress, emit_json, printable, size_text, warn
from kdgen.errors import KdgenError
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute
from kdgen.runtime.model import open_model
from kdgen.weights.packed import write_packed
from kdgen.weights.stream import remove_leavings


@dataclass(frozen=True)
class Imported:
    """What was written. ``seconds`` includes reading and packing."""

    file: str
    spec: str
    spec_sha256: str
    dtype: Compute
    tensors: int
    bytes: int
    seconds: float


@click.command("import", short_help="Pack a published model into one .kdtr file that loads as it is.")
@click.argument("model", type=click.Path(path_type=Path), metavar="DIR")
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT.kdtr")
@click.option("--dtype", type=click.Choice(["f32", "bf16"]), help="Compute type to pack for; the model's own if left out.")
@click.option("--force", is_flag=True, help="Replace OUT.kdtr if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema kdgen.import/1).")
def command(model: Path, out: Path, dtype: Compute | None, force: bool, as_json: bool) -> None:
    """Pack the published model in DIR into OUT.kdtr, in the layouts that its kernels read.

    Loading that file is a plain copy. It also holds the tokenizer and the chat template. It fits one compute type and the layouts of this
    version of kdgen; `kdgen generate` says when it has to be made again. An interrupted import leaves no OUT.kdtr.
    """
    if out.suffix != ".kdtr":
        raise KdgenError(f"{out}: the name of the file to write must end in .kdtr")
    remove_leavings(out)
    if out.exists() and not force:
        raise KdgenError(f"{out}: exists already; --force replaces it")
    if not out.parent.is_dir():
        raise KdgenError(f"{out}: its folder {out.parent} does not exist")
    opened = open_model(model)
    for note in opened.notes:
        warn(note)
    plan = build_plan(opened.spec, dtype or opened.compute)
    began = time.perf_counter()
    with byte_progress(f"{opened.spec.name}: packing", f"{opened.spec.name}: packing") as bar:
        write_packed(out, opened.spec, plan, opened.weights, opened.text, bar)
    tensors = sum(weight.layers[1] - weight.layers[0] if weight.layers else 1 for weight in plan.weights)
    seconds = time.perf_counter() - began
    report = Imported(str(out), opened.spec.name, opened.spec.sha256, plan.compute, tensors, out.stat().st_size, seconds)
    if as_json:
        emit_json("kdgen.import/1", report)
        return
    size, rate = size_text(report.bytes), size_text(int(report.bytes / max(seconds, 1e-9)))
    click.echo(f"{printable(report.file)}: {report.tensors} tensors, {size}, for {report.dtype}; {seconds:.1f} s, {rate}/s")
