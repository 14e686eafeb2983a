"""The wheel is complete: built, installed somewhere else, and used from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kdgen import __version__

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(target)]
    result = subprocess.run([*pip, str(wheel)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return target


def run(installed: Path, cwd: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """With the installed copy in front, and nothing of the checkout in sight."""
    env = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run([*command], cwd=cwd, env=env, capture_output=True, text=True)


def test_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        demo_bytes = sum(info.compress_size for info in archive.infolist() if info.filename.startswith("kdgen/_data/demo/"))
    assert demo_bytes < 6_000_000
    for folder in ("templates", "specs", "demo"):
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                assert f"kdgen/_data/{file.relative_to(ROOT).as_posix()}" in names
    assert "kdgen/py.typed" in names
    for licence in ("LICENSE", "demo/LICENSE-Python.txt"):
        assert any(name.endswith(f"licenses/{licence}") for name in names)
    assert {name.split("/")[0] for name in names} == {"kdgen", f"kdgen-{__version__}.dist-info"}


def test_it_finds_its_own_data(installed: Path, tmp_path: Path) -> None:
    script = "import kdgen.files.resources as r; print(r.templates_dir()); print(r.specs_dir())"
    result = run(installed, tmp_path, sys.executable, "-c", script)
    data = installed / "kdgen" / "_data"
    assert result.stdout.split() == [str(data / "templates"), str(data / "specs")], result.stderr


def test_it_finds_the_checkout_that_it_runs_in(installed: Path, tmp_path: Path) -> None:
    script = (
        "import os; os.environ.pop('KDGEN_ORACLE_DIR', None); import kdgen.verify.oracles.models as o; print(o.__file__, o.oracle_dir())"
    )
    for folder, found in ((tmp_path, None), (ROOT, ROOT / "tests" / "oracle" / "data")):
        result = run(installed, folder, sys.executable, "-P", "-c", script)
        assert result.stdout.split() == [str(installed / "kdgen" / "verify" / "oracles" / "models.py"), str(found)], result.stderr


def test_the_demo_model_is_in_it(installed: Path, tmp_path: Path) -> None:
    options = ("demo", "--backend", "cpu", "--max-new-tokens", "8", "--json")
    result = run(installed, tmp_path, str(installed / "bin" / "kdgen"), *options)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert len(report["tokens"]) == 8 and report["same_tokens"] and report["same_cache_bits"]


def test_version(installed: Path, tmp_path: Path) -> None:
    result = run(installed, tmp_path, str(installed / "bin" / "kdgen"), "--version")
    assert result.stdout == f"kdgen {__version__}\n", result.stderr


def test_it_builds_a_shipped_spec(installed: Path, tmp_path: Path) -> None:
    spec = installed / "kdgen" / "_data" / "specs" / "tiny.yaml"
    arguments = ("build", str(spec), "--arch", "sm_90a", "--out", str(tmp_path / "generated"))
    result = run(installed, tmp_path, str(installed / "bin" / "kdgen"), *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    kernels = list((tmp_path / "generated").rglob("*.cu"))
    assert kernels and list((tmp_path / "generated").rglob("manifest.json"))
