"""kdgen demo: text, trees and exactness of the model that comes with kdgen, and random weights for any spec."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from kdgen.backends.base import Backend
from kdgen.cli import demo_model, main
from kdgen.cli.tree_picture import Node, accepted, draw, guessed, readable
from kdgen.demo.prompts import read_prompts
from kdgen.demo.tokenizer import tokenizer_json
from kdgen.files.resources import demo_dir
from kdgen.runtime.request import Request
from kdgen.text.tokenizer import TextFiles, decode, load_tokenizer

BYTES = load_tokenizer(TextFiles("demo", {"tokenizer.json": tokenizer_json().encode()}))


def demo(*options: str) -> Result:
    return CliRunner().invoke(main, ["demo", *options], prog_name="kdgen")


def report(*options: str) -> dict[str, Any]:
    result = demo("--backend", "cpu", "--max-new-tokens", "20", "--json", *options)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_model_decodes_the_same_with_trees(cpu_backend: Backend) -> None:
    found = report("--tree", "--prompt-number", "2")
    prompt = read_prompts(demo_dir() / "prompts.json")[1]
    assert (found["prompt"], found["prompt_path"], found["prompt_line"]) == (prompt.text, prompt.path, prompt.line)
    assert found["same_tokens"] and found["same_cache_bits"]
    assert found["text"].rstrip("\n") == decode(BYTES, found["tokens"]).rstrip("\n")
    trees, plain = found["ways"]
    assert plain["forwards"] == len(found["tokens"]) - 1 and trees["forwards"] == sum(found["histogram"]) <= plain["forwards"]
    assert sum((place + 1) * count for place, count in enumerate(found["histogram"])) >= len(found["tokens"]) - 1
    tree = tuple(Node(**node) for node in found["tree"])
    assert 1 <= guessed(tree) <= accepted(tree) <= len(found["histogram"]) and (tree[0].parent, tree[0].accepted) == (-1, True)
    walk = [place for place, node in enumerate(tree) if node.accepted]
    assert all(tree[below].parent == above for above, below in pairwise(walk))


def test_what_it_prints(cpu_backend: Backend) -> None:
    result = demo("--backend", "cpu", "--max-new-tokens", "20", "--prompt", "import os\n", "--tree")
    found = report("--prompt", "import os\n")
    assert result.exit_code == 0 and found["prompt_path"] is None and found["tree"] is None
    assert f"import os\n{found['text']}" in result.stdout and "✓" in result.stdout and "█" in result.stdout
    assert "same tokens: yes; same bits in every cache row: yes." in result.stdout and "\x1b" not in result.output


def test_a_single_token_has_no_steps(cpu_backend: Backend) -> None:
    result = demo("--backend", "cpu", "--max-new-tokens", "1", "--prompt", "x")
    assert result.exit_code == 0 and "nodes accepted" not in result.stdout and "same tokens: yes" in result.stdout


def test_a_context_that_ends_early_is_said(cpu_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "context_for", lambda spec, prompt_tokens, new_tokens: prompt_tokens + 8)
    result = demo("--backend", "cpu", "--max-new-tokens", "20", "--prompt", "import os\n")
    assert result.exit_code == 0
    assert re.match(r"kdgen: warning: a context of \d+ tokens has room for 8 new tokens after this prompt, not 20\n", result.stderr)


def test_held_out_prompts() -> None:
    prompts = read_prompts(demo_dir() / "prompts.json")
    listed = json.loads(demo("--list-prompts", "--json").stdout)["prompts"]
    assert [each["text"] for each in listed] == [prompt.text for prompt in prompts]
    assert demo("--list-prompts").stdout.count("\n") == len(prompts) + 1


def test_a_difference_is_a_finding(cpu_backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = demo_model.decode_plain

    def shorter(engine: Any, request: Request) -> Any:
        return honest(engine, replace(request, max_new_tokens=request.max_new_tokens - 1))

    monkeypatch.setattr(demo_model, "decode_plain", shorter)
    result = demo("--backend", "cpu", "--max-new-tokens", "20", "--prompt", "import os\n")
    assert result.exit_code == 1 and "same tokens: NO" in result.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--prompt", ""), "--prompt: the prompt is empty"),
        (("--prompt-number", "100000"), "--prompt-number: there are"),
        (("--prompt-number", "0"), "--prompt-number"),
        (("--prompt", "x", "--prompt-number", "2"), "--prompt, --prompt-number and --list-prompts do not go together"),
        (("--prompt", "x", "--list-prompts"), "do not go together"),
        (("--prompt", os.fsdecode(b"a\xff")), "--prompt: the prompt is not UTF-8 text: byte 1 is 0xff"),
        (("--prompt", "x" * 3000), "leaves no room in a context of 2048"),
    ],
)
def test_options_that_make_no_sense(options: tuple[str, ...], said: str) -> None:
    result = demo("--backend", "cpu", *options)
    assert (result.exit_code, result.stdout) == (2, "") and said in result.stderr


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_control_c(cache_directory: Path) -> None:
    command = [sys.executable, "-c", "from kdgen.cli import main; main(prog_name='kdgen')", "demo", "--backend", "cpu"]
    options = ("--prompt-number", "1", "--max-new-tokens", "1500")
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    prompt, shown = read_prompts(demo_dir() / "prompts.json")[0].text.encode(), b""
    while prompt not in shown:
        more = os.read(process.stdout.fileno(), 1000)
        assert more, f"it ended, and printed {shown!r}"  # without this the loop would never end
        shown += more
    process.send_signal(signal.SIGINT)
    output, said = process.communicate(timeout=60)
    lines = [line for line in said.splitlines() if not line.startswith(b"kdgen: compiling ")]  # which a first run says
    assert (process.returncode, lines) == (130, [b"kdgen: interrupted"])
    assert (shown + output).endswith(b"\n")


# ---- the picture --------------------------------------------------------------------------------------------------------


def test_the_picture_of_a_tree() -> None:
    words = [
        ("s", -1, True),
        ("e", 0, True),
        ("l", 1, True),
        ("f", 2, True),
        (".", 3, False),
        (",", 3, True),
        ("x", 4, False),
        ("u", 0, False),
    ]
    nodes = [Node(ord(character), parent, accepted) for character, parent, accepted in words]
    assert (accepted(nodes), guessed(nodes), guessed(nodes[:4])) == (5, 4, 4)
    out = io.StringIO()
    Console(file=out, width=80).print(draw(nodes, BYTES))
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        "'s' ✓", "├── 'elf' ✓", "│   ├── '.x'", "│   └── ',' ✓", "└── 'u'",
    ]  # fmt: skip


def test_readable_tokens() -> None:
    assert readable([ord("a"), ord("\n"), ord(" ")], BYTES) == "'a\\n '"
    assert readable(list("é".encode()), BYTES) == "'é'"
    assert readable([0xC3], BYTES) == "'\\xc3'"
    assert readable([27, 256], BYTES) == "'\\x1b<256>'"
