"""Text to token ids and back, with a published model's own tokenizer.

Two kinds are supported: ``tokenizer.json`` with byte-level tokens (Hugging Face tokenizers), and Kimi's ``tiktoken.model``. In both, every
token is a sequence of bytes, so a stream can hold back the bytes of an incomplete character.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kdgen.errors import KdgenError
from kdgen.files.inputs import read_input
from kdgen.spec.fields import show

#: The files of a published model that are needed for text; all are optional.
NAMES = (
    "tokenizer.json", "tiktoken.model", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
    "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
#: Keys of ``tokenizer_config.json`` that name a token.
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer(Protocol):
    """Text to token ids, and each id to the bytes that it adds to the text."""

    def encode(self, text: str, begin: bool) -> tuple[int, ...]:
        """The tokens of ``text``, which may spell out special tokens. With ``begin``, the tokens that the model expects before a text come
        first.

        Raises KdgenError when the tokenizer is found to be damaged."""

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to the text: none for a special token, U+FFFD for an unknown id."""


@dataclass(frozen=True)
class TextFiles:
    """Those of the files ``NAMES`` that the model at ``where`` has, by name."""

    where: str
    contents: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def of_folder(cls, folder: Path) -> TextFiles:
        """The files in ``folder``. Raises KdgenError when one of them exists and cannot be read."""
        found = {}
        for name in NAMES:
            try:
                if (folder / name).exists():
                    found[name] = read_input(folder / name)
            except OSError as error:
                raise KdgenError(f"{folder / name}: cannot be read: {error.strerror or error}") from None
        return cls(str(folder), found)

    def text(self, name: str) -> str:
        """A file's text. Raises KdgenError when it is not UTF-8."""
        try:
            return self.contents[name].decode("utf-8")
        except UnicodeDecodeError:
            raise KdgenError(f"{self.where}/{name}: is not UTF-8 text; download it again") from None

    def table(self, name: str) -> dict[str, Any]:
        """A file's JSON object; empty if there is no such file. Raises KdgenError when it holds something else."""
        if name not in self.contents:
            return {}
        try:
            found = json.loads(self.text(name))
        except (ValueError, RecursionError) as error:
            raise KdgenError(f"{self.where}/{name}: is not valid JSON ({error}); download it again") from None
        if not isinstance(found, dict):
            raise KdgenError(f"{self.where}/{name}: holds no JSON object; download it again")
        return found

    def tokenizer_config(self) -> dict[str, Any]:
        """``tokenizer_config.json``. An older one has no ``added_tokens_decoder``; its tokens are in two other files."""
        config = self.table("tokenizer_config.json")
        if "added_tokens_decoder" in config:
            return config
        config |= self.table("special_tokens_map.json")
        special = {special_token(config, key) for key in SPECIAL_TOKENS}
        added = {
            str(token): {"content": text, "special": text in special, "normalized": text not in special}
            for text, token in self.table("added_tokens.json").items()
        }
        return config | ({"added_tokens_decoder": added} if added else {})

    def end_tokens(self) -> tuple[int, ...]:
        """End tokens of ``generation_config.json``, in addition to those of ``config.json``; chat models have some there. Ids below zero
        are left out, as in ``config.json``.

        Raises KdgenError when its ``eos_token_id`` is something else.
        """
        found = self.table("generation_config.json").get("eos_token_id")
        tokens = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(token) is int for token in tokens):
            raise KdgenError(f"{self.where}/generation_config.json: eos_token_id: is neither a token id nor a list of them")
        return tuple(token for token in tokens if token >= 0)


def load_tokenizer(files: TextFiles) -> Tokenizer:
    """The model's tokenizer. Raises KdgenError when there is none, its kind is unknown, it is damaged, or its library is missing."""
    if "tokenizer.json" in files.contents:
        return ByteLevelTokenizer(files)
    if "tiktoken.model" in files.contents:
        return KimiTokenizer(files)
    raise KdgenError(f"{files.where}: has no tokenizer.json and no tiktoken.model: give token ids with --prompt-ids")


