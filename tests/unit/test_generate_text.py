"""kdgen generate with text: prompts by option, pipe and chat, text as it comes, and ends in the middle."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_model
from click.testing import CliRunner, Result
from tokenizers_made import SPECIAL, byte_level

from kdgen.backends.base import Backend
from kdgen.cli import main
from kdgen.cli.streaming import Live, harmless, to_nowhere
from kdgen.drafters.by_name import Making, drafter_called
from kdgen.spec.model import load_spec
from kdgen.text.tokenizer import decode, load_tokenizer
from kdgen.weights.random import random_weights

SPEC = load_spec("tiny").model_copy(
    update={"num_hidden_layers": 2, "vocab_size": 300, "n_routed_experts": 2, "hidden_size": 64, "max_position_embeddings": 4096}
)
CONFIG = {"chat_template": "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% endfor %}", "bos_token": SPECIAL}
TEXT = byte_level(300, CONFIG)
TOKENIZER = load_tokenizer(TEXT)
SMALL = ("--backend", "cpu", "--max-new-tokens", "9", "--ignore-eos")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, cpu_backend: Backend) -> Path:
    folder = write_model(tmp_path_factory.mktemp("text") / "model", SPEC, random_weights(SPEC, 5))
    for name, content in TEXT.contents.items():
        (folder / name).write_bytes(content)
    return folder


def generate(model: Path, *options: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["generate", "--model", str(model), *SMALL, *options], input=stdin, prog_name="kdgen")


def report(model: Path, *options: str, stdin: bytes | None = None) -> dict[str, Any]:
    result = generate(model, "--json", *options, stdin=stdin)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refused(model: Path, *options: str, stdin: bytes | None = None) -> str:
    result = generate(model, *options, stdin=stdin)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    return result.stderr


def ids(text: str) -> str:
    return ",".join(map(str, TOKENIZER.encode(text, begin=False)))


def test_text_is_what_its_ids_are(model: Path) -> None:
    found = report(model, "--prompt", "héllo 漢")
    by_ids = report(model, "--prompt-ids", ids("héllo 漢"))
    assert found["tokens"] == by_ids["tokens"] and found["prompt_tokens"] == len(ids("héllo 漢").split(","))
    assert (found["text"], by_ids["text"]) == (decode(TOKENIZER, found["tokens"]), None)
    printed = generate(model, "--prompt", "héllo 漢")
    assert printed.stdout == found["text"] + ("" if found["text"].endswith("\n") else "\n")
    assert generate(model, "--prompt-ids", ids("héllo 漢"), "--text").stdout == printed.stdout


@pytest.mark.parametrize("draft", ["ngram", "replay", "random"])
def test_trees_stream_the_same_text(model: Path, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, tokens = generate(model, "--prompt", "fox"), report(model, "--prompt", "fox")["tokens"]
    monkeypatch.setattr(
        "kdgen.cli.generate._drafter",
        lambda run, spec: drafter_called(draft, Making(spec.vocab_size, (*run.prompt, *tokens))),
    )
    assert generate(model, "--prompt", "fox", "--draft", "ngram", "--check-exact").stdout == plain.stdout


def test_prompts_from_a_pipe(model: Path) -> None:
    expected = report(model, "--prompt", "a\nb")["tokens"]
    for content in (b"a\nb", b"a\nb\n", b"a\nb\r\n"):
        assert report(model, stdin=content)["tokens"] == report(model, "--prompt", "-", stdin=content)["tokens"] == expected
    assert report(model, "--prompt-ids", ids("a\nb"), stdin=b"something else")["tokens"] == expected
    assert report(model, stdin=b"a\nb\n\n")["prompt_tokens"] == report(model, "--prompt", "a\nb\n")["prompt_tokens"]


def test_chat(model: Path) -> None:
    for options, text in (([], f"{SPECIAL}u:hi"), (["--system", "brief"], f"{SPECIAL}s:briefu:hi")):
        found = report(model, "--chat", "--prompt", "hi", *options)
        assert found["tokens"] == report(model, "--prompt-ids", ids(text))["tokens"]
        assert found["prompt_tokens"] == len(ids(text).split(","))


def test_a_packed_model_takes_its_tokenizer_along(model: Path, tmp_path: Path) -> None:
    packed = tmp_path / "model.kdtr"
    assert CliRunner().invoke(main, ["import", str(model), str(packed)]).exit_code == 0
    for options in (("--prompt", "fox"), ("--chat", "--prompt", "fox")):
        assert generate(packed, *options).stdout == generate(model, *options).stdout
    inspected = CliRunner().invoke(main, ["inspect", str(packed)])
    assert inspected.exit_code == 0 and "text: {" in inspected.stdout


def test_it_stops_at_the_end_tokens_of_generation_config(model: Path, tmp_path: Path) -> None:
    free = report(model, "--prompt", "fox")["tokens"]
    other = shutil.copytree(model, tmp_path / "model")
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [free[4]]}))
    options = ["generate", "--model", str(other), "--backend", "cpu", "--max-new-tokens", "9", "--prompt", "fox", "--json"]
    found = json.loads(CliRunner().invoke(main, options).stdout)
    end = free.index(free[4])
    assert (found["tokens"], found["stopped"], found["text"]) == (free[: end + 1], True, decode(TOKENIZER, free[:end]))


def test_prompts_that_are_none(model: Path, tmp_path: Path) -> None:
    assert refused(model, "--prompt", "") == (
        "kdgen: error: --prompt: the prompt is empty: give --prompt TEXT or --prompt-ids IDS, or pipe text in\n"
    )
    assert "stdin: the prompt is empty" in refused(model, stdin=b"\n")
    assert "stdin: the prompt is not UTF-8 text: byte 1 is 0xff" in refused(model, stdin=b"a\xff")
    assert "--prompt-ids is the whole prompt" in refused(model, "--prompt", "x", "--prompt-ids", "1")
    assert "--prompt-ids is the whole prompt" in refused(model, "--chat", "--prompt-ids", "1")
    assert "add --chat" in refused(model, "--prompt", "x", "--system", "y")
    assert "--system: the prompt is not UTF-8 text" in refused(model, "--chat", "--prompt", "x", "--system", os.fsdecode(b"a\xff"))
    assert "leaves no room in a context of 4096" in refused(model, "--prompt", "1 2 " * 4096)
    bare = shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    assert f"{bare}: has no tokenizer.json and no tiktoken.model: give token ids with --prompt-ids" in refused(bare, "--prompt", "x")
    assert "has no tokenizer.json" in refused(bare, "--prompt-ids", "1", "--text")
    assert report(bare, "--prompt-ids", "1")["text"] is None
    assert "has no chat template" in refused(foreign(model, tmp_path / "plain", 300), "--prompt", "x", "--chat")
    assert "the tokenizer gives token 3" in refused(foreign(model, tmp_path / "larger", 340), "--prompt", SPECIAL)


def foreign(model: Path, folder: Path, vocab_size: int) -> Path:
    """The model with another tokenizer."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    (folder / "tokenizer.json").write_bytes(byte_level(vocab_size).contents["tokenizer.json"])
    return folder


