from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner, Result

from kdgen import __version__
from kdgen.cli import LazyGroup, main
from kdgen.cli import doctor as doctor_module
from kdgen.cli.output import (
    NOTE_SECONDS,
    byte_progress,
    check_writable,
    compile_note,
    emit_json,
    emit_table,
    printable,
    progress,
    size_text,
)
from kdgen.errors import KdgenError
from kdgen.spec.model import shipped_specs
from kdgen.weights.kdtr import KdtrMetadata, TensorInfo, write_kdtr


def kdgen(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="kdgen", env=env)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.kdtr"
    tensors = [("layers.0.w", np.zeros((2, 300), np.float32)), ("evil\x1b[31m[red]", np.zeros((), np.uint8))]
    infos = [TensorInfo("layers.0.w", "f32", (2, 300)), TensorInfo("evil\x1b[31m[red]", "u8", ())]
    write_kdtr(path, infos, tensors, KdtrMetadata("packed", '{"name": "tiny"}', "{}"))
    return path


def test_version_and_help() -> None:
    assert kdgen("--version").output == f"kdgen {__version__}\n"
    for flag in ("--help", "-h"):
        result = kdgen(flag)
        assert result.exit_code == 0 and "inspect" in result.output and "doctor" in result.output


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "kdgen", "--no-such-option"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("Usage: kdgen ")


def test_help_imports_no_command() -> None:
    script = (
        "import sys\nfrom kdgen.cli import main\n"
        "try: main(['--help'], prog_name='kdgen')\nexcept SystemExit: pass\n"
        "heavy = ('numpy', 'cuda', 'numba', 'rich', 'jinja2', 'kdgen.cli.', 'kdgen.plan')\n"
        "assert not [name for name in sys.modules if name.startswith(heavy)], sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_every_command_loads_and_has_help() -> None:
    context = click.Context(main)
    assert isinstance(main, LazyGroup)
    names = main.list_commands(context)
    assert {"inspect", "doctor", "cache"} <= set(names) <= {name for name, _ in LazyGroup.summaries}
    for name in names:
        result = kdgen(name, "--help")
        assert result.exit_code == 0 and result.output.startswith(f"Usage: kdgen {name}")


def test_usage_errors_are_2() -> None:
    for arguments in (("nope",), ("inspect",), ("inspect", "--nope", "x"), ("cache", "nope")):
        result = kdgen(*arguments)
        assert result.exit_code == 2 and "Traceback" not in result.output, arguments


def test_a_mistyped_command_is_told_which_there_are() -> None:
    assert "unknown command 'verfy'; kdgen knows build, verify, demo" in kdgen("verfy").stderr
    assert "No such option" in kdgen("--verfy").stderr


def test_a_spec_is_no_published_model(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").touch()
    for name in ("tiny", str(tmp_path / "my.yaml")):
        result = kdgen("spec", name)
        assert result.exit_code == 2
        assert f"{name}: is already a spec: `kdgen plan {name}` and `kdgen build {name}` take it" in result.stderr
    for name in ("k27", "my.yaml"):
        assert kdgen("spec", name).stderr == (
            f"kdgen: error: {name}: there is no such file or folder; kdgen spec takes a published model's folder or its config.json\n"
        )


@pytest.mark.parametrize(("name", "meant"), [("tiyn", "tiny"), ("TINY", "tiny"), ("tiny-dflahs.yaml", "tiny-dflash"), ("nonsense", "")])
def test_a_mistyped_spec_is_told_which_there_are(name: str, meant: str) -> None:
    result = kdgen("plan", name)
    assert result.exit_code == 2 and "shipped are" in result.stderr and all(each in result.stderr for each in shipped_specs())
    assert f"did you mean {meant}?" in result.stderr if meant else "did you mean" not in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "tiny", "--context", "\uff14"),
        ("plan", "tiny", "--acceptance", "0.\uff15"),
        ("plan", "tiny", "--tp", "1_0"),
        ("bench", "tiny", "--nodes", "1,\u0668"),
        ("demo", "--budget", "\uff11"),
        ("generate", "--model", "tiny", "--top-k", "\u0663"),
        ("generate", "--model", "tiny", "--budget", "\uff15"),
        ("generate", "--model", "tiny", "--random-weights", "--prompt-ids", "\uff15"),
    ],
)
def test_numbers_are_in_plain_digits(arguments: tuple[str, ...]) -> None:
    result = kdgen(*arguments)
    assert result.exit_code == 2 and not result.stdout
    assert re.search(
        r"is not a number in ASCII digits|is not a list of numbers|is neither auto nor a number|is not an integer", result.stderr
    )


