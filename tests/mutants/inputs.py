"""Mutants of what engine and reference share, and of readers of files."""

from __future__ import annotations

from tests.mutants.mutant import seen_by, tested_by

SHARED = [
    *seen_by(
        "shared",
        "kdgen/spec/model.py",
        ("tables", "numbers of the config"),
        (
            "attention's scale takes the other mscale",
            "yarn_mscale(self.rope_scaling.factor, self.rope_scaling.mscale_all_dim) ** 2",
            "yarn_mscale(self.rope_scaling.factor, self.rope_scaling.mscale) ** 2",
        ),
    ),
    *seen_by(
        "shared",
        "kdgen/spec/fields.py",
        ("tables", "numbers of the config"),
        ("one mscale is enough for their ratio", "if self.mscale and self.mscale_all_dim:", "if self.mscale or self.mscale_all_dim:"),
        (
            "mscale_all_dim is 1 where it is absent",
            "mscale_all_dim: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0",
            "mscale_all_dim: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 1.0",
        ),
        (
            "attention_factor beside the mscales",
            "            return self.attention_factor\n",
            "            return self.attention_factor * yarn_mscale(self.factor, 1.0)\n",
        ),
    ),
    *seen_by(
        "shared",
        "kdgen/spec/rope.py",
        ("tables", "numbers of the config"),
        (
            "the ramp ends by pairs",
            "math.ceil(correction_dim(scaling.beta_slow)), dim - 1)",
            "math.ceil(correction_dim(scaling.beta_slow)), dim // 2 - 1)",
        ),
        (
            "the ramp begins a pair late",
            "max(math.floor(correction_dim(scaling.beta_fast)), 0)",
            "max(math.ceil(correction_dim(scaling.beta_fast)), 0)",
        ),
    ),
    *seen_by(
        "shared",
        "kdgen/spec/published.py",
        ("numbers of the config",),
        ("GLM has no dense layer where it says nothing", "        dense = 1\n", "        dense = 0\n"),
        (
            "halves are rotated where nothing is said",
            '"attention_bias": False, "rope_interleave": True} | out',
            '"attention_bias": False, "rope_interleave": False} | out',
        ),
        ("deepseek_v2 normalises its weights", '"topk_method": method, "norm_topk_prob": False}', '"topk_method": method}'),
        (
            "deepseek_v2 limits groups where nothing is said",
            'config.values.get("topk_method", "greedy")',
            'config.values.get("topk_method", "group_limited_greedy")',
        ),
        (
            "a wrapper's head is its own where nothing is said",
            'outer.values.get("tie_word_embeddings", True)',
            'outer.values.get("tie_word_embeddings", False)',
        ),
    ),
]

FILES = [
    *tested_by(
        "files",
        "kdgen/spec/model.py",
        "tests/unit/test_checkpoint.py",
        ("scales may be float32", '"scale", count, matrix, ("BF16",)', '"scale", count, matrix, ("BF16", "F32")'),
    ),
    *tested_by(
        "files",
        "kdgen/weights/checkpoint.py",
        "tests/unit/test_checkpoint.py",
        ("a transposed tensor will do", "if entry.shape != group.shape:", "if sorted(entry.shape) != sorted(group.shape):"),
        (
            "a tensor may lie in another file than the index says",
            "headers[places[name]].get(key)",
            "next((each[key] for each in headers.values() if key in each), None)",
        ),
        ("the first layer behind the last is refused", "int(match[1]) >= spec.num_hidden_layers", "int(match[1]) > spec.num_hidden_layers"),
    ),
    *tested_by(
        "files",
        "kdgen/weights/kdtr.py",
        "tests/unit/test_kdtr.py",
        (
            "a changed header goes unseen",
            'if stored or not fits or found.get("header") != _header_checksum(metadata, described):',
            "if stored or not fits:",
        ),
        ("pieces' checksums go by what is written at once", "PIECE_BYTES - at % PIECE_BYTES", "PIECE_BYTES"),
    ),
    *tested_by(
        "files",
        "kdgen/weights/header.py",
        "tests/unit/test_kdtr.py",
        ("bytes behind the last tensor are none of ours", "    if position != file_bytes:", "    if position > file_bytes:"),
    ),
    *tested_by(
        "files",
        "kdgen/weights/finite.py",
        "tests/unit/test_finite.py",
        ("negative infinity is finite", "part.view(unsigned).max() >= negative", "part.view(unsigned).max() > negative"),
    ),
    *tested_by(
        "files",
        "kdgen/weights/formats.py",
        "tests/unit/test_finite.py",
        (
            "a part begins with an expert",
            "range(start // expert * expert, start + part.nbytes, expert)",
            "range(start, start + part.nbytes, expert)",
        ),
    ),
    *tested_by(
        "files",
        "kdgen/text/tokenizer.py",
        "tests/unit/test_tokenizer.py",
        ("a prompt is cut as in training", "            self._tokenizer.no_truncation()  # training", "            # training"),
        ("nothing stands before a text", "add_special_tokens=begin", "add_special_tokens=False"),
        ("bytes that are no character vanish", 'getincrementaldecoder("utf-8")("replace")', 'getincrementaldecoder("utf-8")("ignore")'),
    ),
]
