"""The demo's text: Python source as it lies on the machine that trains, in bytes.

It is the standard library (PSF License Agreement) and those of ``PACKAGES`` that are installed (each under the BSD license), all of
which may be redistributed. Tests are left out, and tables of characters. One file in twenty is held out by a hash of its path: nothing is
trained on those, and prompts come from those of the standard library alone.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kdgen.demo.prompts import Prompt

END, MASK = 256, 257  #: tokens beyond the bytes: between files, and the drafter's mask
HELD_OUT = 1 / 20
PACKAGES = ("torch", "sympy", "numpy", "networkx")  #: BSD-3-Clause, each of them
_LEFT_OUT = frozenset({"site-packages", "test", "tests", "testing", "idle_test", "encodings", "__pycache__"})


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


def packages() -> dict[str, tuple[str, Path]]:
    """Version and folder of each of ``PACKAGES`` that is installed."""
    found = {}
    for name in PACKAGES:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found[name] = distribution.version, Path(str(distribution.locate_file(name)))
    return found


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
    """The corpus, split: training text as one stream of tokens, the held-out files of all of it, and those of the standard library."""

    sources: tuple[str, ...]  #: what it is made of, with versions
    train: NDArray[np.uint16]
    held_out: list[File]
    library: list[File]

    @classmethod
    def load(cls, root: Path | None = None) -> Text:
        """Read and split the library and the packages, or what lies below ``root``. Raises ValueError when that is next to nothing."""
        found, sources = list(files(root)), [f"standard library of Python {platform.python_version()}, PSF License Agreement"]
        own = [file for file in found if file.held_out]
        if not own or len(found) < 20:
            raise ValueError(f"{root or library()} holds {len(found)} source files, which is no corpus")
        for name, (version, folder) in {} if root else packages().items():
            found += [File(f"{name}/{file.path}", file.text) for file in files(folder)]
            sources.append(f"{name} {version}, BSD-3-Clause")
        kept = [file for file in found if not file.held_out]
        return cls(tuple(sources), stream(kept), [file for file in found if file.held_out], own)

    def windows(self, count: int, length: int, seed: int, step: int) -> NDArray[np.int64]:
        """Stretches of the training text, as ``windows`` has them."""
        return windows(self.train, count, length, seed, step)