@pytest.mark.parametrize("command", ["plan", "spec", "build"])
def test_weights_are_no_description(command: str, tmp_path: Path) -> None:
    (tmp_path / "model.kdtr").touch()
    result = kdgen(command, str(tmp_path / "model.kdtr"))
    assert result.exit_code == 2
    assert "model.kdtr: file: holds weights, and a description is wanted: a config.json or a spec" in result.stderr


def test_kdgen_errors_are_one_message_and_2(tmp_path: Path) -> None:
    missing = tmp_path / "missing.kdtr"
    result = kdgen("inspect", str(missing))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"kdgen: error: {missing}: cannot be read: No such file or directory\n"
    for debugged in (kdgen("--debug", "inspect", str(missing)), kdgen("inspect", str(missing), env={"KDGEN_DEBUG": "1"})):
        assert debugged.exit_code == 2 and "Traceback" in debugged.stderr


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (KdgenError("no luck"), 2, "kdgen: error: no luck"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (click.FileError("x", "unreadable"), 2, "unreadable"),
        (ZeroDivisionError("bug"), 2, "ZeroDivisionError: bug"),
        (KdgenError("evil\x1b[31m\nnext"), 2, "evil\\x1b[31m\nnext"),
        (OSError(36, "File name too long", "evil\x1b"), 2, "kdgen: error: evil\\x1b: File name too long (--debug"),
        (MemoryError(), 2, "out of memory"),
    ],
)
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int, said: str) -> None:
    def examine() -> None:
        raise raised

    monkeypatch.setattr(doctor_module, "examine", examine)
    result = kdgen("doctor")
    assert result.exit_code == code and said in result.stderr
    assert ("Traceback" in result.stderr) == isinstance(raised, ZeroDivisionError)


