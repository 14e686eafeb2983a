"""What needs no backend: the PTX of primitives, RoPE's tables, the numbers that plans take from a config, and generated files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

from kdgen.codegen.folders import check as check_folders
from kdgen.errors import SpecError
from kdgen.files.resources import checkout_folder
from kdgen.plan.ir import Plan
from kdgen.spec.model import Spec, load_spec, shipped_specs
from kdgen.verify.kernels.harness import Findings
from kdgen.verify.kernels.rope_tables import check_tables
from kdgen.verify.ptx.checks import check_primitives
from kdgen.verify.published import check_config, check_numbers, configs
from kdgen.verify.report.checks import Check, Say, Status, finite


def primitives(say: Say) -> Iterator[Check]:
    say("primitives, by their PTX")
    yield from check_primitives()


def rope_tables(specs: Sequence[Spec], say: Say) -> Iterator[Check]:
    say("tables")
    for spec in specs:
        yield _tables(spec)


def config_numbers(specs: Sequence[Spec], all_of_them: bool, say: Say) -> Iterator[Check]:
    """What kernels are given, by the reference's reading of the keys; of the shipped specs and of published forms of configs, too."""
    say("numbers of the config")
    shipped = [spec for name in (shipped_specs() if all_of_them else ()) if (spec := load_spec(name)) not in specs]
    for spec in (*specs, *shipped):
        yield _of_findings(spec.name, "numbers", "kernels' numbers", "text", check_numbers(spec))
    for config in configs() if all_of_them else ():
        yield _of_findings(config.name, "numbers", "kernels' numbers of a config.json", "text", check_config(config))


def _tables(spec: Spec) -> Check:
    return _of_findings(spec.name, "tables", "cos and sin of RoPE", "NumPy", check_tables(spec))


def _of_findings(title: str, part: str, name: str, backend: str, found: Findings) -> Check:
    status: Status = "failed" if found.problems else "ok"
    figures: tuple[float | None, float | None] = (finite(found.error), found.tolerance) if found.tolerance else (None, None)
    return Check(title, "f32", part, name, backend, status, *figures, why="; ".join(found.problems[:3]))


def generated_files(spec: Spec, plan: Plan, say: Say) -> Iterator[Check]:
    """generated/ of a source checkout, for shipped specs, against what the plan renders now."""
    say(f"{spec.name} {plan.compute}: generated files")
    began = perf_counter()

    def check(ok: bool, ran: bool, detail: str = "", why: str = "") -> Check:
        status: Status = "ok" if ok else "failed" if ran else "skipped"
        seconds = perf_counter() - began
        return Check(
            spec.name, plan.compute, "drift", f"generated/{plan.directory}", "text", status, detail=detail, why=why, seconds=seconds
        )

    root = checkout_folder("generated")
    if root is None:
        yield check(False, False, why="no source checkout around the package or in the current folder")
        return
    try:
        shipped = load_spec(spec.name)
    except SpecError:
        yield check(False, False, why="no shipped spec, so nothing is committed")
        return
    if shipped != spec or not (root / plan.directory).is_dir():
        yield check(False, False, why="not committed under generated/")
        return
    found = check_folders([plan], out=root, compile=False)
    different = ", ".join(f"{difference.file} ({difference.kind})" for difference in found.differences[:3])
    why = f"{len(found.differences)} files differ: {different}; kdgen build {spec.name} writes them" if found.differences else ""
    yield check(not found.differences, True, f"{found.files} files", why)
