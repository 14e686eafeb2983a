"""Text to tokens and back: nothing is lost, no character is ever split, and damaged files are refused with one clear message."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers_made import SPECIAL, byte_level, kimi

from kdgen.demo.tokenizer import tokenizer_json
from kdgen.errors import KdgenError
from kdgen.text.tokenizer import KimiTokenizer, TextFiles, TextStream, Tokenizer, decode, load_tokenizer

pytest.importorskip("tiktoken", reason="Kimi's tokenizer needs tiktoken: pip install kdgen[tiktoken]")

BYTES = load_tokenizer(TextFiles("demo", {"tokenizer.json": tokenizer_json().encode()}))
TRAINED, KIMI = load_tokenizer(byte_level()), load_tokenizer(kimi())
ALL = pytest.mark.parametrize("tokenizer", [BYTES, TRAINED, KIMI], ids=["bytes", "trained", "kimi"])


@ALL
@given(text=st.text(), cuts=st.lists(st.integers(0, 40)))
def test_any_text_comes_back_however_its_tokens_are_split(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    tokens = tokenizer.encode(text, begin=True)
    assert decode(tokenizer, tokens) == text
    stream, shown, begin = TextStream(tokenizer), "", 0
    for end in sorted({min(cut, len(tokens)) for cut in cuts} | {len(tokens)}):
        shown += stream.feed(tokens[begin:end])
        assert text.startswith(shown)  # nothing that is taken back later: whole characters only
        begin = end
    assert shown + stream.finish() == text


@ALL
@given(tokens=st.lists(st.integers(0, 255)))
def test_any_tokens_are_text_and_wrong_bytes_are_marked(tokenizer: Tokenizer, tokens: list[int]) -> None:
    content = b"".join(map(tokenizer.piece, tokens))
    stream = TextStream(tokenizer)
    assert "".join(stream.feed([token]) for token in tokens) + stream.finish() == content.decode("utf-8", "replace")


def test_pieces_are_what_the_library_decodes() -> None:
    library = tokenizers.Tokenizer.from_str(byte_level().text("tokenizer.json"))
    for text in ("héllo 漢字 🎉 <think>x", "  two  spaces\n\n"):
        tokens = library.encode(text).ids
        assert TRAINED.encode(text, begin=False) == tuple(tokens)
        assert decode(TRAINED, tokens) == library.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("tokenizer", [TRAINED, KIMI], ids=["trained", "kimi"])
def test_special_tokens_are_read_and_not_shown(tokenizer: Tokenizer) -> None:
    special = SPECIAL if tokenizer is TRAINED else "<|im_end|>"
    tokens = tokenizer.encode(f"a{special}b<think>c", begin=False)
    assert len(tokens) == 5
    assert decode(tokenizer, tokens) == "ab<think>c"
    assert decode(tokenizer, [tokens[0], 10_000]) == "a\N{REPLACEMENT CHARACTER}"


def test_the_first_token_is_what_the_configuration_says() -> None:
    """Kimi's, that is: what a ``tokenizer.json`` puts before a text is its own business (tests/oracle/test_tokenizers.py)."""
    config = {"bos_token": {"content": SPECIAL}, "add_bos_token": True}
    first = TRAINED.encode(SPECIAL, begin=False)[0]
    rest = TRAINED.encode("he", begin=True)
    assert load_tokenizer(byte_level(config=config)).encode("he", begin=True) == rest
    begins = {"SpecialToken": {"id": SPECIAL, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    known = {SPECIAL: {"id": SPECIAL, "ids": [first], "tokens": [SPECIAL]}}
    adds_it = tokenizer_with(post_processor={"type": "TemplateProcessing", "single": begins, "pair": begins, "special_tokens": known})
    both = load_tokenizer(broken(byte_level(config=config), tokenizer__json=adds_it))
    assert both.encode("he", begin=True) == (first, *rest), "tokenizer.json adds it already"
    assert load_tokenizer(kimi({"add_bos_token": True})).encode("he", begin=True) == (265, 256)
    assert KIMI.encode("he", begin=True) == (256,)


def test_empty_lines_in_tiktoken_model_are_skipped() -> None:
    content = kimi().contents["tiktoken.model"]
    spaced = content.replace(b"\n", b"\n\n", 3).replace(b"\n", b"\r\n") + b"\n\n"
    assert load_tokenizer(broken(kimi(), tiktoken__model=spaced)).encode("hell 12", begin=True) == KIMI.encode("hell 12", begin=True)


def test_end_tokens_that_are_no_tokens_end_nothing() -> None:
    """As in config.json: -1 says that there is none."""
    for found, tokens in ((-1, ()), ([-1, 7], (7,)), (None, ()), (3, (3,))):
        files = TextFiles("folder", {"generation_config.json": json.dumps({"eos_token_id": found}).encode()})
        assert files.end_tokens() == tokens


def test_a_tokenizer_that_is_a_git_lfs_pointer_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 7847652\n")
    with pytest.raises(KdgenError, match=r"tokenizer.json: cannot be read: it is a Git LFS pointer.*`git lfs pull`"):
        TextFiles.of_folder(tmp_path)


def test_kimis_words() -> None:
    regex = pytest.importorskip("regex")

    def words(text: str) -> list[str]:
        found: list[str] = regex.findall(KimiTokenizer.PATTERN, text, flags=regex.V1)
        return found

    assert words("中文English混合") == ["中文", "English", "混合"]
    assert words("汉字abc 北京市 Pascal") == ["汉字", "abc", " ", "北京市", " Pascal"]
    assert words("it's HTTPServer's 12345 x") == ["it's", " HTTPServer's", " ", "123", "45", " x"]
    assert words("a  b\n\n  c!?\n") == ["a", " ", " b", "\n\n", " ", " c", "!?\n"]
    # merged inside a word only
    assert KIMI.encode("hello 漢字", begin=False) == (258, ord("o"), ord(" "), 260, 262)
    assert KIMI.encode("1112", begin=False) == (ord("1"), ord("1"), ord("1"), ord("2"))


def test_long_runs_do_not_break_kimis_tokenizer() -> None:
    for text in ("x" * 60_000, " " * 450_000, "ab " * 20_000):
        assert decode(KIMI, KIMI.encode(text, begin=False)) == text


def broken(files: TextFiles, **changed: bytes | None) -> TextFiles:
    contents = dict(files.contents) | {name.replace("__", "."): content for name, content in changed.items() if content is not None}
    return TextFiles(
        "folder", {name: content for name, content in contents.items() if changed.get(name.replace(".", "__"), b"") is not None}
    )


def config_with(**changes: Any) -> bytes:
    return json.dumps(json.loads(kimi().contents["tokenizer_config.json"]) | changes).encode()


def tokenizer_with(**changes: Any) -> bytes:
    return json.dumps(json.loads(byte_level().contents["tokenizer.json"]) | changes).encode()


#: Neither loads nor fails as an exception: the library's Rust code panics.
CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (TextFiles("folder"), "folder: has no tokenizer.json and no tiktoken.model: give token ids with --prompt-ids"),
        (broken(byte_level(), tokenizer__json=b"{"), "folder/tokenizer.json: is not valid JSON"),
        (broken(byte_level(), tokenizer__json=b"[]"), "folder/tokenizer.json: holds no JSON object"),
        (broken(byte_level(), tokenizer__json=b"\xff"), "folder/tokenizer.json: is not UTF-8 text"),
        (broken(byte_level(), tokenizer__json=tokenizer_with(model={"type": "x"})), "tokenizer.json: is damaged, or newer than"),
        (broken(byte_level(), tokenizer__json=tokenizer_with(decoder=None)), "its decoder is nothing, but only byte-level"),
        (broken(byte_level(), tokenizer__json=tokenizer_with(decoder={"type": "WordPiece"})), "its decoder is 'WordPiece', but only"),
        (broken(byte_level(), tokenizer_config__json=b"1"), "folder/tokenizer_config.json: holds no JSON object"),
        (byte_level(config={"added_tokens_decoder": [1]}), "made/tokenizer_config.json: added_tokens_decoder: must be a mapping"),
        (byte_level(config={"added_tokens_decoder": {"x": {"content": "y"}}}), "added_tokens_decoder: 'x' is not a token"),
        (byte_level(config={"added_tokens_decoder": {"300": {"content": "y", "special": 1}}}), "'300' is not a token"),
        (byte_level(config={"added_tokens_decoder": {"300": "y"}}), "'300' is not a token"),
        (broken(kimi(), tokenizer_config__json=None), "is not a configuration of Kimi's TikTokenTokenizer"),
        (broken(kimi(), tokenizer_config__json=config_with(tokenizer_class="Qwen")), "is not a configuration of Kimi's"),
        (broken(kimi(), tokenizer_config__json=config_with(added_tokens_decoder={"3": {"content": "x"}})), "'3' is not a special token"),
        (broken(kimi(), tokenizer_config__json=config_with(added_tokens_decoder={"265": 1})), "'265' is not a special token"),
        (broken(kimi(), tokenizer_config__json=config_with(added_tokens_decoder={"9" * 5000: 1})), "99... is not a special token"),
        (broken(kimi(), tokenizer_config__json=config_with(added_tokens_decoder={"265": {"content": "\ud800"}})), "is damaged, or newer"),
        (broken(byte_level(), tokenizer_config__json=b'{"add_bos_token": true, "bos_token": "\\ud800"}'), "is damaged, or newer than"),
        (broken(byte_level(), tokenizer__json=tokenizer_with(normalizer=CHARSMAP)), "is damaged, or newer than"),
        (
            broken(kimi(), tokenizer_config__json=config_with(added_tokens_decoder={"265": {"content": "<|reserved_token_266|>"}})),
            "two tokens have the same content",
        ),
        (broken(kimi(), tiktoken__model=b"AA== 0\nnonsense\n"), "folder/tiktoken.model: line 2 is damaged"),
        (broken(kimi(), tiktoken__model=b"AA== 0\nAQ== 2\n"), "folder/tiktoken.model: line 2 is damaged"),
        (broken(kimi(), tiktoken__model=b"AA== 0\nAQ== 1\n"), "is damaged or truncated: some bytes have no token"),
    ],
)
def test_files_that_hold_no_tokenizer(files: TextFiles, said: str) -> None:
    with pytest.raises(KdgenError) as error:
        load_tokenizer(files)
    said_first = said.startswith("folder/")  # the file that is wrong, and no other one before it
    assert str(error.value).startswith(said) if said_first else said in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}}, "Missing [UNK] token"),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}}, "retry-limit"),
    ],
)
def test_a_tokenizer_that_fails_over_a_text(changes: Mapping[str, Any], said: str) -> None:
    tokenizer = load_tokenizer(broken(byte_level(), tokenizer__json=tokenizer_with(**changes)))
    with pytest.raises(KdgenError) as error:
        tokenizer.encode("x" * 40, begin=True)
    assert str(error.value).startswith("folder/tokenizer.json: is damaged") and said in str(error.value)


