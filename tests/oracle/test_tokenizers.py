"""Text to tokens as transformers has it, for tokenizers whose files leave something to each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers_made import SPECIAL, byte_level, kimi

from kdgen.text.tokenizer import TextFiles, decode, load_tokenizer, special_token

transformers = pytest.importorskip("transformers", reason="transformers' tokenizers are the oracle; install the oracle extra")

TEXTS = ("he", f"{SPECIAL}he", "a<think>b</think> c<|im_end|>", "[BOS]hell", " <|extra|> x")
ADDED = {
    "299": {"content": "<think>", "special": False, "normalized": False},
    "300": {"content": "</think>", "special": False, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False},
    "301": {"content": "<|im_end|>", "special": True, "normalized": False},
    "310": {"content": "<|extra|>", "special": True, "lstrip": True, "rstrip": True},
}


def before(kind: str) -> Any:
    """A post-processor: nothing, one that leaves tokens as they are, or one that puts the special token before a text."""
    template = tokenizers.processors.TemplateProcessing(single=f"{SPECIAL} $A", pair=f"{SPECIAL} $A $B", special_tokens=[(SPECIAL, 298)])
    same = tokenizers.processors.ByteLevel(trim_offsets=False)
    return {"nothing": None, "same": same, "template": template, "both": tokenizers.processors.Sequence([same, template])}[kind]


def folder_of(files: TextFiles, folder: Path, model_type: str) -> Path:
    for name, content in files.contents.items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def compare(folder: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ours = load_tokenizer(TextFiles.of_folder(folder))
    for text in TEXTS:
        assert list(ours.encode(text, begin=True)) == theirs.encode(text)
        tokens = theirs.encode(text, add_special_tokens=False)
        assert list(ours.encode(text, begin=False)) == tokens
        assert decode(ours, tokens) == theirs.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("kind", ["nothing", "same", "template", "both"])
@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "LlamaTokenizerFast", None])
def test_what_stands_before_a_text(tmp_path: Path, kind: str, add_bos: bool | None, named: str | None) -> None:
    config = {"bos_token": SPECIAL, "add_bos_token": add_bos, "tokenizer_class": named}
    files = byte_level(config={key: value for key, value in config.items() if value is not None})
    tokenizer = tokenizers.Tokenizer.from_str(files.contents["tokenizer.json"].decode())
    tokenizer.post_processor = before(kind)
    compare(folder_of(TextFiles("made", {**files.contents, "tokenizer.json": tokenizer.to_str().encode()}), tmp_path, "deepseek_v3"))


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": ADDED},
        {"added_tokens_decoder": ADDED, "bos_token": "<think>"},
        {"added_tokens_decoder": {"301": ADDED["301"]}, "eos_token": "</think>", "pad_token": {"__type": "AddedToken", "content": "[BOS]"}},
        {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|extra|>", "</think>"]},
        {"eos_token": "<|im_end|>", "extra_special_tokens": ["<|extra|>"], "added_tokens_decoder": {"5": ADDED["300"]}},
    ],
)
def test_tokens_that_the_configuration_alone_names(tmp_path: Path, config: dict[str, Any]) -> None:
    compare(folder_of(byte_level(config=config), tmp_path, "glm4_moe_lite"))


@pytest.mark.parametrize(
    ("config", "name", "content"),
    [
        ({}, "special_tokens_map.json", {"bos_token": "<think>", "eos_token": {"content": "[BOS]"}}),
        ({"bos_token": "</think>"}, "special_tokens_map.json", {"bos_token": "<think>", "additional_special_tokens": ["<|extra|>"]}),
        ({"added_tokens_decoder": {"299": ADDED["299"]}}, "special_tokens_map.json", {"bos_token": "[BOS]"}),
        ({"eos_token": "<|im_end|>"}, "added_tokens.json", {"<|im_end|>": 301, "</think>": 300}),
    ],
)
def test_older_files_that_name_tokens(tmp_path: Path, config: dict[str, Any], name: str, content: dict[str, Any]) -> None:
    folder = folder_of(byte_level(config=config), tmp_path, "deepseek_v3")
    (folder / name).write_text(json.dumps(content))
    compare(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    bos = special_token(TextFiles.of_folder(folder).tokenizer_config(), "bos_token")
    assert bos == theirs.bos_token


@pytest.mark.parametrize("add_bos", [True, False])
def test_kimis(tmp_path: Path, add_bos: bool) -> None:
    folder = folder_of(kimi({"add_bos_token": add_bos}), tmp_path, "kimi_k25")
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ours = load_tokenizer(TextFiles.of_folder(folder))
    for text in ("hell", "[BOS]hell", "<think>a", "12 he"):
        assert list(ours.encode(text, begin=True)) == theirs.encode(text)
