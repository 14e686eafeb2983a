"""Other implementations' answers: where the cases lie, and what is in them.

A model case is a folder with a published checkpoint (``config.json``, safetensors) and ``expected.npz`` from Hugging Face
transformers in float32; tree cases are ``tree/trees_*.npz`` from the DDTree reference.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.errors import KdgenError
from kdgen.files.resources import checkout_folder

#: A folder of cases to use instead of the source checkout's.
VARIABLE = "KDGEN_ORACLE_DIR"


@dataclass(frozen=True)
class ModelCase:
    """A checkpoint folder and what it should give: ``logits`` [P + G − 1, V] over prompt [P] + greedy[:−1]; row P − 1 chose greedy[0]."""

    name: str
    folder: Path
    prompt: NDArray[np.int64]
    greedy: NDArray[np.int64]
    logits: NDArray[np.float32]

    @property
    def tokens(self) -> NDArray[np.int64]:
        """The teacher-forced input that ``logits`` has a row for each of."""
        return np.concatenate([self.prompt, self.greedy[:-1]])


@dataclass(frozen=True)
class TreeCase:
    """Draft logits [h, V] and a budget, the tree they make, and w walks over it.

    ``tokens`` and ``depths`` [n] leave the root out; ``parents`` [n + 1] and ``visibility`` [n + 1, n + 1] have it first.
    ``posterior`` [w, n + 1] is the target's token after each node; ``accepted`` holds each walk's nodes, root first.
    """

    name: str
    logits: NDArray[np.float32]
    budget: int
    tokens: NDArray[np.int64]
    depths: NDArray[np.int64]
    parents: NDArray[np.int32]
    visibility: NDArray[np.bool_]
    posterior: NDArray[np.int64]
    accepted: tuple[tuple[int, ...], ...]
    next_token: NDArray[np.int64]


def oracle_dir() -> Path | None:
    """$KDGEN_ORACLE_DIR, else the source checkout's copy, else None. Raises KdgenError when the variable names no folder."""
    if chosen := os.environ.get(VARIABLE):
        if not Path(chosen).is_dir():
            raise KdgenError(f"{VARIABLE}={chosen} is not a folder: set it to a folder of oracle cases, or unset it")
        return Path(chosen)
    return checkout_folder("tests/oracle/data")


def model_cases() -> list[ModelCase]:
    """Every model case found, by name; none when there is no oracle folder."""
    root = oracle_dir()
    return [*_models(root)] if root else []


def _models(root: Path) -> Iterator[ModelCase]:
    for folder in sorted(path for path in root.iterdir() if (path / "config.json").is_file() and (path / "expected.npz").is_file()):
        with np.load(folder / "expected.npz") as expected:
            if {"prompt", "greedy", "logits"} <= set(expected.files):
                yield ModelCase(folder.name, folder, expected["prompt"], expected["greedy"], expected["logits"])


def tree_cases() -> list[TreeCase]:
    """Every tree case found, by name; none when there is no oracle folder."""
    root = oracle_dir()
    return [case for file in sorted((root / "tree").glob("trees_*.npz")) for case in _trees(file)] if root else []


def _trees(file: Path) -> Iterator[TreeCase]:
    with np.load(file) as arrays:
        for name in map(str, arrays["cases"]):

            def array(key: str, case: str = name) -> NDArray[Any]:
                return np.asarray(arrays[f"{case}.{key}"])

            yield TreeCase(
                name=name,
                logits=array("logits"),
                budget=int(array("budget")),
                tokens=array("node_token_ids"),
                depths=array("node_depths"),
                parents=array("parents"),
                visibility=array("visibility"),
                posterior=array("posterior"),
                accepted=tuple(
                    tuple(int(node) for node in nodes[:length])
                    for nodes, length in zip(array("accepted"), array("accepted_len"), strict=True)
                ),
                next_token=array("next_token"),
            )
