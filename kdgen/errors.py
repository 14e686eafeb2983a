"""Errors a user can act on. Everything else is a bug and keeps its traceback.

A ``KdgenError`` is printed as its message alone and ends the process with exit code 2; ``--debug`` adds the traceback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class KdgenError(Exception):
    """Bad input, or something that the environment lacks. The message says what is wrong and what to do."""


@dataclass(frozen=True)
class Finding:
    """One problem in a file: its place, the value there, and why that value is refused, in this order."""

    file: str
    key: str
    value: str
    reason: str

    def __str__(self) -> str:
        shown = f" = {self.value}" if self.value else ""
        return f"{self.file}: {self.key}{shown}: {self.reason}"


class SpecError(KdgenError):
    """A spec or config was refused. ``findings`` holds all its problems, not just the first."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n".join(map(str, self.findings)))


class CompileError(KdgenError):
    """A kernel did not compile; the message gives the kernel's name, the template and the compiler's log."""


class RanksError(KdgenError):
    """This number of ranks cannot share this model. Every rank finds that by itself, so only rank 0 reports it."""


class BackendError(KdgenError):
    """A backend cannot run here (no GPU, no C++ compiler, out of memory) or a launch failed."""


class PagesError(KdgenError):
    """The pool has too few pages of the cache for what a step would write."""


class LogitsError(KdgenError):
    """Logits hold a NaN or an infinity, so that no token can be chosen. ``sequence`` is the engine's number, ``position`` the token's."""

    def __init__(self, model: str, sequence: int, position: int) -> None:
        self.sequence, self.position = sequence, position
        super().__init__(
            f"{model}: the logits for token {position} (the prompt begins with token 0) hold a NaN or an infinity, so that no token can be"
            " chosen: the weights are damaged, or belong to another config"
        )


class WeightError(KdgenError):
    """A checkpoint or container is damaged, incomplete or contradicts its config."""
