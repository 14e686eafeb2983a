"""``kdgen build``: write and compile the generated folders, or check them."""

from __future__ import annotations

from pathlib import Path

import click

from kdgen.cli.options import IntRange
from kdgen.cli.output import emit_json, emit_table, printable, progress, size_text, warn
from kdgen.codegen.cache import Cache
from kdgen.codegen.compile import Cubin
from kdgen.codegen.folders import DEFAULT_ARCHS, BuildReport, CheckReport, FolderReport, KernelReport, build, check, plans_for
from kdgen.plan.ir import Compute, Plan


@click.command("build", short_help="Generate and compile the kernels of model specs.")
@click.argument("specs", nargs=-1, metavar="[SPEC]...")
@click.option(
    "--arch", "archs", multiple=True, default=DEFAULT_ARCHS, show_default=True, help="GPU architecture; repeat the option for several."
)
@click.option("--dtype", "compute", type=click.Choice(["f32", "bf16"]), help="Compute type; the spec's own if left out.")
@click.option("--out", type=click.Path(path_type=Path), default="generated", show_default=True, help="Folder to write <spec>/ into.")
@click.option("--check", "only_check", is_flag=True, help="Write nothing; show differences as a diff, and exit with 1 if there are any.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema kdgen.build/1, or kdgen.check/1 with --check).")
@click.option("--jobs", type=IntRange(min=1), help="Kernels compiled at the same time.  [default: the number of CPUs]")
@click.pass_context
def command(
    ctx: click.Context,
    specs: tuple[str, ...],
    archs: tuple[str, ...],
    compute: Compute | None,
    out: Path,
    only_check: bool,
    as_json: bool,
    jobs: int | None,
) -> None:
    """Generate the CUDA C++ of each SPEC (a YAML file, or the name of a shipped spec) and compile it with NVRTC.

    The command needs no GPU, driver or CUDA toolkit. It writes only files that differ, and compiles only kernels that changed.

    Without SPEC, it builds every shipped spec, and tiny, tiny2 and tiny-dflash also in f32.
    """
    plans = plans_for(specs, compute)
    cache = Cache.default()
    with progress("compiling", len(archs) * sum(len(plan.kernels) for plan in plans)) as finished:

        def on_done(plan: Plan, cubin: Cubin) -> None:
            finished(f"{plan.directory}/{cubin.name} {cubin.arch}")

        if only_check:
            found = check(plans, archs, out, jobs=jobs, cache=cache, on_done=on_done)
        else:
            report = build(plans, archs, out, jobs=jobs, cache=cache, on_done=on_done)
    if only_check:
        emit_json("kdgen.check/1", found) if as_json else _show_check(found)
        if found.differences:
            ctx.exit(1)
        return
    emit_json("kdgen.build/1", report) if as_json else _show_build(report)
    for folder in report.folders:
        for warning in folder.warnings:
            warn(warning)


def _show_check(found: CheckReport) -> None:
    for difference in found.differences:
        for line in difference.diff.splitlines():
            click.echo(printable(line))
    for note in found.notes:
        click.echo(f"note: {printable(note)}")
    where = found.folders[0] if len(found.folders) == 1 else f"{len(found.folders)} folders"
    if found.differences:
        kinds = [difference.kind for difference in found.differences]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        click.echo(f"{printable(where)}: {counts}, of {found.files} files; the same command without --check writes them")
    else:
        click.echo(f"{printable(where)}: {found.files} files, none differs from what is generated")


def _show_build(report: BuildReport) -> None:
    for folder in report.folders:
        _show_folder(folder, report.archs)
    kernels = report.compiled + report.cached
    cached = f"; {report.cached}, marked *, were in the cache; their s is the time of the earlier compilation" if report.cached else ""
    click.echo(f"{kernels} kernels for {', '.join(report.archs)} with NVRTC {report.nvrtc} in {report.seconds:.1f} s{cached}")


def _show_folder(folder: FolderReport, archs: tuple[str, ...]) -> None:
    columns = ["kernel", "bytes/token", "flops/token"]
    for arch in archs:
        columns += [f"{arch}: regs", "smem", "spills", "s"]
    rows: dict[str, list[str]] = {}
    for kernel in folder.kernels:
        row = rows.setdefault(kernel.kernel, [kernel.kernel, size_text(kernel.bytes_per_token), _count(kernel.flops_per_token)])
        row += [str(kernel.registers), _smem(kernel), _spills(kernel), f"{kernel.seconds:.2f}{'*' if kernel.cached else ''}"]
    click.echo(f"{folder.spec} ({folder.compute}): {len(rows)} kernels, weights {size_text(folder.weight_bytes)}")
    emit_table(columns, list(rows.values()), right=range(1, len(columns)))
    changes = f"{len(folder.written)} written" + (f", {len(folder.removed)} removed" if folder.removed else "")
    click.echo(f"{printable(folder.folder)}: {folder.files} files, {changes}\n")


def _smem(kernel: KernelReport) -> str:
    size = kernel.static_smem + kernel.dynamic_smem
    return size_text(size) if size else "-"


def _spills(kernel: KernelReport) -> str:
    size = kernel.spill_stores + kernel.spill_loads
    return size_text(size) if size else "-"


def _count(number: int) -> str:
    value = float(number)
    for unit in ("", " K", " M", " G"):
        if value < 1000 or unit == " G":
            break
        value /= 1000
    return f"{number or '-'}" if unit == "" else f"{value:.1f}{unit}"
