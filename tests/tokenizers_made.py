"""Small tokenizers of both kinds, as files of a published model."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import tokenizers

from kdgen.text.tokenizer import TextFiles

TEXTS = (
    "héllo wörld, 漢字 and 🎉🎉 emoji; naïve café — “quotes”",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "def f(x):\n    return x\n",
)
SPECIAL = "<|end|>"


def byte_level(vocab_size: int = 300, config: Mapping[str, Any] | None = None) -> TextFiles:
    """A byte-level BPE trained on ``TEXTS``: tokens that hold parts of characters, and several of them. Special tokens come last."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size - 2, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([SPECIAL])
    tokenizer.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    files = {"tokenizer.json": tokenizer.to_str().encode()}
    return TextFiles("made", files | ({} if config is None else {"tokenizer_config.json": json.dumps(config).encode()}))


def kimi(config: Mapping[str, Any] | None = None) -> TextFiles:
    """The 256 bytes and a few pairs of them in tiktoken's form, with special tokens named as Kimi's are."""
    han, character = "漢".encode(), "字".encode()
    tokens = [bytes([byte]) for byte in range(256)] + [b"he", b"ll", b"hell", han[:2], han, character[:2], character, b" w", b"12"]
    lines = [base64.b64encode(token) + b" " + str(rank).encode() for rank, token in enumerate(tokens)]
    contents = [("[BOS]", True), ("[EOS]", True), ("<|im_end|>", True), ("<think>", False)]
    named = {len(tokens) + place: content for place, content in enumerate(contents)}
    added = {str(token): {"content": content, "special": special} for token, (content, special) in named.items()}
    whole = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "added_tokens_decoder": added}
    files = {"tiktoken.model": b"\n".join(lines) + b"\n", "tokenizer_config.json": json.dumps(whole | dict(config or {})).encode()}
    return TextFiles("made", files)
