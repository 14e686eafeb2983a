"""Chat: from messages to the text of a prompt, by a published model's Jinja template.

A template is an untrusted program. It runs in Jinja's sandbox, without access to files or Python's internals, and in a separate process
with limits of time, memory and output (``chat_worker.py``). Any failure of it becomes one error message.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from kdgen.errors import KdgenError
from kdgen.files.resources import import_path
from kdgen.text.chat_worker import MEMORY_BYTES, MOST_CHARACTERS
from kdgen.text.tokenizer import TextFiles, special_token

Message = Mapping[str, str]  #: with role (system, user, assistant) and content

#: After this time a rendering is ended, even if it used little CPU time.
_WALL_SECONDS = 60.0
#: The longest line of an answer: each character may take 12, as an escaped pair of surrogates.
_MOST_ANSWER = 12 * MOST_CHARACTERS + 2**16


class TemplateError(KdgenError):
    """A template is wrong, refuses its messages, or exceeds its limits. The error does not name the template's file."""


class ChatRenderer:
    """Renders chat templates in another process, which the first rendering starts. If a template ends the process, the next one starts it
    again.

    A rendering may take ``cpu_seconds``; published templates take milliseconds. Several threads may use it; one rendering runs at a
    time. ``close``, or the end of a ``with`` block, ends the process.
    """

    def __init__(self, cpu_seconds: float = 5.0) -> None:
        self._cpu_seconds = cpu_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text of ``template`` with ``variables``, whose values must be JSON. Raises TemplateError."""
        request = json.dumps({"template": template, "variables": dict(variables)}).encode() + b"\n"
        with self._lock:
            process, self._process = self._process, None
            if process is not None and process.poll() is not None:
                _end(process)
                process = None
            process = process or self._start()
            late = threading.Event()
            timer = threading.Timer(_WALL_SECONDS, _give_up, (process, late))
            timer.start()
            answer: Mapping[str, Any] | None = None
            try:
                assert process.stdin is not None and process.stdout is not None
                with contextlib.suppress(BrokenPipeError):  # the process has ended, with an exit code
                    process.stdin.write(request)
                    process.stdin.flush()
                line = process.stdout.readline(_MOST_ANSWER)
                answer = json.loads(line) if line.endswith(b"\n") else None
            finally:
                timer.cancel()
                if answer is not None and answer.get("problem") != "memory":
                    self._process = process
                else:
                    _end(process)
        if answer is None:
            raise TemplateError(self._why_it_ended(process.returncode, late.is_set()))
        return _text(answer)

    def close(self) -> None:
        """End the process. Another rendering would start a new one."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                _end(process)

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": import_path()}
        command = [sys.executable, "-P", "-c", "from kdgen.text.chat_worker import main; main()", str(self._cpu_seconds)]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        try:
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, cwd=os.sep, env=environment)
        except OSError as error:
            raise KdgenError(f"the process for chat templates does not start: {error}") from None

    def _why_it_ended(self, code: int, late: bool) -> str:
        if late:
            return f"the chat template did not finish within {_WALL_SECONDS:.0f} s"
        if code == -getattr(signal, "SIGPROF", 0):
            return f"the chat template uses more than {self._cpu_seconds:.0f} s of CPU time"
        return f"the chat template ended the process in which it ran (exit code {code})"

    def __enter__(self) -> ChatRenderer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _give_up(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    process.kill()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process, close its pipes, and wait for its end."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()


def _text(answer: Mapping[str, Any]) -> str:
    match answer.get("problem"):
        case None:
            return str(answer["text"])
        case "syntax":
            raise TemplateError(f"line {answer['line']} of the chat template: {answer['message']}")
        case "memory":
            raise TemplateError(f"the chat template needs more than {MEMORY_BYTES // 2**20} MiB of memory")
        case "length":
            raise TemplateError(f"the chat template gives a text of more than {MOST_CHARACTERS} characters")
        case _:
            raise TemplateError(f"the chat template refuses these messages: {answer['message']}")


def messages_of(prompt: str, system: str | None) -> list[Message]:
    """The messages of a new conversation."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": prompt}]


def render_chat(files: TextFiles, messages: Sequence[Message], renderer: ChatRenderer | None = None) -> str:
    """The prompt after which the assistant answers, with special tokens spelled out. Uses ``renderer``, or one for this call only.

    Raises KdgenError when the model has no template, or when the template fails, does what the sandbox forbids, refuses the messages, or
    exceeds its limits of time, memory or length.
    """
    where, template = _template(files)
    config = files.tokenizer_config()
    tokens = {key: text for key in config if key.endswith("_token") and (text := special_token(config, key)) is not None}
    variables = {**tokens, "messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
    try:
        if renderer is not None:
            return renderer.render(template, variables)
        with ChatRenderer() as own:
            return own.render(template, variables)
    except TemplateError as error:
        raise KdgenError(f"{where}: {error}") from None


def _template(files: TextFiles) -> tuple[str, str]:
    """The file that holds the template, and its text."""
    if "chat_template.jinja" in files.contents:
        return f"{files.where}/chat_template.jinja", files.text("chat_template.jinja")
    where = f"{files.where}/tokenizer_config.json"
    found = files.table("tokenizer_config.json").get("chat_template")
    if isinstance(found, dict):  # several templates by name
        found = found.get("default")
    elif isinstance(found, list):  # several templates, in older files
        found = next((each.get("template") for each in found if isinstance(each, dict) and each.get("name") == "default"), None)
    if not isinstance(found, str):
        raise KdgenError(f"{files.where}: has no chat template in chat_template.jinja or tokenizer_config.json: leave out --chat")
    return where, found
