"""Errors a user can act on. Everything else is a bug and keeps its traceback.

A ``KdgenError`` is printed as its message alone and ends the process with exit code 2; ``--debug`` adds the traceback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class KdgenError(Exception):
    """Bad input or a missing piece of the environment. The message says what is wrong and what to do."""


@dataclass(frozen=True)
class Finding:
    """One thing wrong with a file: where, what stands there, why it cannot be, in that order."""

    file: str
    key: str
    value: str
    reason: str

    def __str__(self) -> str:
        shown = f" = {self.value}" if self.value else ""
        return f"{self.file}: {self.key}{shown}: {self.reason}"


class SpecError(KdgenError):
    """A spec or config was refused. ``findings`` holds everything that is wrong with it, not just the first."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n".join(map(str, self.findings)))


class CompileError(KdgenError):
    """A kernel did not compile; the message carries the kernel's name, the template and the compiler's log."""


class RanksError(KdgenError):
    """So many ranks cannot share this model. Every rank finds that by itself, alike, so of several the first one says it."""


class BackendError(KdgenError):
    """A backend cannot run here (no GPU, no C++ compiler, out of memory) or a launch failed."""


class LogitsError(KdgenError):
    """Logits hold a NaN or an infinity, so that no token can be chosen by them. ``sequence`` is the engine's, ``position`` the token's."""

    def __init__(self, model: str, sequence: int, position: int) -> None:
        self.sequence, self.position = sequence, position
        super().__init__(
            f"{model}: the logits for token {position} (the prompt begins with token 0) hold a NaN or an infinity, so that no token can be"
            " chosen: the weights are damaged, or belong to another config"
        )


class WeightError(KdgenError):
    """A checkpoint or container is damaged, incomplete or contradicts its config."""
