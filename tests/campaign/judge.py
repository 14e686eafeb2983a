"""Whether an ending is acceptable: the right answer, or exit code 2 with a message that says where; and what else must hold."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kdgen.spec import Spec
from kdgen.verify.published import reference_of
from tests.campaign.damage import split_safetensors
from tests.campaign.process import MOST_BYTES, Outcome
from tests.campaign.subjects import NEW_TOKENS, prompt_ids

#: A message is read by a person: so many characters at most.
MOST_MESSAGE = 6000
#: Two logits closer than this may be taken either way by float32 or bf16 sums.
MARGIN = {"f32": 1e-3, "bf16": 0.35}

#: Keys that a spec has in another form than a config, or that kdgen decides from several.
RENAMED = ("name", "model_type", "rope_scaling", "eos_token_id", "bos_token_id", "dtype", "quantization", "tie_word_embeddings")

_DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "I32": np.dtype(np.int32), "I64": np.dtype(np.int64)}


def problems(outcome: Outcome, named: Iterable[str], before: frozenset[str], after: frozenset[str], wrote: frozenset[str]) -> list[str]:
    """What is wrong with an ending, whatever the input was.

    A refusal names one of ``named`` (the damaged file, its folder). ``before`` and ``after`` are the files around, of which ``wrote``
    may be new after success, and none after a refusal.
    """
    found = []
    if outcome.timed_out:
        return [f"no end within {outcome.seconds:.0f} s"]
    if "Traceback (most recent call last)" in outcome.stderr or "this is a bug in kdgen" in outcome.stderr:
        raised = [line for line in outcome.stderr.splitlines() if re.match(r"\w[\w.]*(Error|Exception)", line)]
        found.append(f"a traceback: {(raised or [''])[-1]}")
    if outcome.code not in (0, 2):
        found.append(f"exit code {outcome.code}")
    if outcome.code == 2 and not any(name in outcome.stderr for name in named):
        found.append(f"the message names no file: {outcome.stderr[:200]!r}")
    if outcome.code == 2 and not re.search(r"error:", outcome.stderr, re.IGNORECASE):
        found.append(f"exit code 2 without an error message: {outcome.stderr[:200]!r}")
    if len(outcome.stderr) > MOST_MESSAGE:
        found.append(f"{len(outcome.stderr)} characters on stderr")
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", outcome.stderr):
        found.append("control characters on stderr")
    if outcome.peak_bytes > MOST_BYTES:
        found.append(f"{outcome.peak_bytes >> 20} MiB of memory")
    new = after - before - (wrote if outcome.code == 0 else frozenset())
    if new:
        found.append(f"left behind: {', '.join(sorted(new)[:5])}")
    if missing := before - after:
        found.append(f"gone: {', '.join(sorted(missing)[:5])}")
    return found


def files_below(folder: Path) -> frozenset[str]:
    """Every file and folder below, hidden ones too."""
    return frozenset(str(path.relative_to(folder)) for path in folder.rglob("*"))


def tensors_of(folder: Path) -> Mapping[str, NDArray[Any]]:
    """A model folder's tensors by published name, read by nothing of kdgen's: headers by ``json``, bodies by NumPy.

    Where there is an index, it says which file holds a tensor.
    """
    index = folder / "model.safetensors.index.json"
    where = json.loads(index.read_bytes())["weight_map"] if index.exists() else None
    found: dict[str, NDArray[Any]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        header, body = split_safetensors(file.read_bytes())
        for name, entry in header.items():
            if name == "__metadata__" or (where is not None and where.get(name) != file.name) or entry["dtype"] not in _DTYPES:
                continue
            begin, end = entry["data_offsets"]
            array = np.frombuffer(body[begin:end], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
            found[name.removeprefix("language_model.")] = array
    return found


def wrong_tokens(outcome: Outcome, spec: Spec, weights: Mapping[str, NDArray[Any]]) -> str:
    """How a ``generate --json`` differs from the float64 reference over ``weights``; empty where it does not, or where two tokens are
    too close to tell."""
    report = json.loads(outcome.stdout)
    tokens, margin = report["tokens"], MARGIN[report["dtype"]]
    model = reference_of(spec, weights)
    with np.errstate(all="ignore"):
        logits = model.forward([*prompt_ids(), *tokens[:-1]]).logits[len(prompt_ids()) - 1 :]
    if not np.isfinite(logits).all():
        return "exit code 0, where the reference's logits are not finite"
    for place, (row, token) in enumerate(zip(logits, tokens, strict=True)):
        if row.max() - row[token] > margin * max(1.0, float(row.std())):
            return f"token {place} is {token}; the reference's best is {int(row.argmax())}, {row.max() - row[token]:.3g} above it"
    if len(tokens) != NEW_TOKENS and not report["stopped"]:
        return f"{len(tokens)} tokens instead of {NEW_TOKENS}"
    return ""


def unlike_config(printed: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """A value that ``kdgen spec`` printed and that the config has another for; empty where there is none. Wrapped configs are looked
    into; keys that kdgen renames or moves are left out."""
    inner = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    for key, value in printed.items():
        theirs = inner.get(key)
        if key in RENAMED or theirs is None:
            continue
        same = float(theirs) == float(value) if _number(theirs) and _number(value) else theirs == value
        if not same:
            return f"{key} is {value!r} in the spec and {theirs!r} in the config"
    return ""


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
