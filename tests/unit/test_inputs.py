"""Files that are read are regular and of bounded size, whichever they are."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import write_model

from kdgen.files.inputs import open_input, parse_json, read_input
from kdgen.spec.fields import show
from kdgen.spec.model import load_spec
from kdgen.weights.random import random_weights

SMALL = load_spec("tiny").model_copy(update={"num_hidden_layers": 2, "vocab_size": 40, "n_routed_experts": 2, "hidden_size": 64})


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:  # its name stays when it is closed
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's path is short
        try:
            opened.bind(path.name)
        finally:
            os.chdir(here)


KINDS = {"pipe": pipe, "device": device, "folder": folder, "socket": listening}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file(tmp_path: Path, kind: str) -> None:
    KINDS[kind](tmp_path / "x")
    with pytest.raises(OSError) as error:
        open_input(tmp_path / "x")
    said = {
        "pipe": "it is a pipe, not a regular file",
        "device": "it is a device, not a",
        "folder": "Is a directory",
        "socket": "No such device",
    }
    assert said[kind] in str(error.value.strerror)


def test_bounds(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    assert read_input(tmp_path / "x", 5) == b"12345"
    with pytest.raises(OSError, match="it is larger than 4 bytes"):
        read_input(tmp_path / "x", 4)
    assert parse_json(b'{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
    with pytest.raises(ValueError, match="twice"):
        parse_json(b'{"a": 1, "a": 1}')
    assert len(show("x" * 10**6)) == 60 and len(show([[10**9] * 10**5])) == 60
    assert show([10**4300]) == "something with a number of thousands of digits" and show(-(10**40)) == "a number of more than 40 digits"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("inputs") / "model", SMALL, random_weights(SMALL, 5), shards=2)


FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors.index.json",
    "model-00001-of-00002.safetensors", "x.yaml", "x.kdtr", "drafter/config.json",
)  # fmt: skip


def command(path: Path) -> list[str]:
    if path.suffix == ".yaml":
        return ["plan", str(path)]
    if path.suffix == ".kdtr":
        return ["inspect", str(path)]
    draft = ["--draft", str(path.parent)] if path.parent.name == "drafter" else []
    return ["generate", "--model", str(path.parent.parent if draft else path.parent), "--prompt-ids", "1", "--backend", "cpu", *draft]


def test_commands_end_at_once_with_the_name_of_the_file(tmp_path: Path, model: Path) -> None:
    """All in one process, whose memory is bounded: a device is not read, and no pipe is waited for."""
    calls, names = [], []
    for file in FILES:
        for kind in ("pipe", "device"):
            own = shutil.copytree(model, tmp_path / f"model {len(calls)}")
            path = own / file
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)
            KINDS[kind](path)
            calls.append(command(path))
            names.append((str(path), kind))
    calls.append(["generate", "--model", str(model), "--backend", "cpu", "--prompt-ids", "@/dev/zero"])
    names.append(("/dev/zero", "device"))
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "from click.testing import CliRunner; from kdgen.cli import main\n"
        f"for call in {calls!r}:\n"
        "    result = CliRunner().invoke(main, call)\n"
        "    print(result.exit_code, result.stderr.replace(chr(10), ' '))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == len(calls), done.stderr
    for line, (path, kind) in zip(lines, names, strict=True):
        assert line.startswith("2 kdgen: error: ") and f"{path}: " in line and len(line) < 1000, line
        assert f"it is a {kind}" in line or "is no file" in line or "missing" in line or "the limit of a prompt" in line, line
