"""The build: from plans to generated folders and compiled kernels.

A folder ``<out>/<plan.directory>/`` holds one ``.cu`` for each kernel and ``manifest.json``. Texts are written before they are compiled, so
that a compiler's message refers to a file that exists. The manifest is written when all kernels have compiled. A file is written only if it
differs, under a temporary name that is then renamed, so that interrupted, failed or simultaneous builds leave only complete files.
"""

from __future__ import annotations

import contextlib
import difflib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kdgen.codegen.cache import Cache
from kdgen.codegen.compile import Cubin, compile_all, nvrtc_version, require_arch
from kdgen.codegen.format import clang_format_version
from kdgen.codegen.manifest import is_resources, manifest_text, recorded_in, resources
from kdgen.codegen.render import MARK
from kdgen.codegen.texts import Generated, generate
from kdgen.errors import CompileError, KdgenError
from kdgen.files.resources import specs_dir, templates_dir
from kdgen.files.temporary import remove_abandoned, temporary_file
from kdgen.plan.arch import target_for
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Plan, Workload
from kdgen.spec.model import load_spec

MANIFEST = "manifest.json"
DEFAULT_ARCHS = ("sm_90a", "sm_120a")
#: Shipped specs also generated in float32: test models, whose float32 results are compared with other implementations.
ALSO_F32 = ("tiny", "tiny2", "tiny-dflash")
#: Prefix of files being written. If a build is killed, the next one removes its file.
TEMPORARY = ".kdgen-"

Progress = Callable[[Plan, Cubin], None]


@dataclass(frozen=True)
class KernelReport:
    """One kernel on one architecture. Sizes are bytes. ``bytes_per_token`` and ``flops_per_token`` are the least that a launch must do for
    one token row with one key and its own experts."""

    kernel: str
    template: str
    arch: str
    registers: int
    static_smem: int
    dynamic_smem: int
    stack: int
    spill_stores: int
    spill_loads: int
    bytes_per_token: int
    flops_per_token: int
    seconds: float  #: NVRTC's time when it was compiled
    cached: bool  #: whether it was in the cache


@dataclass(frozen=True)
class FolderReport:
    """One plan's folder: its changes, and the resources of its kernels."""

    spec: str
    compute: Compute
    folder: str
    files: int
    written: tuple[str, ...]
    removed: tuple[str, ...]
    weight_bytes: int
    kernels: tuple[KernelReport, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class BuildReport:
    nvrtc: str
    clang_format: str
    archs: tuple[str, ...]
    seconds: float
    compiled: int
    cached: int
    folders: tuple[FolderReport, ...]


@dataclass(frozen=True)
class Difference:
    """A file that differs from what would be generated; ``diff`` is from the present text to the generated one."""

    file: str
    kind: Literal["missing", "changed", "extra"]
    diff: str


@dataclass(frozen=True)
class CheckReport:
    """The result of ``--check``. ``notes`` says what was not compared, and why."""

    folders: tuple[str, ...]
    files: int
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]


# ---- what is built --------------------------------------------------------------------------------------------------


def plans_for(specs: Sequence[str], compute: Compute | None = None) -> list[Plan]:
    """The plans of ``specs``, which are files or shipped names. Without any: the plans of all folders committed under ``generated/``.

    Raises SpecError for a bad spec, and KdgenError when two different specs have the same name, and so the same folder.
    """
    wanted = [(spec, compute) for spec in specs]
    if not specs:
        names = sorted(path.stem for path in specs_dir().glob("*.yaml"))
        wanted = [(name, compute) for name in names]
        if compute is None:
            wanted += [(name, "f32") for name in ALSO_F32]
    plans: dict[str, Plan] = {}
    for source, dtype in wanted:
        plan = build_plan(load_spec(source), dtype)
        if plans.setdefault(plan.directory, plan) != plan:
            raise KdgenError(f"{source}: another spec is also called {plan.spec_name}; rename one of them")
    return list(plans.values())