class TextStream:
    """Converts a stream of tokens to text. Holds back the bytes of an incomplete character; one that is never completed becomes U+FFFD."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Iterable[int]) -> str:
        return self._decoder.decode(b"".join(map(self._tokenizer.piece, tokens)))

    def finish(self) -> str:
        """The text at the end: bytes that were held back become U+FFFD."""
        return self._decoder.decode(b"", final=True)


def decode(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """The text of ``tokens``, without special tokens; bytes that are not UTF-8 become U+FFFD."""
    stream = TextStream(tokenizer)
    return stream.feed(tokens) + stream.finish()


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    beyond = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(beyond)) for byte in range(256)]


#: Keys of an added token, besides its content.
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()


@contextlib.contextmanager
def _by_library(file: str) -> Iterator[None]:
    """Turn exceptions of a tokenizer's library about ``file`` into a KdgenError. It raises plain Exception, and a BaseException if its Rust
    code panics."""
    try:
        yield
    except KdgenError:  # about another file of the tokenizer
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise KdgenError(f"{file}: is damaged, or newer than the installed library that reads it ({error}); download it again") from None


class ByteLevelTokenizer:
    """A ``tokenizer.json`` whose tokens are bytes written as ``byte_characters``, as in DeepSeek and GLM.

    As in transformers, tokens that only ``tokenizer_config.json`` names are added after its own, and its post-processor adds the tokens
    before a text; ``add_bos_token`` matters only without a ``tokenizer.json``.
    """

    def __init__(self, files: TextFiles) -> None:
        import tokenizers

        where = f"{files.where}/tokenizer.json"
        kinds = _decoders(files.table("tokenizer.json").get("decoder"))
        if set(kinds) != {"ByteLevel"}:
            found = ", ".join(map(repr, kinds)) or "nothing"
            raise KdgenError(
                f"{where}: its decoder is {found}, but only byte-level tokenizers are supported: give token ids with --prompt-ids"
            )
        self._file = where
        self._bytes = {character: byte for byte, character in enumerate(byte_characters())}
        text = files.text("tokenizer.json")
        with _by_library(where):
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
            self._tokenizer.no_truncation()  # training may have left truncation and padding on; a prompt is encoded as it is
            self._tokenizer.no_padding()
            self._tokenizer.add_tokens([*_configured_tokens(files)])
            self._added = self._tokenizer.get_added_tokens_decoder()

    def encode(self, text: str, begin: bool) -> tuple[int, ...]:
        with _by_library(self._file):
            return tuple(self._tokenizer.encode(text, add_special_tokens=begin).ids)

    def piece(self, token: int) -> bytes:
        if (added := self._added.get(token)) is not None:
            return b"" if added.special else added.content.encode()
        written = self._tokenizer.id_to_token(token)
        if written is None:
            return _UNKNOWN
        if all(character in self._bytes for character in written):
            return bytes(self._bytes[character] for character in written)
        return bytes(written, "utf-8")


class KimiTokenizer:
    """Kimi's ``tiktoken.model``: each line has a token's bytes in base64 and its rank. Special tokens have the ids after those; their names
    are in ``tokenizer_config.json``."""

    SPECIAL_TOKENS = 258
    #: Splits text into words before byte pairs are merged, an alternative for each kind; Chinese characters are split from other letters.
    _UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    _BEFORE, _SUFFIX = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    PATTERN = "|".join(
        (
            r"[\p{Han}]+",
            f"{_BEFORE}{_UPPER}*{_LOWER}+{_SUFFIX}",
            f"{_BEFORE}{_UPPER}+{_LOWER}*{_SUFFIX}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )

    def __init__(self, files: TextFiles) -> None:
        try:
            import tiktoken
        except ImportError:
            raise KdgenError(f"{files.where}/tiktoken.model: reading it needs tiktoken: pip install 'kdgen[tiktoken]'") from None
        config = files.table("tokenizer_config.json")
        where = f"{files.where}/tokenizer_config.json"
        added = config.get("added_tokens_decoder")
        if config.get("tokenizer_class") != "TikTokenTokenizer" or not isinstance(added, dict):
            raise KdgenError(f"{where}: is not a configuration of Kimi's TikTokenTokenizer, without which tiktoken.model cannot be read")
        ranks = _ranks(files)
        self._visible = set(range(len(ranks)))
        special = {token: f"<|reserved_token_{token}|>" for token in range(len(ranks), len(ranks) + self.SPECIAL_TOKENS)}
        by_key = {str(token): token for token in special}
        for key, value in added.items():
            token = by_key.get(key)
            content = value.get("content") if isinstance(value, dict) else None
            if token is None or not isinstance(content, str):
                raise KdgenError(f"{where}: added_tokens_decoder: {show(key)} is not a special token of this vocabulary, or has no content")
            special[token] = content
            if not value.get("special", True):
                self._visible.add(token)
        if len(set(special.values())) < len(special):
            raise KdgenError(f"{where}: added_tokens_decoder: two tokens have the same content")
        names = {content: token for token, content in special.items()}
        with _by_library(where):
            self._encoding = tiktoken.Encoding("tiktoken.model", pat_str=self.PATTERN, mergeable_ranks=ranks, special_tokens=names)
        self._known = len(ranks) + self.SPECIAL_TOKENS
        self._first = _first_token(files, names.get)

    def encode(self, text: str, begin: bool) -> tuple[int, ...]:
        tokens = self._first if begin else ()
        return (*tokens, *(token for part in _cut(text) for token in self._encoding.encode(part, allowed_special="all")))

    def piece(self, token: int) -> bytes:
        if token in self._visible:
            return bytes(self._encoding.decode_single_token_bytes(token))
        return b"" if token < self._known else _UNKNOWN


def _decoders(found: object) -> list[str]:
    """The types of the decoders in a ``tokenizer.json``, in order."""
    if not isinstance(found, dict):
        return []
    if found.get("type") == "Sequence" and isinstance(found.get("decoders"), list):
        return [kind for each in found["decoders"] for kind in _decoders(each)]
    return [str(found.get("type"))]


def _configured_tokens(files: TextFiles) -> Iterator[Any]:
    """The tokens that ``tokenizer_config.json`` names, as AddedTokens of the tokenizers library, in the order in which transformers adds
    those that a ``tokenizer.json`` lacks. Raises KdgenError when an entry of ``added_tokens_decoder`` is not a token."""
    import tokenizers

    config, where = files.tokenizer_config(), f"{files.where}/tokenizer_config.json"
    added = config.get("added_tokens_decoder") or {}
    named = [text for key in SPECIAL_TOKENS if (text := special_token(config, key))]
    if not isinstance(added, dict):
        raise KdgenError(f"{where}: added_tokens_decoder: must be a mapping of ids to tokens")
    for key, value in sorted(added.items(), key=lambda item: (len(item[0]), item[0])):
        content = value.get("content") if isinstance(value, dict) else None
        flags = {name: value.get(name, name == "special") for name in _FLAGS} if isinstance(value, dict) else {}
        if (
            not re.fullmatch("[0-9]{1,9}", key)
            or not isinstance(content, str)
            or not all(isinstance(flag, bool) for flag in flags.values())
        ):
            raise KdgenError(
                f"{where}: added_tokens_decoder: {show(key)} is not a token: it needs an id, and a table with its content and flags"
            )
        flags["special"] |= content in named
        yield tokenizers.AddedToken(content, **flags)
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    more = list(more.values()) if isinstance(more, dict) else more
    texts = [each.get("content") if isinstance(each, dict) else each for each in more] if isinstance(more, list) else []
    for text in (*named, *texts):
        if isinstance(text, str):
            yield tokenizers.AddedToken(text, special=True, normalized=False)


def _first_token(files: TextFiles, token_of: Any) -> tuple[int, ...]:
    """The beginning-of-sequence token, if the configuration puts it before a text."""
    config = files.tokenizer_config()
    text = special_token(config, "bos_token")
    token = token_of(text) if config.get("add_bos_token") is True and text else None
    return () if token is None else (token,)


def special_token(config: Mapping[str, Any], key: str) -> str | None:
    """A special token's text in ``tokenizer_config.json``: a string, or a table with ``content``."""
    found = config.get(key)
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else None


