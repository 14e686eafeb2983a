"""The demo's training text: Python source that is installed on the machine that trains, in bytes.

It is the standard library (PSF License Agreement) and those of ``PACKAGES`` that are installed (BSD license). All may be redistributed.
Tests and tables of characters are left out. One file in twenty, chosen by a hash of its path, is held out from training. Prompts are taken
from held-out files of the standard library.
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

END, MASK = 256, 257  #: the tokens after the 256 bytes: the end of a file, and the drafter's mask
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
    """The folder of this interpreter's standard library."""
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
    """All source files below ``root``, in the order of paths, except those that are not UTF-8."""
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
    """The files' tokens, with an END before each file."""
    parts = [np.concatenate([np.array([END], np.uint16), np.frombuffer(file.text, np.uint8).astype(np.uint16)]) for file in chosen]
    return np.concatenate(parts)


def windows(tokens: NDArray[np.uint16], count: int, length: int, seed: int, step: int) -> NDArray[np.int64]:
    """``count`` random stretches of tokens [count, length]. They depend only on seed and step, so that training can be continued."""
    generator = np.random.Generator(np.random.Philox(key=seed, counter=step << 64))
    begins = generator.integers(0, len(tokens) - length, count)
    chosen: NDArray[np.int64] = tokens[begins[:, None] + np.arange(length)].astype(np.int64)
    return chosen


def prompts(chosen: list[File], count: int, length: int, seed: int) -> list[Prompt]:
    """``count`` prompts of ``length`` bytes from held-out files, each from the start of a line, spread evenly over the files."""
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
    """The corpus: training text as one stream of tokens, all held-out files, and the held-out files of the standard library."""

    sources: tuple[str, ...]  #: its sources, with versions
    train: NDArray[np.uint16]
    held_out: list[File]
    library: list[File]

    @classmethod
    def load(cls, root: Path | None = None) -> Text:
        """Read and split the library and the packages, or the files below ``root``. Raises ValueError when there are too few files."""
        found, sources = list(files(root)), [f"standard library of Python {platform.python_version()}, PSF License Agreement"]
        own = [file for file in found if file.held_out]
        if not own or len(found) < 20:
            raise ValueError(f"{root or library()} holds {len(found)} source files, too few for a corpus")
        for name, (version, folder) in {} if root else packages().items():
            found += [File(f"{name}/{file.path}", file.text) for file in files(folder)]
            sources.append(f"{name} {version}, BSD-3-Clause")
        kept = [file for file in found if not file.held_out]
        return cls(tuple(sources), stream(kept), [file for file in found if file.held_out], own)

    def windows(self, count: int, length: int, seed: int, step: int) -> NDArray[np.int64]:
        """Random stretches of the training text, as by the function ``windows``."""
        return windows(self.train, count, length, seed, step)
