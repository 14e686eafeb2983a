"""Decoded tokens as they come, as text or as ids."""

from __future__ import annotations

import sys
import time
import unicodedata
from collections.abc import Callable, Collection

from kdgen.cli.process_age import process_seconds
from kdgen.runtime.decode import Decoded
from kdgen.text.tokenizer import TextStream, Tokenizer


class Live:
    """Takes the tokens of each step (``kdgen.runtime.decode.Emit``), and passes each step's on to ``write`` at once.

    With a tokenizer they are text, without ``stops``; else ids. It remembers what it was given, so that a run that is interrupted
    has something to report. ``before`` is called before the first is written.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stops: Collection[int], write: Callable[[str], None], before: Callable[[], None] = lambda: None
    ) -> None:
        self._stream = TextStream(tokenizer) if tokenizer else None
        self._stops, self._write, self._before = stops, write, before
        self._parts: list[str] = []
        self.steps: list[tuple[int, ...]] = []
        self._times: list[float] = []
        self.first_token: float | None = None  #: seconds from the process's start; None until it came, or where the system does not tell
        self._began = time.perf_counter()

    def begin(self) -> None:
        """The run begins now."""
        self._began = time.perf_counter()

    def __call__(self, tokens: tuple[int, ...]) -> None:
        first = not self.steps
        self.steps.append(tokens)
        self._times.append(time.perf_counter())
        if first:
            self._before()
        if self._stream:
            self._show(self._stream.feed(token for token in tokens if token not in self._stops))
        else:
            self._show(("" if first else " ") + " ".join(map(str, tokens)))
        if first:
            self.first_token = process_seconds()

    def finish(self) -> None:
        """Write what is left, and end the line."""
        if self._stream:
            self._show(self._stream.finish())
        if not self.text.endswith("\n"):
            self._write("\n")

    @property
    def text(self) -> str:
        """All that was written."""
        return "".join(self._parts)

    def decoded(self, drafted: bool) -> Decoded:
        """What was decoded until now, ``drafted`` with trees or not."""
        tokens = tuple(token for step in self.steps for token in step)
        lengths = tuple(len(step) for step in self.steps[1:]) if drafted else ()
        return Decoded(tokens, lengths, len(self.steps) - 1, self._times[0] - self._began, self._times[-1] - self._times[0])

    def _show(self, text: str) -> None:
        self._parts.append(text)
        self._write(text)


def to_stdout(text: str) -> None:
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def to_nowhere(text: str) -> None:
    """For reports that hold all of it."""


def harmless(text: str) -> str:
    """``text`` without the control characters that a terminal would obey: a model may say anything."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else c.encode("unicode_escape").decode() for c in text)