def build(
    plans: Sequence[Plan],
    archs: Sequence[str] = DEFAULT_ARCHS,
    out: Path = Path("generated"),
    *,
    jobs: int | None = None,
    cache: Cache | None = None,
    on_done: Progress | None = None,
) -> BuildReport:
    """Write and compile every plan; ``on_done`` is called when a kernel is ready.

    Raises KdgenError for an unknown architecture or a folder that cannot be written, CompileError with kernel, template and log when a
    kernel does not compile or needs more shared memory than an architecture has.
    """
    started = time.perf_counter()
    archs = tuple(dict.fromkeys(archs))
    for arch in archs:
        require_arch(arch)
    everything = [generate(plan) for plan in plans]  # all texts before the first file, so that a bad template writes nothing
    folders = []
    for generated in everything:
        folder = out / generated.plan.directory
        with _writing(folder):
            _prepare(folder)
            written = [name for name, text in generated.texts.items() if write_if_different(folder / name, text)]
        cubins = _compile(generated, archs, folder, jobs, cache, on_done)
        manifest = manifest_text(generated, resources(cubins), clang_format_version())
        with _writing(folder):
            if write_if_different(folder / MANIFEST, manifest):
                written.append(MANIFEST)
            removed = [path.name for path in orphans(folder, generated)]
            for name in removed:
                (folder / name).unlink(missing_ok=True)
        folders.append(_folder_report(generated, folder, cubins, tuple(written), tuple(removed)))
    kernels = [kernel for folder_report in folders for kernel in folder_report.kernels]
    cached = sum(kernel.cached for kernel in kernels)
    seconds = round(time.perf_counter() - started, 3)
    return BuildReport(nvrtc_version(), clang_format_version(), archs, seconds, len(kernels) - cached, cached, tuple(folders))


def check(
    plans: Sequence[Plan],
    archs: Sequence[str] = DEFAULT_ARCHS,
    out: Path = Path("generated"),
    *,
    compile: bool = True,
    jobs: int | None = None,
    cache: Cache | None = None,
    on_done: Progress | None = None,
) -> CheckReport:
    """The changes that ``build`` would make under ``out``. Changes nothing.

    Registers, spills and shared memory depend on the compiler's version, so they are compared only with ``compile``, and only if NVRTC
    has the version that the manifest records. Another version of clang-format than the recorded one is no difference by itself.
    Raises what ``build`` raises.
    """
    archs = tuple(dict.fromkeys(archs))
    for arch in archs if compile else ():
        require_arch(arch)
    differences: list[Difference] = []
    notes: list[str] = []
    files = 0
    for generated in map(generate, plans):
        folder = out / generated.plan.directory
        recorded = recorded_in(folder / MANIFEST)
        formatter = recorded.get("clang_format")
        if not isinstance(formatter, str):
            formatter = clang_format_version()
        elif formatter != clang_format_version():
            notes.append(f"formatted with clang-format {clang_format_version()}, but the manifest records {formatter}")
        kept = recorded.get("resources")
        if not is_resources(kept):
            notes.append(f"{folder}: no registers, shared memory and spills are recorded")
            kept = None
        elif not compile:
            notes.append("registers, shared memory and spills were not compared: nothing was compiled")
        elif kept["nvrtc"] != nvrtc_version():
            versions = f"NVRTC is {nvrtc_version()}, but the manifest records {kept['nvrtc']}"
            notes.append(f"registers, shared memory and spills were not compared: {versions}")
        else:
            notes += [f"{folder}: nothing is recorded for {arch}" for arch in archs if arch not in kept["archs"]]
            cubins = _compile(generated, [arch for arch in archs if arch in kept["archs"]], folder, jobs, cache, on_done)
            kept = {"nvrtc": kept["nvrtc"], "archs": {**kept["archs"], **resources(cubins)["archs"]}}
        expected = {**generated.texts, MANIFEST: manifest_text(generated, kept, formatter)}
        files += len(expected)
        differences += _differences(folder, expected, orphans(folder, generated))
    folders = tuple(str(out / plan.directory) for plan in plans)
    return CheckReport(folders, files, tuple(differences), tuple(dict.fromkeys(notes)))


# ---- compiling ------------------------------------------------------------------------------------------------------


