"""The drafters' oracle cases: what the DFlash reference drafts, and what the DDTree reference generates with it.

``dflash/<case>/`` holds a published drafter, its target's embedding and head, features, and what three rounds draft from them;
``ddtree_e2e/<case>/`` a drafter and whole generations with one of the model cases as target. See ``kdgen.verify.oracles.models``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kdgen.spec.drafter import DraftSpec
from kdgen.spec.published_drafter import load_draft_config
from kdgen.verify.oracles.models import oracle_dir
from kdgen.weights.checkpoint import Checkpoint

Array = NDArray[Any]
#: How the keys of a case with sliding layers end, by what the mask of those is.
_SUFFIXES: Mapping[str, Literal["causal", "symmetric", "none"]] = {"_causal": "causal", "_sym": "symmetric", "_nowindow": "none"}


@dataclass(frozen=True)
class DraftRound:
    """A block [B] behind ``start`` committed tokens: hidden [B, H] after the final norm, logits [B − 1, V] of all but the root's row."""

    start: int
    block: tuple[int, ...]
    hidden: NDArray[np.float32]
    logits: NDArray[np.float32]


@dataclass(frozen=True)
class DraftCase:
    """Features [T, feature_width] of tokens that are committed round by round, and what is drafted behind them.

    ``keys`` and ``values`` [layers, key heads, T, head_dim] are the draft cache in the end.
    """

    name: str
    folder: Path
    draft: DraftSpec
    features: NDArray[np.float32]
    rounds: tuple[DraftRound, ...]
    keys: NDArray[np.float32]
    values: NDArray[np.float32]

    def weights(self) -> dict[str, Array]:
        """The drafter's tensors, and the target's embedding and head under their published names."""
        return dict(Checkpoint(self.folder / "model.safetensors")) | dict(Checkpoint(self.folder / "target_head.safetensors"))


def draft_cases() -> list[DraftCase]:
    """Every case found, by name; one with sliding layers once for each mask. None when there is no oracle folder."""
    root = oracle_dir()
    folders = sorted(path for path in (root / "dflash").iterdir() if path.is_dir()) if root and (root / "dflash").is_dir() else []
    return [case for folder in folders for case in _drafts(folder)]


def _drafts(folder: Path) -> Iterator[DraftCase]:
    draft = load_draft_config(folder)
    with np.load(folder / "expected.npz") as expected:
        arrays = {key: np.asarray(expected[key]) for key in expected.files}
    if "cache_k" in arrays:
        yield _draft_case(folder.name, folder, draft, arrays, "")
        return
    for suffix, mask in _SUFFIXES.items():
        yield _draft_case(f"{folder.name}{suffix}", folder, draft.model_copy(update={"sliding_mask": mask}), arrays, suffix)


def _draft_case(name: str, folder: Path, draft: DraftSpec, arrays: Mapping[str, Array], suffix: str) -> DraftCase:
    rounds = tuple(
        DraftRound(
            int(arrays[f"r{r}.start"]),
            tuple(arrays[f"r{r}.block_ids"].tolist()),
            arrays[f"r{r}.hidden{suffix}"],
            arrays[f"r{r}.logits{suffix}"],
        )
        for r in range(3)
    )
    return DraftCase(name, folder, draft, arrays["target_hidden"], rounds, arrays[f"cache_k{suffix}"], arrays[f"cache_v{suffix}"])


# ---- whole generations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TreeRound:
    """One round of a generation. Trees have their root first in ``parents``, not in ``tokens`` and ``depths``.

    ``whole`` is false where the reference's block is cut short at its output's end. ``gap`` is the smallest difference of path
    log-probabilities that decides the tree; infinite where none does.
    """

    start: int
    whole: bool
    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: int
    gap: float


@dataclass(frozen=True)
class Generation:
    """One run of the reference: ``new_tokens`` as it gives them, cut at ``max_new_tokens`` and behind the first stop token.

    A ``chain`` drafts the best token of each depth; ``budget`` is then block_size − 1.
    """

    prompt_index: int
    prompt: tuple[int, ...]
    chain: bool
    block_size: int
    budget: int
    stop: tuple[int, ...]
    max_new_tokens: int
    new_tokens: tuple[int, ...]
    acceptance_lengths: tuple[int, ...]
    rounds: tuple[TreeRound, ...]

    def __str__(self) -> str:
        kind = "chain" if self.chain else f"budget {self.budget}"
        return f"prompt {self.prompt_index}, block {self.block_size}, {kind}, {self.max_new_tokens} tokens"


@dataclass(frozen=True)
class GenerationCase:
    """A drafter's folder, its target's, and what they generate together.

    ``draft_logits`` has [rounds, B − 1, V] by (prompt, block size) for budget 15, ``features`` [P, feature_width] of prompt 0.
    """

    name: str
    folder: Path
    target: Path
    generations: tuple[Generation, ...]
    draft_logits: Mapping[tuple[int, int], NDArray[np.float32]]
    features: NDArray[np.float32]


def generation_cases() -> list[GenerationCase]:
    """Every case found whose target is there too, by name; none when there is no oracle folder."""
    root = oracle_dir()
    folders = sorted((root / "ddtree_e2e").glob("*/runs.json")) if root else []
    cases = [_generations(file.parent, root) for file in folders if root]
    return [case for case in cases if case.target.is_dir()]


def _generations(folder: Path, root: Path) -> GenerationCase:
    runs = json.loads((folder / "runs.json").read_text(encoding="utf-8"))
    prompts = {prompt["index"]: tuple(prompt["ids"]) for prompt in runs["prompts"]}
    with np.load(folder / "draft_logits.npz") as arrays:
        logits = {}
        for key in (key for key in arrays.files if key.endswith(".draft_logits")):
            prompt, block, _ = key.split(".")
            logits[int(prompt[1:]), int(block[1:])] = arrays[key]
        features = arrays["p0.prompt_target_hidden"]
    generations = tuple(_generation(run, prompts[run["prompt_index"]]) for run in runs["runs"])
    return GenerationCase(folder.name, folder, root / runs["target"], generations, logits, features)


def _generation(run: Mapping[str, Any], prompt: tuple[int, ...]) -> Generation:
    chain = run["kind"] == "dflash"
    found = Generation(
        prompt_index=run["prompt_index"],
        prompt=prompt,
        chain=chain,
        block_size=run["block_size"],
        budget=run["block_size"] - 1 if chain else run["tree_budget"],
        stop=tuple(run["stop_token_ids"] or ()),
        max_new_tokens=run["max_new_tokens"],
        new_tokens=tuple(run["output_ids"][len(prompt) :]),
        acceptance_lengths=tuple(run["acceptance_lengths"]),
        rounds=(),
    )
    rounds = zip(run["rounds"], found.acceptance_lengths, strict=True)
    return replace(found, rounds=tuple(_chain_round(r, n) if chain else _tree_round(r, n, found.block_size) for r, n in rounds))


def _chain_round(values: Mapping[str, Any], accepted: int) -> TreeRound:
    count = len(values["draft_tokens"])
    return TreeRound(
        values["start"], True, tuple(values["draft_tokens"]), tuple(range(1, count + 1)), tuple(range(-1, count)), accepted, float("inf")
    )


def _tree_round(values: Mapping[str, Any], accepted: int, block_size: int) -> TreeRound:
    gap = values["tree_gap"]
    return TreeRound(
        start=values["start"],
        whole=values["block_len"] == block_size,
        tokens=tuple(values["node_token_ids"]),
        depths=tuple(values["node_depths"]),
        parents=tuple(values["parents"]),
        accepted=accepted,
        gap=float("inf") if gap is None else float(gap),
    )
