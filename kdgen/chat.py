"""Chat: messages to the text of a prompt, by the Jinja template that a model is published with.

A template is somebody else's program. It runs in Jinja's sandbox, where it reaches neither files nor Python's internals, and can change
nothing that it is given.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from kdgen.errors import KdgenError
from kdgen.tokenizer import TextFiles, special_token

Message = Mapping[str, str]  #: with role (system, user, assistant) and content


def messages_of(prompt: str, system: str | None) -> list[Message]:
    """A conversation that begins."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": prompt}]


def render_chat(files: TextFiles, messages: Sequence[Message]) -> str:
    """The prompt that lets the assistant speak next, special tokens written out.

    Raises KdgenError when the model has no template, or it fails, reaches for what the sandbox forbids, or refuses the messages.
    """
    where, template = _template(files)
    config = files.table("tokenizer_config.json")
    tokens = {key: text for key in config if key.endswith("_token") and (text := special_token(config, key)) is not None}
    try:
        compiled = _environment().from_string(template)
        text = compiled.render(messages=messages, tools=None, documents=None, add_generation_prompt=True, **tokens)
        text.encode()  # half a character, as an escape may name one, is no text
        return text
    except jinja2.TemplateSyntaxError as error:
        raise KdgenError(f"{where}: line {error.lineno} of the chat template: {error.message}") from None
    except (
        jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError,
        SyntaxError,  # of what Jinja makes of a break outside a loop
    ) as error:  # fmt: skip
        raise KdgenError(f"{where}: the chat template refuses these messages: {error}") from None


def _template(files: TextFiles) -> tuple[str, str]:
    """Where the template is, and its text."""
    if "chat_template.jinja" in files.contents:
        return f"{files.where}/chat_template.jinja", files.text("chat_template.jinja")
    where = f"{files.where}/tokenizer_config.json"
    found = files.table("tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several, by name
        found = next((each.get("template") for each in found if isinstance(each, dict) and each.get("name") == "default"), None)
    if not isinstance(found, str):
        raise KdgenError(f"{files.where}: has no chat template, in chat_template.jinja or tokenizer_config.json: leave out --chat")
    return where, found


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant said, for training; here it is but its content."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja has it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What templates are written for: transformers' settings, filter and functions."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Jinja's own escapes HTML, which is no business of a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