def _compile(
    generated: Generated, archs: Sequence[str], folder: Path, jobs: int | None, cache: Cache | None, on_done: Progress | None
) -> list[Cubin]:
    plan = generated.plan
    done = None if on_done is None else lambda cubin: on_done(plan, cubin)
    try:
        work = [(source, arch) for arch in archs for source in generated.sources_for(arch)]
        return compile_all(work, templates_dir() / "lib" / "gpu", jobs=jobs, cache=cache, on_done=done)
    except CompileError as error:
        raise CompileError(f"{plan.spec_name} ({plan.compute}), generated in {folder}: {error}") from error


def _folder_report(
    generated: Generated, folder: Path, cubins: Sequence[Cubin], written: tuple[str, ...], removed: tuple[str, ...]
) -> FolderReport:
    plan = generated.plan
    kernels, warnings = [], []
    one = Workload(1, 1, 1, plan.num_experts_per_tok)
    for cubin in cubins:
        kernel = plan.on(target_for(cubin.arch).family).kernel(cubin.name)
        kernels.append(
            KernelReport(
                kernel.name, kernel.template, cubin.arch, cubin.registers, cubin.static_smem, cubin.dynamic_smem, cubin.stack,
                cubin.spill_stores, cubin.spill_loads, kernel.cost.bytes(one), kernel.cost.operations(1, 1), cubin.seconds, cubin.cached,
            )
        )  # fmt: skip
        where = f"{plan.spec_name} ({plan.compute}): kernel {kernel.name} ({kernel.template}) on {cubin.arch}"
        if cubin.spills:
            warnings.append(f"{where} spills registers: {cubin.spill_stores} bytes stored, {cubin.spill_loads} loaded")
        elif cubin.stack:
            warnings.append(f"{where} keeps {cubin.stack} bytes in local memory")
    weight_bytes = sum(weight.total_bytes for weight in plan.weights)
    return FolderReport(
        plan.spec_name, plan.compute, str(folder), len(generated.texts) + 1, written, removed, weight_bytes, tuple(kernels), tuple(warnings)
    )


# ---- files ----------------------------------------------------------------------------------------------------------


def write_if_different(path: Path, text: str) -> bool:
    """Write ``text`` to ``path`` if it differs; returns whether it did. ``path`` always holds the old or the new text. Raises OSError."""
    data = text.encode()
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes() == data:
            return False
    with temporary_file(path.parent, TEMPORARY) as temporary:
        temporary.write_bytes(data)
        temporary.replace(path)
    return True


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` completely or not at all; ``path`` may also be a pipe or a terminal. Raises KdgenError when that fails."""
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
        else:
            write_if_different(path, text)
    except OSError as error:
        raise KdgenError(f"{path}: cannot be written: {error.strerror or error}") from None


def orphans(folder: Path, generated: Generated) -> list[Path]:
    """Files in ``folder`` that kdgen generated earlier and that ``generated`` lacks. Other .cu files are not among them."""
    return [path for path in sorted(folder.glob("*.cu")) if path.name not in generated.texts and _is_ours(path)]


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MARK)) == MARK.encode()
    except OSError:
        return False


def _prepare(folder: Path) -> None:
    """Make the folder, and remove temporary files of killed builds."""
    folder.mkdir(parents=True, exist_ok=True)
    remove_abandoned(folder, TEMPORARY)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn the file system's errors into a KdgenError."""
    try:
        yield
    except OSError as error:
        name = Path(error.filename).name if error.filename else TEMPORARY
        file = "" if name.startswith(TEMPORARY) else f" ({error.filename})"
        raise KdgenError(f"cannot write {folder}: {error.strerror}{file}; choose another folder with --out") from error


def _differences(folder: Path, expected: Mapping[str, str], extra: Sequence[Path]) -> list[Difference]:
    found = []
    for name, text in expected.items():
        path = folder / name
        try:
            present = path.read_bytes().decode(errors="replace")
        except OSError:  # missing, a directory, or unreadable
            found.append(Difference(str(path), "missing", _diff(path, "", text)))
            continue
        if present != text:
            found.append(Difference(str(path), "changed", _diff(path, present, text)))
    return found + [Difference(str(path), "extra", _diff(path, path.read_bytes().decode(errors="replace"), "")) for path in extra]


def _diff(path: Path, present: str, expected: str) -> str:
    before, after = present.splitlines(keepends=True), expected.splitlines(keepends=True)
    lines = difflib.unified_diff(before, after, f"{path} (now)", f"{path} (built)")
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)
