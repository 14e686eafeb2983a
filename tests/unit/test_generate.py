"""kdgen generate and kdgen spec: what they print, drafts that change nothing, and damaged input, refused with one clear message."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_drafter, write_model
from click.testing import CliRunner, Result
from numpy.typing import NDArray

from kdgen import __version__
from kdgen.backends.base import Backend, Source
from kdgen.backends.cpu import CpuBackend
from kdgen.cli import main
from kdgen.cli.generate_report import Run
from kdgen.cli.prompts import read_prompt
from kdgen.drafters.base import Drafter
from kdgen.drafters.by_name import NAMES, Making, drafter_called
from kdgen.errors import KdgenError
from kdgen.reference.model import ReferenceModel
from kdgen.spec.drafter import DraftSpec
from kdgen.spec.fields import RopeScaling
from kdgen.spec.model import Quantization, Spec, load_spec, parse_spec
from kdgen.spec.published import load_config
from kdgen.spec.published_drafter import load_draft_config
from kdgen.weights.checkpoint import Checkpoint
from kdgen.weights.random import random_weights

SMALL = load_spec("tiny").model_copy(
    update={"num_hidden_layers": 2, "vocab_size": 40, "n_routed_experts": 2, "hidden_size": 64, "max_position_embeddings": 64}
)
INT4 = SMALL.model_copy(update={"quantization": Quantization(group_size=32)})
PROMPT = (5, 17, 9)


def kdgen(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="kdgen")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, cpu_backend: Backend) -> Path:
    return write_model(tmp_path_factory.mktemp("generate") / "model", INT4, random_weights(INT4, 5), shards=2)


def draft_by(monkeypatch: pytest.MonkeyPatch, name: str, plain: dict[str, Any], error_rate: float = 0.3) -> None:
    """Let the command draft with one of the drafters made for tests, which knows what plain decoding said."""

    def drafter(run: Run, spec: Spec) -> Drafter:
        return drafter_called(name, Making(spec.vocab_size, (*run.prompt, *plain["tokens"]), error_rate))

    monkeypatch.setattr("kdgen.cli.generate._drafter", drafter)


def generate(model: Path | str, *options: str, prompt: str = "5,17,9") -> Result:
    return kdgen("generate", "--model", str(model), "--prompt-ids", prompt, "--backend", "cpu", *options)


def report(model: Path | str, *options: str, prompt: str = "5,17,9") -> dict[str, Any]:
    result = generate(model, "--json", *options, prompt=prompt)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refused(model: Path | str, *options: str, prompt: str = "5,17,9") -> str:
    result = generate(model, *options, prompt=prompt)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


# ---- what it prints ---------------------------------------------------------------------------------------------------------


def test_the_tokens_are_the_references(model: Path) -> None:
    expected, _ = ReferenceModel(json.loads((model / "config.json").read_text()), Checkpoint(model)).greedy(PROMPT, 12)
    found = report(model, "--dtype", "f32", "--max-new-tokens", "12", "--ignore-eos")
    assert found["tokens"] == expected
    plain = generate(model, "--dtype", "f32", "--max-new-tokens", "12", "--ignore-eos")
    assert plain.stdout == " ".join(map(str, expected)) + "\n"
    assert "3 prompt tokens" in plain.stderr


def test_compiling_is_said_on_stderr(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = CpuBackend.load

    def load(self: CpuBackend, sources: Sequence[Source]) -> None:
        with self.compiling_kernels(23):
            time.sleep(0.3)
        real(self, sources)

    monkeypatch.setattr(CpuBackend, "load", load)
    monkeypatch.setattr("kdgen.cli.output.NOTE_SECONDS", 0.01)
    result = generate(model, "--max-new-tokens", "1")
    assert result.exit_code == 0 and result.stdout.strip().isdigit()
    assert "kdgen: compiling 23 kernels for CPU emulator (plain), once; later runs read them from " in result.stderr


def test_json(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_by(monkeypatch, "replay", report(model, "--max-new-tokens", "9", "--ignore-eos"), error_rate=0.0)
    found = report(model, "--draft", "ngram", "--max-new-tokens", "9", "--budget", "5", "--block-size", "4", "--ignore-eos")
    assert next(iter(found)) == "schema"
    assert found["schema"] == "kdgen.generate/1"
    assert found["spec"] == "model"
    assert found["spec_sha256"] == INT4.sha256
    assert (found["dtype"], found["backend"], found["draft"]) == ("bf16", "CPU emulator (plain)", "ngram")
    assert (found["prompt_tokens"], found["budget"], found["block_size"]) == (3, 5, 4)
    assert found["acceptance_lengths"] == [4, 4]
    assert found["target_forwards"] == 2
    assert found["exact"] is None
    assert set(found["timings"]) == {"build", "load", "prefill", "prepare", "decode", "first_token"}
    assert all(seconds >= 0 for seconds in found["timings"].values())
    assert found["versions"]["kdgen"] == __version__


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_the_budget_may_be_chosen_by_cost(model: Path, draft: str) -> None:
    options = ["--max-new-tokens", "14", "--draft", draft]
    found = report(model, *options, "--budget", "auto", "--check-exact")
    assert found["exact"] is True and found["tokens"] == report(model, *options)["tokens"]
    assert found["budget"] == "auto"
    assert sum(use["forwards"] for use in found["budgets"]) == (0 if draft == "none" else found["target_forwards"])
    assert sum(use["tokens"] for use in found["budgets"]) == sum(found["acceptance_lengths"])
    said = generate(model, *options, "--budget", "auto").stderr
    assert "rounds recorded and measured in" in said and ("budgets: " in said) == (draft != "none")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("draft", ["none", *(name for name in NAMES if name != "dflash")])
def test_no_draft_changes_anything(model: Path, draft: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--max-new-tokens", "14", "--dtype", dtype]
    expected = report(model, *options)
    if draft != "none":
        draft_by(monkeypatch, draft, expected)
    found = report(model, *options, "--draft", "none" if draft == "none" else "ngram", "--check-exact", "--chunk", "2")
    assert found["tokens"] == expected["tokens"]
    assert found["exact"] is True
    assert sum(found["acceptance_lengths"]) >= (len(found["tokens"]) - 1 if draft != "none" else 0)


def test_no_draft_changes_what_is_drawn(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--max-new-tokens", "14", "--ignore-eos", "--temperature", "1.3", "--top-k", "30", "--top-p", "0.95", "--min-p", "0.01"]
    plain = {seed: report(model, *options, "--sample-seed", str(seed)) for seed in (1, 2)}
    drawn = {seed: each["tokens"] for seed, each in plain.items()}
    greedy = report(model, "--max-new-tokens", "14", "--ignore-eos")
    assert len({tuple(drawn[1]), tuple(drawn[2]), tuple(greedy["tokens"])}) == 3
    assert greedy["sampling"] == {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    for draft in ("replay", "random", "ngram"):
        draft_by(monkeypatch, draft, plain[2])
        found = report(model, *options, "--sample-seed", "2", "--draft", "ngram", "--check-exact")
        assert (found["tokens"], found["exact"], found["sampling"]["seed"]) == (drawn[2], True, 2)
    assert "between 0.001 and 100" in refused(model, "--temperature", "-1")


DRAFT = DraftSpec(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=48, rms_norm_eps=1e-6,
    rope_theta=1e4, rope_scaling=RopeScaling(factor=4.0, original_max_position_embeddings=32), block_size=6, mask_token_id=3,
    target_layer_ids=(0, 1), layer_types=("sliding_attention", "full_attention"), sliding_window=9,
)  # fmt: skip


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights = random_weights(INT4.with_draft(DRAFT), 6)
    tensors = {key: weights[key] for group in DRAFT.tensors() for key in group.names()}
    return write_drafter(tmp_path_factory.mktemp("drafter") / "drafter", DRAFT, tensors)


def test_a_drafters_folder_is_read_back(drafter: Path) -> None:
    assert load_draft_config(drafter) == DRAFT
    Checkpoint(drafter).validate(DRAFT)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_published_drafter_changes_no_bit(model: Path, drafter: Path, dtype: str) -> None:
    options = ["--max-new-tokens", "14", "--dtype", dtype]
    expected = report(model, *options)
    for more in ([], ["--chain"], ["--block-size", "4", "--budget", "31"], ["--draft-amplitude", "1.4"]):
        found = report(model, *options, "--draft", str(drafter), "--check-exact", *more)
        assert found["tokens"] == expected["tokens"] and found["exact"] is True
        assert sum(found["acceptance_lengths"]) >= len(found["tokens"]) - 1


def test_a_packed_model_takes_a_published_drafter(model: Path, drafter: Path, tmp_path: Path) -> None:
    packed = tmp_path / "model.kdtr"
    assert kdgen("import", str(model), str(packed)).exit_code == 0
    found = report(packed, "--max-new-tokens", "6", "--draft", str(drafter), "--check-exact")
    assert found["exact"] is True and found["tokens"] == report(model, "--max-new-tokens", "6")["tokens"]


def test_a_made_up_drafter() -> None:
    found = report("tiny-dflash", "--random-weights", "--layers", "2", "--draft", "dflash", "--max-new-tokens", "5", "--check-exact")
    assert found["exact"] is True and len(found["acceptance_lengths"]) >= 1


def test_drafters_that_are_none(model: Path, drafter: Path, tmp_path: Path) -> None:
    assert "add --random-weights, or name the drafter's folder" in refused(model, "--draft", "dflash")
    assert "has no drafter: add a draft: section" in refused("tiny", "--random-weights", "--draft", "dflash")
    assert "is no DFlash drafter" in refused(model, "--draft", str(model))
    assert "--draft-amplitude needs a drafter's folder" in refused(model, "--draft-amplitude", "1.4")
    assert "--chain needs a DFlash drafter" in refused(model, "--chain", "--draft", "ngram")
    other = write_drafter(tmp_path / "other", DRAFT.model_copy(update={"mask_token_id": 40}), {})
    assert "dflash_config.mask_token_id = 40: is not below vocab_size 40" in refused(model, "--draft", str(other))
    (tmp_path / "empty").mkdir()
    write_drafter(tmp_path / "empty", DRAFT, {"fc.weight": np.zeros((3, 3), np.float32)})
    said = refused(model, "--draft", str(tmp_path / "empty"))
    assert "fc.weight has shape [3, 3], the config says [64, 128]" in said and "hidden_norm.weight [64] is missing" in said


def test_a_difference_is_a_finding(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kdgen.cli import generate as module

    honest = module.decode_plain

    def wrong(*arguments: Any) -> Any:
        decoded = honest(*arguments)
        arguments[0]._write("kv_cache", np.zeros(1, arguments[0].cache_rows().dtype))
        return decoded

    monkeypatch.setattr(module, "decode_plain", wrong)
    result = generate(model, "--max-new-tokens", "4", "--draft", "ngram", "--check-exact")
    assert result.exit_code == 1
    assert "same tokens and cache bits as plain decoding: NO" in result.stderr


def test_it_stops_at_the_end_of_sequence_token(tmp_path: Path, model: Path) -> None:
    free = report(model, "--max-new-tokens", "12", "--ignore-eos")["tokens"]
    stop = free[5]
    spec = INT4.model_copy(update={"eos_token_id": (39, stop)})
    other = write_model(tmp_path / "stops", spec, random_weights(INT4, 5))
    expected = free[: free.index(stop) + 1]
    for draft in ("none", "ngram"):
        found = report(other, "--max-new-tokens", "12", "--draft", draft, "--check-exact")
        assert (found["tokens"], found["stopped"], found["exact"]) == (expected, True, True)
    found = report(other, "--max-new-tokens", "12", "--ignore-eos")
    assert (found["tokens"], found["stopped"]) == (free, False)


def test_made_up_weights(model: Path) -> None:
    options = ("--random-weights", "--max-new-tokens", "5", "--seed", "3")
    short = report("tiny", *options, "--layers", "2", "--draft", "ngram", "--check-exact")
    assert short["exact"] is True
    assert short["tokens"] == report("tiny", *options, "--layers", "2")["tokens"]
    assert short["tokens"] != report("tiny", *options, "--layers", "2", "--seed", "4")["tokens"]
    by_config = report(model, *options)
    assert by_config["tokens"] == report(model / "config.json", *options)["tokens"]


def test_spec_prints_what_load_spec_reads(model: Path) -> None:
    result = kdgen("spec", str(model))
    assert result.exit_code == 0
    assert parse_spec(result.stdout) == load_config(model)
    assert kdgen("spec", str(model / "config.json")).stdout == result.stdout
    missing = kdgen("spec", str(model / "nothing"))
    assert (missing.exit_code, missing.stdout) == (2, "")


def test_spec_says_how_the_router_is_stored(tmp_path: Path) -> None:
    """In float32 beside weights in bf16: the config does not know, and another router would be built for."""
    weights: dict[str, NDArray[Any]] = dict(random_weights(SMALL, 5))
    for key in weights:
        if key.endswith("mlp.gate.weight"):
            weights[key] = weights[key].astype(np.float32)
    folder = write_model(tmp_path / "model", SMALL, weights)
    assert parse_spec(kdgen("spec", str(folder)).stdout).router_dtype == "float32"
    assert parse_spec(kdgen("spec", str(folder / "config.json")).stdout).router_dtype is None
    (folder / "model.safetensors").unlink()
    assert parse_spec(kdgen("spec", str(folder)).stdout).router_dtype is None
    (folder / "model.safetensors").write_bytes(b"damaged")
    assert "model.safetensors" in kdgen("spec", str(folder)).stderr


# ---- prompts and contexts ---------------------------------------------------------------------------------------------------


def test_prompts_from_a_file_and_with_blanks(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "ids.txt"
    file.write_text("5, 17\n9\n")
    options = ("--max-new-tokens", "4")
    assert report(model, *options, prompt=f"@{file}")["tokens"] == report(model, *options)["tokens"]
    assert read_prompt(" 0,\t39 ", 40) == read_prompt("0 , 39", 40) == (0, 39)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the prompt is empty"),
        (" , ,", "the prompt is empty"),
        ("5,,9", "id 2 of the prompt is missing"),
        ("5,9,", "id 3 of the prompt is missing"),
        ("1,x,2", "'x', id 2 of the prompt, is not an integer"),
        ("1.5", "'1.5', id 1 of the prompt, is not an integer"),
        ("1e3", "is not an integer"),
        ("٣", "is not an integer"),
        ("1,\x1b[31m", r"'\\x1b\[31m', id 2 of the prompt, is not an integer"),
        ("9" * 5000, "is not an integer"),
        ("1,40", "40, id 2 of the prompt, is outside the vocabulary of 40"),
        ("-1", "-1, id 1 of the prompt, is outside the vocabulary of 40"),
        ("@/nowhere/ids.txt", "/nowhere/ids.txt: cannot be read: No such file or directory"),
        ("@", "a file.s name is missing after @"),
    ],
)
def test_prompts_that_are_none(text: str, reason: str) -> None:
    with pytest.raises(KdgenError, match=reason) as error:
        read_prompt(text, 40)
    assert len(str(error.value)) < 200


def test_prompt_errors_end_the_command(tmp_path: Path, model: Path) -> None:
    assert refused(model, prompt="1,40") == "kdgen: error: --prompt-ids: 40, id 2 of the prompt, is outside the vocabulary of 40\n"
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    assert "is not a text file" in refused(model, prompt=f"@{binary}")


def test_contexts(model: Path) -> None:
    long = ",".join(["1"] * 64)
    assert "leaves no room in a context of 64: the model has no more positions" in refused(model, prompt=long)
    assert "a prompt of 3 tokens leaves no room in a context of 3: raise --context" in refused(model, "--context", "3")
    assert "exceeds max_position_embeddings 64" in refused(model, "--context", "65")
    cut = generate(model, "--context", "10", "--max-new-tokens", "20", "--ignore-eos")
    assert cut.exit_code == 0
    assert len(cut.stdout.split()) == 7
    assert "has room for 7 new tokens after this prompt, not 20" in cut.stderr
    full = report(model, "--max-new-tokens", "3", "--draft", "ngram", "--check-exact", prompt=",".join(["1"] * 61))
    assert full["exact"] is True


def test_options_that_make_no_sense(model: Path) -> None:
    assert "add --random-weights" in refused(model, "--layers", "1")
    assert "2 layers and cannot be cut to 9" in refused(model, "--random-weights", "--layers", "9")
    for option, value in (
        ("--budget", "64"),
        ("--budget", "9" * 5000),
        ("--draft", ""),
        ("--block-size", "17"),
        ("--max-new-tokens", "0"),
        ("--draft", "oracle"),
        ("--chunk", "2049"),
        ("--seed", str(2**64)),
    ):
        assert option in refused(model, option, value)
    for option, value in (("--top-k", "5"), ("--top-p", "0.9"), ("--min-p", "0.1"), ("--sample-seed", "3")):
        assert f"{option}: has an effect only on tokens that are drawn: add --temperature" in refused(model, option, value)
        assert f"{option}: has no effect at --temperature 0" in refused(model, "--temperature", "0", option, value)
    assert "--top-k and --top-p: has no effect" in refused(model, "--temperature", "0", "--top-p", "0.9", "--top-k", "4", "--min-p", "0")
    assert "between 0.001 and 100, not nan" in refused(model, "--temperature", "nan")


# ---- damaged models -----------------------------------------------------------------------------------------------------------


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def edit_index(folder: Path) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["lm_head.weight"] = "../../somewhere.safetensors"
    file.write_text(json.dumps(index))


def truncate(folder: Path) -> None:
    os.truncate(folder / "model-00002-of-00002.safetensors", 12345)


def edit_tensors(edit: Callable[[dict[str, NDArray[Any]]], None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors: dict[str, NDArray[Any]] = dict(random_weights(INT4, 5))
        edit(tensors)
        write_model(folder, INT4, tensors, shards=2)

    return change


def nan_scale(tensors: dict[str, NDArray[Any]]) -> None:
    key = "model.layers.1.mlp.experts.0.up_proj.weight_scale"
    tensors[key] = tensors[key].copy()
    tensors[key][0, 0] = np.nan


def wrong_shape(tensors: dict[str, NDArray[Any]]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]


def wrong_type(tensors: dict[str, NDArray[Any]]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.float16)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json: file: cannot be read: No such file or directory"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not valid JSON"),
        (edit_config(model_type="llama"), "model_type = 'llama': not supported; supported are deepseek_v3"),
        (edit_config(hidden_size=128), "embed_tokens.weight has shape [40, 64], the config says [40, 128]"),
        (edit_config(num_hidden_layers=3), "tensor model.layers.2.input_layernorm.weight [64] is missing"),
        (edit_config(quantization_config=None), "tensor model.layers.1.mlp.experts.0.gate_proj.weight [128, 64] is missing"),
        (truncate, "model-00002-of-00002.safetensors: cut off"),
        (lambda folder: (folder / "model-00001-of-00002.safetensors").unlink(), "model-00001-of-00002.safetensors: missing"),
        (edit_index, "points outside its folder: '../../somewhere.safetensors'"),
        (edit_tensors(lambda t: t.pop("model.norm.weight") is None), "tensor model.norm.weight [64] is missing"),
        (edit_tensors(lambda t: t.update(extra=np.zeros(2, np.float32))), "tensor extra [2] is not part of this model"),
        (edit_tensors(wrong_shape), "model.norm.weight has shape [63], the config says [64]"),
        (edit_tensors(wrong_type), "lm_head.weight is stored as F16, expected BF16"),
        (edit_tensors(nan_scale), "experts.0.up_proj.weight_scale: element [0, 0] is nan"),
    ],
)
def test_damaged_models(tmp_path: Path, damage: Callable[[Path], object], said: str) -> None:
    folder = write_model(tmp_path / "model", INT4, random_weights(INT4, 5), shards=2)
    damage(folder)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    message = refused(folder)
    assert said in message
    assert message.startswith("kdgen: error: ")
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before


def test_things_that_are_no_model(tmp_path: Path) -> None:
    assert "there is no such model" in refused(tmp_path / "nothing")
    assert "k26: a shipped spec, which has no weights: add --random-weights" in refused("k26")
    assert "describes a model and has no weights: add --random-weights" in refused(Path("specs/tiny.yaml").resolve())
    text = tmp_path / "model.kdtr"
    text.write_text("nothing of the kind")
    assert "not a safetensors file" in refused(text)
    assert "holds no safetensors file" in refused(write_config_alone(tmp_path / "bare", SMALL))


def write_config_alone(folder: Path, spec: Spec) -> Path:
    write_model(folder, spec, {})
    (folder / "model.safetensors").unlink()
    return folder