def test_a_reader_that_leaves_early_is_no_traceback(file: Path) -> None:
    script = "from kdgen.cli import main; main(prog_name='kdgen')"
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run([sys.executable, "-c", script, "inspect", str(file)], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (process.returncode, process.stderr) == (141, "")


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("then", ["", "raise RuntimeError('release unlocked lock')"])
def test_a_request_to_end_tidies_up(then: str) -> None:
    """Also where what it interrupted raises another error, as a lock does whose taking was cut off."""
    script = f"""
import os, signal, time
from kdgen.cli import doctor, main

def examine():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    finally:
        print("tidied", flush=True)
        {then}

doctor.examine = examine
main(["doctor"], prog_name="kdgen")
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (process.returncode, process.stdout, process.stderr) == (143, "tidied\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_output_that_finds_no_room_is_an_error(file: Path) -> None:
    script = "from kdgen.cli import main; main(prog_name='kdgen')"
    with Path("/dev/full").open("w") as full:
        process = subprocess.run([sys.executable, "-c", script, "inspect", str(file)], stdout=full, stderr=subprocess.PIPE, text=True)
    assert process.returncode == 2
    assert process.stderr.startswith("kdgen: error: stdout: No space left on device (--debug shows where)")
    assert process.stderr.count("\n") == 1


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_no_traceback(file: Path, closed: str) -> None:
    script = "from kdgen.cli import main; main(prog_name='kdgen')"
    command = ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", script, "inspect", str(file)]
    process = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.parametrize(("encoding", "said"), [("ascii", "größe✓😀"), ("latin-1", "größe\\u2713\\U0001f600"), ("utf-8", "größe✓😀")])
def test_no_encoding_ends_a_command(encoding: str, said: str) -> None:
    script = """
from kdgen.cli import doctor, main
from kdgen.cli.output import console

def examine():
    print("größe✓😀")
    console().print("größe✓😀")
    raise SystemExit

doctor.examine = examine
main(["doctor"], prog_name="kdgen")
"""
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    process = subprocess.run([sys.executable, "-X", "utf8", "-c", script], capture_output=True, env=environment)
    written = "utf-8" if encoding == "ascii" else encoding
    assert (process.returncode, process.stdout.decode(written), process.stderr) == (0, 2 * f"{said}\n", b"")


def test_inspect(file: Path, tmp_path: Path) -> None:
    table = kdgen("inspect", str(file))
    assert table.exit_code == 0
    assert "kdtr, 2 tensors" in table.output and "kind: packed" in table.output
    assert "layers.0.w" in table.output and "2×300" in table.output and "2.3 KiB" in table.output and "scalar" in table.output
    assert "\x1b" not in table.output and "evil\\x1b[31m[red]" in table.output
    report = json.loads(kdgen("inspect", "--json", str(file)).stdout)
    assert (report["schema"], report["format"], report["metadata"]["kind"]) == ("kdgen.inspect/1", "kdtr", "packed")
    assert report["tensors"][0] == {"name": "layers.0.w", "dtype": "F32", "shape": [2, 300], "bytes": 2400}

    other = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"a": np.zeros((3, 4), np.float16)}, other)
    assert "safetensors, 1 tensors" in kdgen("inspect", str(other)).output
    safetensors.numpy.save_file({"b": np.zeros(5, np.float32)}, tmp_path / "more.safetensors")
    whole = json.loads(kdgen("inspect", "--json", str(tmp_path)).stdout)
    assert (whole["format"], [tensor["name"] for tensor in whole["tensors"]]) == ("folder", ["a", "b"])
    (tmp_path / "empty").mkdir()
    assert "holds no safetensors file: name a file, or" in kdgen("inspect", str(tmp_path / "empty")).stderr
    misnamed = tmp_path / "model.kdtr"
    other.rename(misnamed)
    result = kdgen("inspect", str(misnamed))
    assert result.exit_code == 2 and "not a .kdtr file" in result.stderr


def test_doctor() -> None:
    result = kdgen("doctor", "--json")
    report = json.loads(result.stdout)
    assert report["schema"] == "kdgen.doctor/1" and report["kdgen"] == __version__
    assert "sm_90a" in report["archs"] and report["cache"]["writable"]
    assert (report["gpu"] is None) == bool(report["gpu_reason"])
    assert result.exit_code == (1 if report["problems"] else 0)
    table = kdgen("doctor")
    assert "NVRTC" in table.output and table.exit_code == result.exit_code


def test_doctor_finds_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing() -> str:
        raise KdgenError("cannot load NVRTC; pip install it")

    (tmp_path / "file").touch()
    monkeypatch.setenv("KDGEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(doctor_module, "nvrtc_version", missing)
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = kdgen("doctor", "--json")
    assert result.exit_code == 1
    problems = json.loads(result.stdout)["problems"]
    assert len(problems) == 3
    assert all(word in " ".join(problems) for word in ("NVRTC", "no-such-compiler", "KDGEN_CACHE_DIR"))


def test_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kdgen.codegen.cache import Cache, digest

    monkeypatch.setenv("KDGEN_CACHE_DIR", str(tmp_path))
    assert kdgen("cache", "dir").output == f"{tmp_path}\n"
    Cache(tmp_path).put("cubin", digest("x"), ".entry", bytes(2048))
    assert kdgen("cache", "clear").output == f"removed 1 files, 2.0 KiB, from {tmp_path}\n"
    assert Cache(tmp_path).size() == 0


def test_completion() -> None:
    script = "from kdgen.cli import main; main(prog_name='kdgen')"
    env = {**os.environ, "_KDGEN_COMPLETE": "bash_complete", "COMP_WORDS": "kdgen ins", "COMP_CWORD": "1"}
    result = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert result.stdout == "plain,inspect\n"


def test_tables_without_a_terminal_are_plain_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    emit_table(("name", "n"), [("x" * 300, "1"), ("[b]y", "20")], right=(1,))
    out = capsys.readouterr().out
    assert [line.split() for line in out.splitlines()] == [["name", "n"], ["x" * 300, "1"], ["[b]y", "20"]]
    assert not any(line.endswith(" ") for line in out.splitlines())


def test_json_is_json_whatever_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass(frozen=True)
    class Found:
        path: Path
        errors: tuple[float, ...]

    emit_json("kdgen.test/1", Found(Path(os.fsdecode(b"caf\xff\xc3\xa9")), (1.5, float("nan"), float("-inf"))))
    out = capsys.readouterr().out
    assert json.loads(out) == {"schema": "kdgen.test/1", "path": "caf\udcff\u00e9", "errors": [1.5, None, None]}
    out.encode()


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_json_speaks_every_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Found:
        text: str

    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    emit_json("kdgen.test/1", Found("é✓😀"))
    out.flush()
    written = out.buffer.getvalue()
    assert json.loads(written.decode(encoding))["text"] == "é✓😀" and written.isascii() == (encoding != "utf-8")


@pytest.mark.parametrize("columns", ["0", "1", "20"])
def test_a_terminal_too_narrow_loses_nothing(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", columns)
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    emit_table(("kernel", "seconds"), [("mla_attention", "1.25")])
    assert "mla_attention" in out.getvalue() and "1.25" in out.getvalue()


def test_where_a_result_cannot_go(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    check_writable(None)
    check_writable(file)
    check_writable(Path("report.html"))
    with pytest.raises(KdgenError, match=r"none/report\.html: cannot be written: there is no folder .*none"):
        check_writable(tmp_path / "none" / file.name)
    if os.name == "posix" and os.geteuid() != 0:  # root may write everywhere
        tmp_path.chmod(0o500)
        with pytest.raises(KdgenError, match="Permission denied"):
            check_writable(file)


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("compiling", 2) as done:
        done("one")
        done("two")
    assert capsys.readouterr() == ("", "")


def test_compiling_that_takes_long_is_said_once_and_on_stderr(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDGEN_CACHE_DIR", "/some/cache")
    monkeypatch.setattr("kdgen.cli.output.NOTE_SECONDS", 0.01)
    with compile_note("3 kernels for a device"):
        time.sleep(0.5)
    assert capsys.readouterr() == ("", "kdgen: compiling 3 kernels for a device, once; later runs read them from /some/cache\n")
    monkeypatch.setattr("kdgen.cli.output.NOTE_SECONDS", 0.2)
    with compile_note("3 kernels for a device"):
        pass
    time.sleep(0.5)
    assert capsys.readouterr() == ("", "")
    assert NOTE_SECONDS == 1


def test_bytes_are_shown_for_weights_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    shown = []
    for done in (False, True):
        out = Terminal()
        monkeypatch.setattr(sys, "stderr", out)
        with byte_progress("compiling", "loading") as bar:
            if done:
                bar(1 << 20, 4 << 20)
            time.sleep(0.3)
        shown.append(re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", out.getvalue()))
    compiling, loading = shown
    assert "compiling" in compiling and "bytes" not in compiling and "/s" not in compiling and "?" not in compiling
    assert "loading" in loading and "1.0/4.2 MB" in loading


def test_size_text_and_printable() -> None:
    assert [size_text(n) for n in (0, 1023, 1536, 3 << 30, 5 << 50)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB", "5120.0 TiB"]
    assert printable("größe\x1b\n") == "größe\\x1b\\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is Linux's")
def test_messages_that_cannot_be_written_change_no_exit_code(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("name: 3")
    for code, arguments in ((0, ["cache", "dir"]), (2, ["plan", str(tmp_path / "bad.yaml")]), (2, ["--nonsense"]), (2, ["nonsense"])):
        program = [sys.executable, "-c", "from kdgen.cli import main; main()", *arguments]
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(program, stdout=subprocess.PIPE, stderr=full, check=False, timeout=60)
        assert done.returncode == code, arguments
