"""``kdgen generate --tp``: ranks that it starts, ranks that a launcher has started, and what is refused."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from kdgen.backends.gpu import cuda_unusable
from kdgen.cli import main
from kdgen.ranks.start import run_ranks
from kdgen.spec.model import load_spec

TINY = Path(__file__).resolve().parents[1] / "oracle" / "data" / "tiny"


def test_ranks_decode_what_one_does() -> None:
    """Started here, as by ``--tp``, and by a launcher; the prompt comes by rank 0's stdin, and rank 0 alone speaks."""
    arguments = ["--model", str(TINY), "--prompt-ids", "5,17,9", "--max-new-tokens", "8", "--dtype", "f32", "--backend", "cpu"]
    alone = in_process_of_its_own(*arguments)
    started = in_process_of_its_own(*arguments, "--tp", "2", "--draft", "ngram", "--check-exact")
    assert alone.returncode == started.returncode == 0, alone.stderr + started.stderr
    assert started.stdout == alone.stdout
    assert started.stderr.count("same tokens and cache bits as plain decoding: yes") == 1
    assert "one of 2 ranks" in started.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["--tp", "3"], {}, "3 ranks cannot share it: vocab_size 512 is no multiple of 3"),
        (["--tp", "2", "--prompt-ids", "5,512"], {}, "512, id 2 of the prompt, is outside the vocabulary"),
        (["--tp", "4"], {"RANK": "0", "WORLD_SIZE": "2"}, "differs from the launcher's 2 ranks"),
        ([], {"RANK": "2", "WORLD_SIZE": "2"}, "ranks count from 0"),
        ([], {"RANK": "0", "WORLD_SIZE": "3"}, "3 ranks cannot share it: vocab_size 512 is no multiple of 3"),  # and waits for nobody
        ([], {"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK is not"),
        pytest.param(
            ["--backend", "cuda", "--tp", "2"],
            {},
            "no GPU can be used",
            marks=pytest.mark.skipif(cuda_unusable() is None, reason="there is a GPU"),
        ),
    ],
)
def test_ranks_that_cannot_be(arguments: list[str], environment: dict[str, str], said: str) -> None:
    result = in_process_of_its_own("--model", str(TINY), "--prompt-ids", "5", "--backend", "cpu", *arguments, environment=environment)
    assert result.returncode == 2 and said in result.stderr and result.stderr.count(said) == 1 and not result.stdout


@pytest.mark.parametrize("arguments", [["--budget", "many"], ["--tp", "4"], ["--no-such-option"]])
def test_the_first_rank_alone_tells_what_is_wrong_with_all_ranks_command(arguments: list[str]) -> None:
    for rank in (0, 1):
        result = in_process_of_its_own(
            "--prompt-ids", "5", *arguments, environment={"RANK": str(rank), "WORLD_SIZE": "2", "KDGEN_JOIN_SECONDS": "1"}
        )
        assert result.returncode == 2 and bool(result.stderr) == (rank == 0), result.stderr


def test_the_first_rank_alone_tells_that_they_are_too_many() -> None:
    for rank in (0, 2):
        place = {"RANK": str(rank), "WORLD_SIZE": "3"}
        result = in_process_of_its_own("--model", str(TINY), "--prompt-ids", "5", "--backend", "cpu", environment=place)
        assert result.returncode == 2 and ("3 ranks cannot share it" in result.stderr) == bool(result.stderr) == (rank == 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt-ids", ""], "--prompt-ids: the prompt is empty"),
        ([], "stdin: the prompt is empty"),
        (["--prompt-ids", "@nothing"], "nothing: cannot be read"),
        (["--prompt", "text"], "has no tokenizer.json and no tiktoken.model"),
        (["--prompt-ids", "5,6,7", "--context", "3"], "a prompt of 3 tokens leaves no room"),
        (["--prompt-ids", "5", "--context", "5000"], "a context of 5000 exceeds max_position_embeddings 1024"),
        (["--prompt-ids", "5", "--draft", str(TINY)], "is no DFlash drafter"),
        (["--prompt-ids", "5", "--draft", "dflash", "--random-weights"], "has no drafter"),
        (["--prompt-ids", "5", "--layers", "9", "--random-weights"], "cannot be cut to 9"),
    ],
)
def test_what_cannot_be_is_refused_before_there_are_ranks(arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdgen.cli.generate.run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    result = CliRunner().invoke(main, ["generate", "--model", str(TINY), "--tp", "2", "--backend", "cpu", *arguments], input="\n")
    assert result.exit_code == 2 and said in result.output, result.output


def test_text_that_is_piped_in_comes_to_the_first_rank(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text("import sys; sys.stdout.write(repr(sys.stdin.read()))")
    with tempfile.TemporaryFile() as output:
        assert run_ranks([sys.executable, str(script)], 2, given=b"two\nlines\n", output=output) == 0
        output.seek(0)
        assert output.read() == b"'two\\nlines\\n'"


def test_packed_files_are_for_one_rank(tmp_path: Path) -> None:
    packed = tmp_path / "tiny.kdtr"
    assert CliRunner().invoke(main, ["import", str(TINY), str(packed)]).exit_code == 0
    result = in_process_of_its_own("--model", str(packed), "--prompt-ids", "5", "--backend", "cpu", "--tp", "2")
    assert result.returncode == 2 and "is packed for one rank" in result.stderr


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (["--dtype", "f32"], "--dtype"),
        (["--chunk", "1"], "--chunk"),  # each of these would wait for the other for ever, or add up what does not belong together
        (["--draft", "ngram"], "--draft"),
        (["--temperature", "1"], "options of sampling"),
        (["--model", "OTHER"], "weights"),
    ],
)
def test_ranks_that_are_given_different_models(tmp_path: Path, others: list[str], said: str) -> None:
    """A launcher that starts one rank with other options, or where there is another copy of the model: both end, and say why."""
    if "OTHER" in others:
        others = ["--model", str(other_copy(tmp_path))]
    for result in launched(["--model", str(TINY)], others):
        assert f"rank 1 and rank 0 differ in {said}: start all ranks with the same model and options" in result.stderr, result.stderr
        assert result.returncode == 2 and not result.stdout


