"""``kdgen verify``: kernels, trees, logits and decodes against references, as a table or JSON."""

from __future__ import annotations

import click

from kdgen.backends import backend_names
from kdgen.cli.output import console, emit_json, status
from kdgen.plan.ir import Compute
from kdgen.verify.report import SCHEMA, print_report


@click.command("verify")
@click.argument("specs", nargs=-1, metavar="[SPEC]...")
@click.option("--backend", type=click.Choice(backend_names()), help="Where kernels and decodes run; a GPU if there is one.")
@click.option("--dtype", "compute", type=click.Choice(["f32", "bf16"]), help="One compute type; without it, every one that fits.")
@click.option("--json", "as_json", is_flag=True, help=f"Print JSON (schema {SCHEMA}).")
@click.pass_context
def command(ctx: click.Context, specs: tuple[str, ...], backend: str | None, compute: Compute | None, as_json: bool) -> None:
    """Check generated kernels and whole decodes of each SPEC (a YAML file or a shipped name; tiny and tiny2 without any).

    Every kernel runs alone against float64, and under the race checker. The model's logits are held against an oracle's, or float64.
    Draft-tree decoding must give plain decoding's tokens, logits and cache rows bit for bit. Exit code 1 if anything does not match.
    """
    from kdgen.verify.run import verify

    with status() as say:
        report = verify(specs, backend, compute, say)
    if as_json:
        emit_json(SCHEMA, report)
    else:
        print_report(report, console())
    ctx.exit(0 if report.ok else 1)
