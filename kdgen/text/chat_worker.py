"""The process in which chat templates are rendered: ``chat.ChatRenderer`` runs ``main`` by ``python -c``.

A template is an untrusted program. Jinja's sandbox denies it files and Python's internals. The limits of this process bound its time and
memory, because the sandbox does not know the cost of ``10 ** (10 ** 8)``. The module imports only Jinja and the standard library. Requests
and answers are lines of JSON: {"template", "variables"}; {"text"}, or {"problem", "message", "line"}.
"""

from __future__ import annotations

import datetime
import functools
import json
import signal
import sys
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MEMORY_BYTES = 2**29  #: of the process's address space
MOST_CHARACTERS = 2**24  #: of a rendered text; no context holds more
_MOST_SHOWN = 300  #: characters of a template's error message


def main() -> None:
    """Answer requests on stdin until it is closed. SIGPROF ends the process if a rendering takes more CPU seconds than the argument."""
    seconds = float(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent closes stdin when it is interrupted
    _limit()
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    for line in iter(requests.readline, b""):
        _timer(seconds)
        answer = _answer(line)
        _timer(0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
        if answer.get("problem") == "memory":
            return  # the template's memory may not be freed


def _limit() -> None:
    if sys.platform == "win32":
        return  # has no such limits; the parent's timer remains
    import resource

    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for kind, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _timer(seconds: float) -> None:
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _answer(line: bytes) -> dict[str, object]:
    request = json.loads(line)
    try:
        parts, count = [], 0
        for part in _compiled(request["template"]).generate(request["variables"]):
            count += len(part)
            if count > MOST_CHARACTERS:
                return {"problem": "length", "message": "", "line": None}
            parts.append(part)
        text = "".join(parts)
        text.encode()  # raises for a lone surrogate, which an escape may give
        return {"text": text}
    except jinja2.TemplateSyntaxError as error:
        return _problem("syntax", error, error.lineno)
    except MemoryError:
        return {"problem": "memory", "message": "", "line": None}
    except Exception as error:  # a template may raise anything
        return _problem("failed", error, None)


def _problem(problem: str, error: Exception, line: int | None) -> dict[str, object]:
    said = error.message if isinstance(error, jinja2.TemplateError) else str(error)
    text = str(said or type(error).__name__)
    return {"problem": problem, "message": text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…", "line": line}


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; here it gives only its content."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment for which templates are written: transformers' settings, filter and functions."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