def _ranks(files: TextFiles) -> dict[bytes, int]:
    """The rank, which is the id, of each token's bytes. Raises KdgenError unless ranks are 0, 1, 2, … and every byte is a token."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(files.contents["tiktoken.model"].splitlines(), 1):
        if not line:  # ignored, as in tiktoken
            continue
        token, _, rank = line.partition(b" ")
        try:
            good = int(rank) == len(ranks)
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            good = False
        if not good:
            raise KdgenError(f"{files.where}/tiktoken.model: line {number} is damaged; download it again")
    if not all(bytes([byte]) in ranks for byte in range(256)) or len(set(ranks.values())) < len(ranks):
        raise KdgenError(f"{files.where}/tiktoken.model: is damaged or truncated: some bytes have no token; download it again")
    return ranks


def _cut(text: str) -> Iterator[str]:
    """Parts of a long text, cut as Kimi's own tokenizer cuts it, because matching long words would recurse too deeply."""
    longest_part, longest_run = 400_000, 25_000
    for start in range(0, len(text), longest_part):
        part, begin = text[start : start + longest_part], 0
        for run in re.finditer(rf"\s{{{longest_run + 1},}}|\S{{{longest_run + 1},}}", part):
            for end in range(run.start() + longest_run, run.end(), longest_run):
                yield part[begin:end]
                begin = end
        yield part[begin:]
