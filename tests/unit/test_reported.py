"""Files that users of comparable software have reported trouble with (``reported/``), through the commands that read them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from kdgen.cli import main
from kdgen.spec.published import load_config
from kdgen.text.tokenizer import TextFiles, load_tokenizer

REPORTED = Path(__file__).parent / "reported"


@pytest.mark.parametrize(
    ("folder", "group"), [("actorder-static", 32), ("bookkeeping-keys", None), ("dense-sparsity-config", 32)], ids=lambda value: str(value)
)
def test_what_is_read(folder: str, group: int | None) -> None:
    result = CliRunner().invoke(main, ["spec", str(REPORTED / folder)], prog_name="kdgen")
    assert result.exit_code == 0, result.output
    spec = load_config(REPORTED / folder)
    assert (spec.name, spec.quantization.group_size if spec.quantization else None) == (folder, group)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("group_size", "quantization_config.config_groups.group_0.weights.group_size = 128: does not divide moe_intermediate_size 160"),
        ("rope_theta_said_missing", "rope_parameters.rope_type = 'deepseek_yarn': not supported; supported are default and yarn"),
        ("wrapper_hidden_str", "text_config.hidden_size = '320': must be a valid integer"),
        ("yarn_no_orig", "rope_parameters.original_max_position_embeddings: missing"),
    ],
)
def test_what_is_refused(file: str, said: str) -> None:
    path = REPORTED / "error-key-names" / f"{file}.json"
    result = CliRunner().invoke(main, ["spec", str(path)], prog_name="kdgen")
    assert (result.exit_code, result.stderr) == (2, f"kdgen: error: {path}: {said}\n")


def test_end_tokens_and_tokenizer() -> None:
    assert TextFiles.of_folder(REPORTED / "generation-eos-minus-one").end_tokens() == ()
    pytest.importorskip("tiktoken", reason="Kimi's tokenizer needs tiktoken: pip install kdgen[tiktoken]")
    assert load_tokenizer(TextFiles.of_folder(REPORTED / "tiktoken-blank-line")).encode("a<think>[EOS]", begin=True) == (97, 260, 257)