@pytest.mark.parametrize(
    ("others", "said"), [(["--no-such-option"], "rank 1: No such option"), (["--model", "ODD"], "rank 1: odd: 2 ranks cannot share it")]
)
def test_a_command_that_is_wrong_on_one_rank_alone_is_said_at_once(tmp_path: Path, others: list[str], said: str) -> None:
    """Another kdgen on that host, say, or another model. The first rank would wait for it, and nobody say why it does not come."""
    spec = load_spec("tiny").model_dump(mode="json") | {"name": "odd", "num_attention_heads": 3}
    (tmp_path / "odd.yaml").write_text(yaml.safe_dump(spec))
    others = [str(tmp_path / "odd.yaml") if each == "ODD" else each for each in others]
    first, second = launched(["--model", "tiny", "--random-weights"], others)
    assert first.returncode == second.returncode == 2 and not second.stderr
    assert said in first.stderr


def test_a_difference_on_any_rank_is_one() -> None:
    script = """
import os
from kdgen.cli import generate, main
if os.environ.get("RANK") == "1":
    generate.same_rows = lambda *_: False
main()
"""
    options = ["--model", str(TINY), "--prompt-ids", "5", "--backend", "cpu", "--max-new-tokens", "3", "--check-exact"]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        code = run_ranks([sys.executable, "-c", script, "generate", *options], 2, output=output, errors=errors)
        errors.seek(0)
        assert code == 1 and b"same tokens and cache bits as plain decoding: NO" in errors.read()


def launched(options: list[str], others: list[str]) -> list[subprocess.CompletedProcess[str]]:
    """What two ranks say that a launcher starts with the same options, the second with these ``others``, too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = [*options, "--prompt-ids", "5", "--backend", "cpu", "--max-new-tokens", "3"]

    def run(rank: int) -> subprocess.CompletedProcess[str]:
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "KDGEN_PORT": port}
        return in_process_of_its_own(*common, *(others if rank else []), environment=place)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def other_copy(tmp_path: Path) -> Path:
    """TINY with another last norm."""
    folder = tmp_path / "other"
    shutil.copytree(TINY, folder)
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] * 2}, file)
    return folder


def in_process_of_its_own(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from kdgen.cli import main; main()", "generate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | (environment or {}), timeout=120)


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("by_terminal", [True, False])
def test_control_c_ends_ranks_with_statistics(by_terminal: bool) -> None:
    """A terminal interrupts launcher and ranks, ``kill`` the launcher alone."""
    options = ["--prompt-ids", "5,17,9", "--max-new-tokens", "1000", "--ignore-eos", "--backend", "cpu", "--tp", "2"]
    command = [sys.executable, "-c", "from kdgen.cli import main; main(prog_name='kdgen')", "generate", "--model", str(TINY), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    assert process.stdout
    shown = os.read(process.stdout.fileno(), 1000)
    (os.killpg if by_terminal else os.kill)(process.pid, signal.SIGINT)
    output, said = process.communicate(timeout=60)
    assert process.returncode == 130 and shown + output
    assert said.count(b"(interrupted)") == 1 and b"kdgen:" not in said and b"Traceback" not in said, said
