"""A ``tokenizer.json`` whose tokens are bytes: token i is byte i, and the special tokens follow."""

from __future__ import annotations

import json

from kdgen.demo.corpus import END, MASK
from kdgen.text.tokenizer import byte_characters


def tokenizer_json() -> str:
    """The file's text, in the format of Hugging Face tokenizers: a byte-level BPE without merges."""
    special = [(END, "<|end|>"), (MASK, "<|mask|>")]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())} | {text: token for token, text in special}
    model: dict[str, object] = {"type": "BPE", "dropout": None, "unk_token": None}
    model |= {"continuing_subword_prefix": None, "end_of_word_suffix": None}
    model |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocabulary, "merges": []}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token, "content": text, **flags} for token, text in special],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": model,
    }
    return json.dumps(whole, ensure_ascii=False, indent=1) + "\n"
