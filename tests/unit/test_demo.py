"""The demo's corpus, tokenizer and curve, and, where torch is, training: it computes what the kernels' reference does, and goes on
where it stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kdgen.demo import corpus
from kdgen.demo.acceptance import measure
from kdgen.demo.curve import write_curve
from kdgen.demo.prompts import Prompt, read_prompts, write_prompts
from kdgen.demo.tokenizer import tokenizer_json
from kdgen.errors import KdgenError
from kdgen.reference.dflash import ReferenceDrafter
from kdgen.reference.model import ReferenceModel
from kdgen.runtime.model import open_model, with_drafter
from kdgen.runtime.pipeline import open_engine
from kdgen.spec.model import load_spec
from kdgen.spec.published import load_config
from kdgen.spec.published_drafter import load_draft_config
from kdgen.text.tokenizer import byte_characters
from kdgen.verify.shrink import parameters
from kdgen.weights.checkpoint import Checkpoint

TEXT = b"def forward(self, x):\n    return x\n"


def test_the_corpus_is_the_standard_library_and_packages_and_held_out_files_are_not_trained_on() -> None:
    text = corpus.Text.load()
    assert len(text.train) > 5_000_000 and int(text.train.max()) == corpus.END
    library = {file.path for file in text.library}
    assert 10 < len(library) < 200 and not any(part in path for path in library for part in ("site-packages", "/test/", "encodings/"))
    assert library == {file.path for file in corpus.files() if file.held_out}
    held_out = {file.path for file in text.held_out}
    assert library <= held_out and all(path.split("/")[0] in corpus.PACKAGES for path in held_out - library)


def test_packages_are_found_with_their_versions() -> None:
    found = corpus.packages()
    version, folder = found["numpy"]  # which kdgen needs itself
    assert version == np.__version__ and (folder / "__init__.py").is_file()


def test_windows_depend_on_seed_and_step_alone() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    first = corpus.windows(tokens, 4, 10, seed=1, step=7)
    np.testing.assert_array_equal(first, corpus.windows(tokens, 4, 10, seed=1, step=7))
    assert (first != corpus.windows(tokens, 4, 10, seed=1, step=8)).any()
    assert (np.diff(first, axis=1) == 1).all()


def test_prompts_begin_lines_of_held_out_files() -> None:
    chosen = [corpus.File("a.py", b"import os\n" * 40), corpus.File("b.py", b"x = 1\n" * 60)]
    found = corpus.prompts(chosen, 9, 32, seed=0)
    assert len(found) == 9 and {prompt.path for prompt in found} == {"a.py", "b.py"}
    for prompt in found:
        text = next(file.text for file in chosen if file.path == prompt.path)
        line = text.split(b"\n")[prompt.line - 1]
        assert len(prompt.tokens) == 32 and bytes(prompt.tokens).startswith(line[:32])


def test_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds 0 source files"):
        corpus.Text.load(tmp_path)


def test_tokens_are_bytes() -> None:
    characters = byte_characters()
    assert len(set(characters)) == 256 and characters[ord("a")] == "a" and characters[ord(" ")] == "Ġ"
    vocabulary = json.loads(tokenizer_json())["model"]["vocab"]
    assert len(vocabulary) == 258 and vocabulary["Ċ"] == ord("\n")


def test_curve(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    entries = [{"run": "target", "step": step, "loss": 5 / step} for step in (1, 2, 4)] + [{"run": "held out", "step": 4, "loss": 1.0}]
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    write_curve(log, tmp_path / "loss.svg")
    svg = (tmp_path / "loss.svg").read_text()
    assert svg.count("<polyline") == 1 and "target: 4 steps, 1.250" in svg


def test_the_demo_model_is_small() -> None:
    spec = load_spec("demo")
    assert 3e6 < parameters(spec) < 8e6 and spec.draft is not None
    assert spec.vocab_size == corpus.MASK + 1 == spec.draft.mask_token_id + 1 and spec.eos_token_id == (corpus.END,)


@pytest.mark.parametrize("text", ["{}", "[", '{"prompts": [{"line": 3}]}'])
def test_files_that_hold_no_prompts(tmp_path: Path, text: str) -> None:
    file = tmp_path / "prompts.json"
    file.write_text(text)
    with pytest.raises(KdgenError, match="is not a file of prompts"):
        read_prompts(file)


def test_prompts_are_read_as_they_were_written(tmp_path: Path) -> None:
    prompts = [Prompt("a.py", 3, tuple("é".encode())), Prompt("b/c.py", 1, (35, 195))]
    write_prompts(tmp_path / "prompts.json", "a corpus", prompts)
    assert read_prompts(tmp_path / "prompts.json") == prompts
    assert [prompt.text for prompt in prompts] == ["é", "#"]


# ---- training -----------------------------------------------------------------------------------------------------------


def test_training_without_torch_says_what_to_install() -> None:
    without = "import runpy, sys; sys.modules['torch'] = None; runpy.run_module('kdgen.demo.train', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kdgen.demo.train: error: torch is not installed: pip install 'kdgen[train]'\n"


def test_training_wants_a_drafter(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="training needs torch: pip install kdgen[train]")
    from kdgen.demo.train import Settings, train

    with pytest.raises(KdgenError, match="tiny has no drafter: add a draft: section"):
        train(Settings(tmp_path / "out"), load_spec("tiny"))
    assert not (tmp_path / "out").exists()


def test_acceptance_of_a_folder_that_is_none(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kdgen.demo.acceptance", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout) == (2, "") and "nowhere" in done.stderr and "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few steps of everything, stopped once and gone on with."""
    torch = pytest.importorskip("torch", reason="training needs torch: pip install kdgen[train]")
    torch.set_num_threads(1)  # tensors this small: on a busy machine, threads only wait for one another, minutes long
    from kdgen.demo.train import Settings, train

    out = tmp_path_factory.mktemp("demo")
    small = {"batch": 2, "length": 64, "draft_batch": 2, "anchors": 3, "own_text": 4, "prompt": 24, "prompts": 4, "device": "cpu"}
    for steps in (2, 4):
        train(Settings(out, steps=steps, draft_steps=steps + 1, log_every=1, save_every=2, **small), load_spec("demo"))  # type: ignore[arg-type]
    return out


