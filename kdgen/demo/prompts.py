"""Held-out prompts, in a file written by ``kdgen.demo.train``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from kdgen.errors import KdgenError
from kdgen.files.inputs import read_input


@dataclass(frozen=True)
class Prompt:
    """A held-out text: its file, its first line, and its bytes, which are its tokens."""

    path: str
    line: int
    tokens: tuple[int, ...]

    @property
    def text(self) -> str:
        """The text, without an incomplete character at its end."""
        return bytes(self.tokens).decode("utf-8", "ignore")


def read_prompts(file: Path) -> list[Prompt]:
    """The prompts in ``file``. Raises KdgenError when it cannot be read, or is not a file of ``write_prompts``."""
    try:
        found = json.loads(read_input(file))["prompts"]
        return [Prompt(str(each["path"]), int(each["line"]), tuple(map(int, each["tokens"]))) for each in found]
    except OSError as error:
        raise KdgenError(f"{file}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise KdgenError(f"{file}: is not a file of prompts written by kdgen.demo.train") from None


def write_prompts(file: Path, corpus: str, prompts: list[Prompt]) -> None:
    """Write JSON with a line for each prompt. ``corpus`` names the source of the prompts."""
    lines = ",\n".join(json.dumps(asdict(prompt)) for prompt in prompts)
    file.write_text(f'{{"corpus": {json.dumps(corpus)}, "prompts": [\n{lines}\n]}}\n', encoding="utf-8")
