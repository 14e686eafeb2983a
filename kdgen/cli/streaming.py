"""Decoded tokens, written as text or ids after each step."""

from __future__ import annotations

import sys
import time
import unicodedata
from collections.abc import Callable, Collection

from kdgen.cli.process_age import process_seconds
from kdgen.runtime.decode import Decoded
from kdgen.text.tokenizer import TextStream, Tokenizer


class Live:
    """A ``kdgen.runtime.decode.Emit``: call it with a step's tokens, and it writes them with ``write`` at once.

    With a tokenizer it writes text, leaving out the tokens in ``stops``; without one it writes ids. It keeps all tokens, so that an
    interrupted run can report them. It calls ``before`` before it writes for the first time.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stops: Collection[int], write: Callable[[str], None], before: Callable[[], None] = lambda: None
    ) -> None:
        self._stream = TextStream(tokenizer) if tokenizer else None
        self._stops, self._write, self._before = stops, write, before
        self._parts: list[str] = []
        self.steps: list[tuple[int, ...]] = []
        self._times: list[float] = []
        self.first_token: float | None = None  #: seconds after the process started; None if there is no token yet, or if unknown
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Measure times from now on."""
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
        """Write the rest, and end the line."""
        if self._stream:
            self._show(self._stream.finish())
        if not self.text.endswith("\n"):
            self._write("\n")

    @property
    def text(self) -> str:
        """All text written so far."""
        return "".join(self._parts)

    def decoded(self, drafted: bool) -> Decoded:
        """The result so far; ``drafted`` says whether steps verified draft trees."""
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
    """Write nothing, where a report will hold the whole text."""


def harmless(text: str) -> str:
    """``text`` with control characters as escapes: a model may write any, and a terminal would obey them."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else c.encode("unicode_escape").decode() for c in text)