def test_training_goes_on_where_it_stopped(trained: Path) -> None:
    entries = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in entries if entry["run"] == "target"] == [1, 2, 3, 4]
    assert [entry["step"] for entry in entries if entry["run"] == "drafter"] == [1, 2, 3, 4, 5]
    assert (trained / "loss.svg").read_text().count("<polyline") == 2


def test_what_is_exported_is_the_spec(trained: Path) -> None:
    spec, draft = load_spec("demo"), load_draft_config(trained / "drafter")
    int4 = load_config(trained / "model-int4")
    assert int4.sha256 == spec.with_draft(None).sha256
    Checkpoint(trained / "model-int4").validate(int4)
    Checkpoint(trained / "drafter").validate(draft)
    assert spec.draft is not None and list(draft.tensors()) == list(spec.draft.tensors())


def test_torch_computes_what_the_reference_does(trained: Path) -> None:
    import torch

    from kdgen.demo.drafter import TorchDrafter
    from kdgen.demo.target import TorchTarget, generate, shapes

    spec, draft = load_spec("demo"), load_draft_config(trained / "drafter")
    plain, int4, drafter = (Checkpoint(trained / name) for name in ("model", "model-int4", "drafter"))

    def tensor(values: object) -> torch.Tensor:
        return torch.from_numpy(np.array(values).astype(np.float32))

    weights = {}
    for name, _ in shapes(spec):
        experts = range(spec.n_routed_experts or 0)
        stacked = "experts." in name and "shared_experts" not in name
        weights[name] = (
            torch.stack([tensor(plain[name.replace("experts.", f"experts.{e}.")]) for e in experts]) if stacked else tensor(plain[name])
        )
    target, tokens = TorchTarget(spec, weights), list(TEXT)
    forward = target.forward(torch.tensor([tokens]), draft.target_layer_ids)
    expected = ReferenceModel(json.loads((trained / "model-int4" / "config.json").read_text()), int4).forward(tokens)
    np.testing.assert_allclose(forward.logits[0], expected.logits, rtol=0, atol=1e-5)
    features = expected.features[list(draft.target_layer_ids)].swapaxes(0, 1).reshape(len(tokens), -1)
    np.testing.assert_allclose(forward.features[0], features, rtol=0, atol=1e-5)

    model = TorchDrafter(
        draft, {key: tensor(drafter[key]) for key in drafter}, *(weights[f"{k}.weight"] for k in ("model.embed_tokens", "lm_head")), 64
    )
    anchors = torch.tensor([[5, 20]])
    logits = model.blocks(forward.features, torch.tensor([[tokens[5], tokens[20]]]), anchors)
    reference = ReferenceDrafter(draft, drafter, int4["model.embed_tokens.weight"], int4["lm_head.weight"])
    for place, anchor in enumerate((5, 20)):
        _, block = reference.block(reference.extend(reference.empty_cache(), features[:anchor]), tokens[anchor], draft.block_size)
        np.testing.assert_allclose(logits[0, place], block, rtol=0, atol=1e-5)

    written = generate(target, torch.tensor([tokens]), 3, temperature=0, seed=0)[0].tolist()
    for end in range(len(tokens), len(written)):  # with a cache as without
        assert written[end] == int(target.forward(torch.tensor([written[:end]])).logits[0, -1].argmax())


def test_acceptance_is_measured(trained: Path) -> None:
    prompts = [prompt.tokens for prompt in read_prompts(trained / "prompts.json")[:2]]
    model = with_drafter(open_model(trained / "model-int4"), trained / "drafter")
    rows = list(measure(open_engine(model, len(prompts[0]) + 8, backend="cpu").engine, prompts, 8))
    assert [row.method for row in rows] == ["chain", "tree of 7", "tree of 15", "tree of 31", "tree of 63"]
    assert all(row.mean >= 1 and sum(row.histogram) == row.rounds for row in rows)
