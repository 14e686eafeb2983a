"""``kdgen verify``: compare kernels, trees, logits and decodes with references, and report as a table or JSON."""

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
@click.option("--backend", type=click.Choice(backend_names()), help="Where kernels and decodes run; if left out, on a GPU if there is one.")
@click.option("--dtype", "compute", type=click.Choice(["f32", "bf16"]), help="Compute type; if left out, every one that the spec allows.")
@click.option("--fuzz", "models", type=IntRange(min=1), metavar="N", help="Check N random models in random situations instead.")
@click.option("--seed", type=IntRange(0), default=0, show_default=True, help="With --fuzz: the first model's seed.")
@click.option(
    "--jobs",
    type=IntRange(min=1),
    help="Processes that share the checks, on a CPU or with --fuzz; each needs its own memory.  [default: one for each core]",
)
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="With --fuzz: the file to write a failing model's spec to.")
@click.option("--fail-fast", is_flag=True, help="Without --fuzz: stop at the first check that fails, in the report's order.")
@click.option(
    "--report", "page", type=click.Path(dir_okay=False, path_type=Path), help="Without --fuzz: also write a self-contained HTML page."
)
@click.option("--json", "as_json", is_flag=True, help=f"Print JSON (schema {SCHEMA}).")
@click.pass_context
def command(
    ctx: click.Context, specs: tuple[str, ...], backend: str | None, compute: Compute | None, models: int | None, seed: int,
    jobs: int | None, save: Path | None, fail_fast: bool, page: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Check generated kernels and whole decodes of each SPEC, a YAML file or a shipped name. Without SPEC, check tiny, tiny2, and small
    models with features that those lack.

    Each kernel runs alone, its results compared with float64, and again under the race checker. The model's logits are compared with
    another implementation's, or with float64. Draft-tree decoding must give plain decoding's tokens, logits and cache rows bit for bit.
    The exit code is 1 if anything differs.

    A line on stderr reports each part when it ends, and each failure at once. The table on stdout has every check.

    With --fuzz, models and situations are drawn at random; with a SPEC, only situations. A model that fails is reduced to a small one and
    written to a spec file, with the command that repeats the failure.
    """
    if models is not None:
        if fail_fast or page is not None:
            raise click.UsageError("--fail-fast and --report cannot be combined with --fuzz")
        if len(specs) > 1:
            raise click.UsageError("--fuzz draws situations for one SPEC at a time")
        if compute is not None and not specs:
            raise click.UsageError("--fuzz also draws the compute type; --dtype needs a SPEC")
        check_writable(save)
        ctx.exit(_fuzz(specs, backend, compute, models, seed, jobs, save, as_json))
    if save is not None or ctx.get_parameter_source("seed") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--save and --seed need --fuzz")
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
    """A ``kdgen.verify.task_runner.Progress`` on stderr: a line for each part when it ends, and the text of each failure."""

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
