"""The demo's text: the Python standard library's own source, as it lies on the machine that trains, in bytes.

It may be redistributed under the PSF License Agreement, with the interpreter's LICENSE.txt. Tests are left out. One file in twenty is
held out by a hash of its path: nothing is trained on those, and prompts come from them alone.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kdgen.demo.prompts import Prompt

END, MASK = 256, 257  #: tokens beyond the bytes: between files, and the drafter's mask
HELD_OUT = 1 / 20
_LEFT_OUT = frozenset({"site-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class File:
    """A source file: its path below the library, and its bytes."""

    path: str
    text: bytes

    @property
    def held_out(self) -> bool:
        return int.from_bytes(hashlib.sha256(self.path.encode()).digest()[:4], "big") < HELD_OUT * 2**32


def library() -> Path:
    """The standard library of the interpreter that runs this."""
    return Path(sysconfig.get_paths()["stdlib"])


def files(root: Path | None = None) -> Iterator[File]:
    """Every source file below ``root``, by path; those that are no UTF-8 text are passed over."""
    root = root or library()
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if _LEFT_OUT.intersection(inside.parts):
            continue
        text = path.read_bytes()
        try:
            text.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield File(inside.as_posix(), text.replace(b"\r\n", b"\n"))


def stream(chosen: list[File]) -> NDArray[np.uint16]:
    """The files one after another, each behind an END."""
    parts = [np.concatenate([np.array([END], np.uint16), np.frombuffer(file.text, np.uint8).astype(np.uint16)]) for file in chosen]
    return np.concatenate(parts)


def windows(tokens: NDArray[np.uint16], count: int, length: int, seed: int, step: int) -> NDArray[np.int64]:
    """``count`` stretches of ``length`` tokens [count, length]: a function of seed and step alone, so that training can go on anywhere."""
    generator = np.random.Generator(np.random.Philox(key=seed, counter=step << 64))
    begins = generator.integers(0, len(tokens) - length, count)
    chosen: NDArray[np.int64] = tokens[begins[:, None] + np.arange(length)].astype(np.int64)
    return chosen


def prompts(chosen: list[File], count: int, length: int, seed: int) -> list[Prompt]:
    """``count`` prompts of ``length`` bytes of held-out files, each from the start of a line, no file much more often than others."""
    generator = np.random.Generator(np.random.Philox(key=seed))
    long_enough = [file for file in chosen if len(file.text) > 2 * length]
    found: list[Prompt] = []
    while len(found) < count:
        for place in generator.permutation(len(long_enough)):
            text = long_enough[place].text
            begin = text.rfind(b"\n", 0, int(generator.integers(0, len(text) - length))) + 1
            found.append(Prompt(long_enough[place].path, text.count(b"\n", 0, begin) + 1, tuple(text[begin : begin + length])))
            if len(found) == count:
                break
    return found


@dataclass(frozen=True)
class Text:
    """The corpus, split: training text as one stream of tokens, and the files that are held out."""

    train: NDArray[np.uint16]
    held_out: list[File]

    @classmethod
    def load(cls, root: Path | None = None) -> Text:
        """Read and split the library. Raises ValueError when there is next to nothing below ``root``."""
        found = list(files(root))
        held_out = [file for file in found if file.held_out]
        if not held_out or len(found) < 20:
            raise ValueError(f"{root or library()} holds {len(found)} source files, which is no corpus")
        return cls(stream([file for file in found if not file.held_out]), held_out)

    def windows(self, count: int, length: int, seed: int, step: int) -> NDArray[np.int64]:
        """Stretches of the training text, as ``windows`` has them."""
        return windows(self.train, count, length, seed, step)
