"""Held-out prompts, in the file that ``kdgen.demo.train`` writes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from kdgen.errors import KdgenError
from kdgen.files.inputs import read_input


@dataclass(frozen=True)
class Prompt:
    """Where held-out text stands, and its bytes, which are its tokens."""

    path: str
    line: int
    tokens: tuple[int, ...]

    @property
    def text(self) -> str:
        """A character that is cut in two at the end is left out."""
        return bytes(self.tokens).decode("utf-8", "ignore")


def read_prompts(file: Path) -> list[Prompt]:
    """Raises KdgenError when the file cannot be read, or is none that ``write_prompts`` wrote."""
    try:
        found = json.loads(read_input(file))["prompts"]
        return [Prompt(str(each["path"]), int(each["line"]), tuple(map(int, each["tokens"]))) for each in found]
    except OSError as error:
        raise KdgenError(f"{file}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise KdgenError(f"{file}: is no file of prompts, as kdgen.demo.train writes them") from None


def write_prompts(file: Path, corpus: str, prompts: list[Prompt]) -> None:
    """JSON, a line a prompt. ``corpus`` says what they were taken from."""
    lines = ",\n".join(json.dumps(asdict(prompt)) for prompt in prompts)
    file.write_text(f'{{"corpus": {json.dumps(corpus)}, "prompts": [\n{lines}\n]}}\n', encoding="utf-8")
