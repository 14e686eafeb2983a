"""``kdgen verify``: kernels, trees, logits and decodes against references, as a table or JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from click.core import ParameterSource

from kdgen.backends import backend_names
from kdgen.cli.options import IntRange
from kdgen.cli.output import check_writable, console, emit_json, log, status
from kdgen.plan.ir import Compute
from kdgen.verify.report.checks import SCHEMA, Check, failure_text, print_report


@click.command("verify")
@click.argument("specs", nargs=-1, metavar="[SPEC]...")
@click.option("--backend", type=click.Choice(backend_names()), help="Where kernels and decodes run; a GPU if there is one.")
@click.option("--dtype", "compute", type=click.Choice(["f32", "bf16"]), help="One compute type; without it, every one that fits.")
@click.option("--fuzz", "models", type=IntRange(min=1), metavar="N", help="Check N random models instead, in random situations.")
@click.option("--seed", type=IntRange(0), default=0, show_default=True, help="With --fuzz: models are drawn from this seed on.")
@click.option(
    "--jobs",
    type=IntRange(min=1),
    help="Processes that share the checks, on a CPU or with --fuzz; more of them need more memory. [default: one for each core]",
)
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="With --fuzz: where a failing model's spec goes.")
@click.option("--fail-fast", is_flag=True, help="Without --fuzz: stop at the first check that fails, in the report's order.")
@click.option(
    "--report", "page", type=click.Path(dir_okay=False, path_type=Path), help="Without --fuzz: write a self-contained HTML page, too."
)
@click.option("--json", "as_json", is_flag=True, help=f"Print JSON (schema {SCHEMA}).")
@click.pass_context
def command(
    ctx: click.Context, specs: tuple[str, ...], backend: str | None, compute: Compute | None, models: int | None, seed: int,
    jobs: int | None, save: Path | None, fail_fast: bool, page: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Check generated kernels and whole decodes of each SPEC (a YAML file or a shipped name; without any tiny, tiny2 and small models
    with what those lack).

    Every kernel runs alone against float64, and under the race checker. The model's logits are held against an oracle's, or float64.
    Draft-tree decoding must give plain decoding's tokens, logits and cache rows bit for bit. Exit code 1 if anything does not match.

    A line on stderr says how each part ended, and what failed as soon as it has; the table on stdout has every check.

    With --fuzz, models are drawn at random (situations only, where a SPEC is given). One that fails is made small and written to
    a spec file, with the command that repeats it.
    """
    if models is not None:
        if fail_fast or page is not None:
            raise click.UsageError("--fail-fast and --report do not go with --fuzz")
        if len(specs) > 1:
            raise click.UsageError("--fuzz draws situations for one SPEC at a time")
        if compute is not None and not specs:
            raise click.UsageError("--fuzz draws the compute type, too; give --dtype with a SPEC only")
        check_writable(save)
        ctx.exit(_fuzz(specs, backend, compute, models, seed, jobs, save, as_json))
    if save is not None or ctx.get_parameter_source("seed") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--save and --seed belong to --fuzz")
    check_writable(page)
    from kdgen.verify.report.page import write_page
    from kdgen.verify.run import verify

    with log() as (doing, line):
        report = verify(specs, backend, compute, Shown(doing, line), fail_fast, jobs)
    if page is not None:
        write_page(report, page)
    if as_json:
        emit_json(SCHEMA, report)
    else:
        print_report(report, console())
    ctx.exit(0 if report.ok else 1)


@dataclass(frozen=True)
class Shown:
    """A ``kdgen.verify.running.Progress`` on stderr: a line for each part that has ended, and each failure in full."""

    doing: Callable[[str], None]
    line: Callable[[str], None]

    def failed(self, check: Check) -> None:
        self.line(failure_text(check))

    def ended(self, part: str, checks: Sequence[Check]) -> None:
        count = {status: sum(check.status == status for check in checks) for status in ("ok", "failed", "skipped")}
        said = ", ".join(f"{number} {status}" for status, number in count.items() if number)
        self.line(f"{part}: {said or 'nothing to check'}, {sum(check.seconds for check in checks):.1f} s")


def _fuzz(
    specs: tuple[str, ...], backend: str | None, compute: Compute | None, models: int, seed: int, jobs: int | None, save: Path | None,
    as_json: bool,
) -> int:  # fmt: skip
    from kdgen.spec.model import load_spec
    from kdgen.verify import fuzz

    given = fuzz.given_model(load_spec(specs[0]), compute) if specs else None
    with status() as say:
        report = fuzz.fuzz(models, seed, backend, given, jobs, save, say)
    if as_json:
        emit_json(fuzz.SCHEMA, report)
    else:
        fuzz.print_fuzz(report, console())
    return 0 if report.ok else 1
