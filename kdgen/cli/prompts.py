"""What the user gives to continue: token ids, or text for the model's own tokenizer."""

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
    """Token ids separated by commas or blanks, as they stand or in the file that ``@`` precedes.

    Raises KdgenError for a file that cannot be read, anything that is no id of the vocabulary, or no id at all.
    """
    where = "--prompt-ids"
    if text.startswith("@"):
        where = text[1:]
        if not where:
            raise KdgenError("--prompt-ids: @ stands before a file's name, and there is none")
        try:
            with Path(where).open("rb") as file:  # which may be a pipe: the shell's <(…)
                text = _bounded(file, where).decode("utf-8")
        except OSError as error:
            raise KdgenError(f"{where}: cannot be read: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise KdgenError(f"{where}: is no text file; token ids are written in decimal, separated by commas or blanks") from None
    words = re.split(r"\s*,\s*|\s+", text.strip())
    if not any(words):
        raise KdgenError(f"{where}: the prompt is empty: give at least one token id")
    for place, word in enumerate(words, 1):
        if not word:
            raise KdgenError(f"{where}: id {place} of the prompt is missing: there is nothing before or behind a comma")
        if not re.fullmatch(r"-?[0-9]{1,18}", word):
            raise KdgenError(f"{where}: {show(word)}, id {place} of the prompt, is no integer")
        if not 0 <= int(word) < vocab_size:
            raise KdgenError(f"{where}: {word}, id {place} of the prompt, is outside the vocabulary of {vocab_size}")
    return tuple(int(word) for word in words)


def _bounded(file: BinaryIO, where: str) -> bytes:
    """What ``file`` holds. Raises KdgenError when that is no prompt: a device never ends."""
    content = file.read(MAX_TEXT_BYTES + 1)
    if len(content) > MAX_TEXT_BYTES:
        raise KdgenError(f"{where}: is longer than {MAX_TEXT_BYTES} bytes, so it is no prompt")
    return content


def read_text(option: str | None) -> str:
    """The prompt's text: the option's, or what stands on stdin, less one newline at its end, where the option is ``-`` or left out.

    Raises UsageError where there is neither, and KdgenError when it is empty or no UTF-8.
    """
    where = "--prompt"
    if option is None and (sys.stdin is None or sys.stdin.isatty()):
        raise click.UsageError("no prompt: give --prompt TEXT or --prompt-ids IDS, or pipe text in")
    if option is None or option == "-":
        where = "stdin"
        content = _bounded(sys.stdin.buffer, where)
        content = content.removesuffix(b"\n").removesuffix(b"\r")  # the newline that echo and editors put at an end
    else:
        content = as_given(option)
    text = in_utf8(content, where)
    if not text:
        raise KdgenError(f"{where}: the prompt is empty: give --prompt TEXT or --prompt-ids IDS, or pipe text in")
    return text


def as_given(option: str) -> bytes:
    """An option's bytes, as the shell gave them."""
    return option.encode("utf-8", "surrogateescape")


def in_utf8(content: bytes, where: str) -> str:
    """A prompt's text; raises KdgenError, naming ``where`` it stands, when it is no UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise KdgenError(f"{where}: the prompt is no text in UTF-8: byte {error.start} is {content[error.start]:#04x}") from None


def warn_of_room(context: int, prompt_tokens: int, new_tokens: int) -> None:
    """Say so when ``context`` ends before all new tokens are decoded."""
    if prompt_tokens + new_tokens > context:
        warn(f"a context of {context} holds {context - prompt_tokens} new tokens after this prompt, not {new_tokens}")


def encode_prompt(files: TextFiles, tokenizer: Tokenizer, text: str, chat: bool, system: str | None, vocab_size: int) -> tuple[int, ...]:
    """The tokens of a text, or with ``chat`` of a conversation that begins with it.

    Raises KdgenError when the chat template fails, or the tokenizer is not this model's.
    """
    if chat:
        from kdgen.text.chat import messages_of, render_chat

        tokens = tokenizer.encode(render_chat(files, messages_of(text, system)), begin=False)
    else:
        tokens = tokenizer.encode(text, begin=True)
    if not tokens:
        raise KdgenError(f"{files.where}: the tokenizer makes no tokens of this prompt")
    if (most := max(tokens)) >= vocab_size:
        raise KdgenError(f"{files.where}: the tokenizer gives token {most}, and the model has {vocab_size}: they do not belong together")
    return tokens
