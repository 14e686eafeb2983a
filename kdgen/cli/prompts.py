"""The prompt: token ids, or text for the model's own tokenizer."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import BinaryIO

import click

from kdgen.cli.output import warn
from kdgen.errors import KdgenError
from kdgen.files.inputs import MAX_TEXT_BYTES
from kdgen.spec.fields import show
from kdgen.text.tokenizer import TextFiles, Tokenizer


def read_prompt(text: str, vocab_size: int) -> tuple[int, ...]:
    """Token ids separated by commas or blanks. ``text`` holds the ids, or ``@`` and the name of a file that holds them.

    Raises KdgenError when the file cannot be read, a word is not an id of the vocabulary, or there is no id.
    """
    where = "--prompt-ids"
    if text.startswith("@"):
        where = text[1:]
        if not where:
            raise KdgenError("--prompt-ids: a file's name is missing after @")
        try:
            with Path(where).open("rb") as file:  # may be a pipe, as from the shell's <(…)
                text = _bounded(file, where).decode("utf-8")
        except OSError as error:
            raise KdgenError(f"{where}: cannot be read: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise KdgenError(f"{where}: is not a text file; write token ids in decimal, separated by commas or blanks") from None
    words = re.split(r"\s*,\s*|\s+", text.strip())
    if not any(words):
        raise KdgenError(f"{where}: the prompt is empty: give at least one token id")
    for place, word in enumerate(words, 1):
        if not word:
            raise KdgenError(f"{where}: id {place} of the prompt is missing: a comma has no number before or after it")
        if not re.fullmatch(r"-?[0-9]{1,18}", word):
            raise KdgenError(f"{where}: {show(word)}, id {place} of the prompt, is not an integer")
        if not 0 <= int(word) < vocab_size:
            raise KdgenError(f"{where}: {word}, id {place} of the prompt, is outside the vocabulary of {vocab_size}")
    return tuple(int(word) for word in words)


def _bounded(file: BinaryIO, where: str) -> bytes:
    """The content of ``file``. Raises KdgenError when it is too long for a prompt; a device's content may never end."""
    content = file.read(MAX_TEXT_BYTES + 1)
    if len(content) > MAX_TEXT_BYTES:
        raise KdgenError(f"{where}: is longer than {MAX_TEXT_BYTES} bytes, the limit of a prompt")
    return content


def read_text(option: str | None) -> str:
    """The prompt's text: the option's value; if that is ``-`` or left out, stdin without the newline at its end.

    Raises UsageError when there is no prompt, and KdgenError when it is empty or not UTF-8.
    """
    where = "--prompt"
    if option is None and (sys.stdin is None or sys.stdin.isatty()):
        raise click.UsageError("no prompt: give --prompt TEXT or --prompt-ids IDS, or pipe text in")
    if option is None or option == "-":
        where = "stdin"
        content = _bounded(sys.stdin.buffer, where)
        content = content.removesuffix(b"\n").removesuffix(b"\r")  # echo and editors end a text with a newline
    else:
        content = as_given(option)
    text = in_utf8(content, where)
    if not text:
        raise KdgenError(f"{where}: the prompt is empty: give --prompt TEXT or --prompt-ids IDS, or pipe text in")
    return text


def as_given(option: str) -> bytes:
    """An option's bytes, as the shell passed them."""
    return option.encode("utf-8", "surrogateescape")


def in_utf8(content: bytes, where: str) -> str:
    """A prompt's text. Raises KdgenError, which names ``where`` the prompt was read, when it is not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise KdgenError(f"{where}: the prompt is not UTF-8 text: byte {error.start} is {content[error.start]:#04x}") from None


def warn_of_room(context: int, prompt_tokens: int, new_tokens: int) -> None:
    """Warn when ``context`` is too small for the prompt and all new tokens."""
    if prompt_tokens + new_tokens > context:
        warn(f"a context of {context} tokens has room for {context - prompt_tokens} new tokens after this prompt, not {new_tokens}")


def encode_prompt(files: TextFiles, tokenizer: Tokenizer, text: str, chat: bool, system: str | None, vocab_size: int) -> tuple[int, ...]:
    """The tokens of a text; with ``chat``, the tokens of a conversation whose first message it is.

    Raises KdgenError when the chat template fails, or the tokenizer does not belong to this model.
    """
    if chat:
        from kdgen.text.chat import messages_of, render_chat

        tokens = tokenizer.encode(render_chat(files, messages_of(text, system)), begin=False)
    else:
        tokens = tokenizer.encode(text, begin=True)
    if not tokens:
        raise KdgenError(f"{files.where}: the tokenizer gives no tokens for this prompt")
    if (most := max(tokens)) >= vocab_size:
        raise KdgenError(
            f"{files.where}: the tokenizer gives token {most}, but the model's vocabulary has {vocab_size} tokens: they do not match"
        )
    return tokens