def test_logits_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """Finite weights whose products overflow in the last layer, behind which nothing but logits shows it."""
    weights = dict(random_weights(SPEC, 5))
    key = f"model.layers.{SPEC.num_hidden_layers - 1}.mlp.shared_experts.down_proj.weight"
    weights[key] = np.full_like(weights[key], 3e38)
    folder = write_model(tmp_path / "model", SPEC, weights)
    for draft in ("none", "ngram"):
        said = refused(folder, "--prompt-ids", "1,2", "--draft", draft)
        assert said.startswith(f"kdgen: error: {folder}: the logits for token 2 (the prompt begins with token 0) hold a NaN or an infinity")


def test_nothing_that_a_terminal_obeys_is_shown() -> None:
    assert harmless("a\tb\n漢 \N{NO-BREAK SPACE}e\u0301\N{ZERO WIDTH JOINER}\x1b[31m\x9b\r\x07") == (
        "a\tb\n漢 \N{NO-BREAK SPACE}e\u0301\N{ZERO WIDTH JOINER}\\x1b[31m\\x9b\\r\\x07"
    )


def test_what_was_decoded_until_now() -> None:
    live = Live(None, (), to_nowhere)
    for step in ((5,), (7, 8, 9), (3,)):
        live(step)
    assert live.text == "5 7 8 9 3"
    assert (live.decoded(True).tokens, live.decoded(True).acceptance_lengths) == ((5, 7, 8, 9, 3), (3, 1))
    assert (live.decoded(False).target_forwards, live.decoded(False).acceptance_lengths) == (2, ())


# ---- ends in the middle -------------------------------------------------------------------------------------------------


def start(model: Path, *options: str) -> subprocess.Popen[bytes]:
    """A run that takes minutes."""
    script = "from kdgen.cli import main; main(prog_name='kdgen')"
    command = [sys.executable, "-c", script, "generate", "--model", str(model), "--backend", "cpu", "--max-new-tokens", "4000"]
    return subprocess.Popen([*command, "--ignore-eos", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("options", [(), ("--draft", "ngram")], ids=["plain", "trees"])
def test_control_c_ends_with_statistics(model: Path, options: tuple[str, ...]) -> None:
    process = start(model, "--prompt", "fox", *options)
    assert process.stdout
    first = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    output, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    lines = said.decode().splitlines()
    assert first and (first + output).endswith(b"\n")
    assert len(lines) == 2 and "(interrupted): " in lines[1] and " forward" in lines[1]


def test_control_c_before_there_is_anything(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kdgen.runtime.decode.prefill", interrupted)
    result = generate(model, "--prompt", "fox")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "kdgen: interrupted\n")


def test_an_interrupted_report_is_json(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(live: Live, tokens: tuple[int, ...]) -> None:
        honest(live, tokens)
        if len(live.steps) == 4:
            raise KeyboardInterrupt

    honest = Live.__call__
    monkeypatch.setattr(Live, "__call__", interrupt)
    result = generate(model, "--prompt", "fox", "--draft", "ngram", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["interrupted"], len(found["acceptance_lengths"])) == (130, True, 3)
    assert found["text"] == decode(TOKENIZER, found["tokens"]) and len(found["tokens"]) == 1 + sum(found["acceptance_lengths"])


def test_a_reader_that_has_enough_is_no_error(model: Path) -> None:
    process = start(model, "--prompt", "fox")
    assert process.stdout and process.stderr
    assert os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert all(line.startswith(b"kdgen: compiling ") for line in process.stderr.read().splitlines())  # as the first run does
    process.stderr.close()