def test_a_prompt_is_neither_cut_nor_padded() -> None:
    """A ``tokenizer.json`` may say so, left over from training."""
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    fill = {"strategy": {"Fixed": 40}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    for changes in ({"truncation": cut}, {"padding": fill}, {"truncation": {**cut, "stride": 5}}):
        tokenizer = load_tokenizer(broken(byte_level(), tokenizer__json=tokenizer_with(**changes)))
        assert tokenizer.encode("The quick brown fox", begin=True) == TRAINED.encode("The quick brown fox", begin=True)


def test_tiktoken_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(KdgenError, match=r"needs tiktoken: pip install 'kdgen\[tiktoken\]'"):
        load_tokenizer(kimi())


@pytest.mark.parametrize(("config", "tokens"), [({}, ()), ({"eos_token_id": 5}, (5,)), ({"eos_token_id": [5, 7]}, (5, 7))])
def test_end_tokens(config: Mapping[str, Any], tokens: tuple[int, ...]) -> None:
    assert TextFiles("folder", {"generation_config.json": json.dumps(config).encode()}).end_tokens() == tokens
    with pytest.raises(KdgenError, match="is neither a token id"):
        TextFiles("folder", {"generation_config.json": b'{"eos_token_id": ["a"]}'}).end_tokens()


def test_files_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    (tmp_path / "other.json").write_bytes(b"{}")
    assert TextFiles.of_folder(tmp_path) == TextFiles(str(tmp_path), {"tokenizer.json": b"{}"})
    (tmp_path / "tiktoken.model").mkdir()
    with pytest.raises(KdgenError, match=r"tiktoken\.model: cannot be read: Is a directory"):
        TextFiles.of_folder(tmp_path)
