"""Whether an ending is acceptable: the right answer, or exit code 2 with a message that says where; and what else must hold."""

from __future__ import annotations

import base64
import datetime
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2.sandbox
import ml_dtypes
import numpy as np
import tokenizers
from numpy.typing import NDArray

from kdgen.reference.model import ReferenceModel
from kdgen.spec.model import Spec
from tests.campaign.damage import Damage, split_safetensors
from tests.campaign.process import MOST_BYTES, Outcome
from tests.campaign.subjects import NEW_TOKENS, PROMPT, TEXT_TOKENS, prompt_ids

#: A message is read by a person: so many characters at most.
MOST_MESSAGE = 6000
#: Two logits closer than this may be taken either way by float32 or bf16 sums.
MARGIN = {"f32": 1e-3, "bf16": 0.35}

#: Keys that a spec has in another form than a config, or that kdgen decides from several.
RENAMED = ("name", "model_type", "rope_scaling", "eos_token_id", "bos_token_id", "dtype", "quantization", "tie_word_embeddings")

_DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "I32": np.dtype(np.int32), "I64": np.dtype(np.int64)}


def problems(
    outcome: Outcome, named: Iterable[str], key: str, before: frozenset[str], after: frozenset[str], wrote: frozenset[str]
) -> list[str]:
    """What is wrong with an ending, whatever the input was.

    A refusal names one of ``named`` (the damaged files, their folder), and ``key`` where that is not empty. ``before`` and ``after`` are
    the files around, of which ``wrote`` may be new after success, and none after a refusal.
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
    if outcome.code == 2 and key not in outcome.stderr:
        found.append(f"the message does not name {key}: {outcome.stderr[:200]!r}")
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


def config_of(folder: Path) -> dict[str, Any]:
    """A published model's config as it stands in the file."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    return config


def ends_of(folder: Path) -> frozenset[int]:
    """The tokens at which a published model ends, read by ``json`` alone."""
    config = config_of(folder)
    inner = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    defaults = folder / "generation_config.json"
    more = json.loads(defaults.read_bytes()).get("eos_token_id") if defaults.exists() else None
    return _ids(inner.get("eos_token_id", config.get("eos_token_id"))) | _ids(more)


def ends_in(spec: Spec, text: str) -> frozenset[int]:
    """The same of a packed model: its spec's, and those of the small files that are in it."""
    defaults = json.loads(text).get("generation_config.json")
    return frozenset(spec.eos_token_id) | _ids(json.loads(defaults).get("eos_token_id") if defaults else None)


def _ids(found: Any) -> frozenset[int]:
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])


def wrong_tokens(
    outcome: Outcome,
    config: Mapping[str, Any],
    weights: Mapping[str, NDArray[Any]],
    ends: frozenset[int],
    prompt: Sequence[int] = prompt_ids(),
    most: int = NEW_TOKENS,
) -> str:
    """How a ``generate --json`` differs from the float64 reference over ``weights``, which reads ``config`` by itself; empty where it does
    not, or where two tokens are too close to tell. It has ``most`` tokens, or ends with one of ``ends`` and has none before."""
    report = json.loads(outcome.stdout)
    tokens, margin = report["tokens"], MARGIN[report["dtype"]]
    model = ReferenceModel(config, weights)
    with np.errstate(all="ignore"):
        logits = model.forward([*prompt, *tokens[:-1]]).logits[len(prompt) - 1 :]
    if not np.isfinite(logits).all():
        return "exit code 0, where the reference's logits are not finite"
    for place, (row, token) in enumerate(zip(logits, tokens, strict=True)):
        if row.max() - row[token] > margin * max(1.0, float(row.std())):
            return f"token {place} is {token}; the reference's best is {int(row.argmax())}, {row.max() - row[token]:.3g} above it"
    ended = [place for place, token in enumerate(tokens) if token in ends]
    if ended and ended[0] != len(tokens) - 1:
        return f"token {ended[0]} of {tokens} ends the text, and it went on"
    if bool(ended) != report["stopped"] or (len(tokens) != most and not ended):
        return f"{len(tokens)} tokens of {most}, stopped: {report['stopped']}; tokens that end a text: {sorted(ends)}"
    return ""


def wrong_text(outcome: Outcome, folder: Path, chat: bool) -> str:
    """The same of a prompt of text, whose tokens are found by the library that a tokenizer was written for, or by merging bytes."""
    report = json.loads(outcome.stdout)
    config = json.loads((folder / "tokenizer_config.json").read_bytes()) if (folder / "tokenizer_config.json").exists() else {}
    text = _rendered(config["chat_template"], config) if chat else PROMPT
    if (folder / "tokenizer.json").exists():
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        prompt = tokenizer.encode(text, add_special_tokens=not chat).ids
        first = tokenizer.token_to_id(_content(config.get("bos_token")))
        written = None
    else:
        prompt, first, written = _merged(folder, config, text)
    if not chat and config.get("add_bos_token") is True and first is not None and prompt[:1] != [first]:
        prompt = [first, *prompt]
    if report["prompt_tokens"] != len(prompt):
        return f"{report['prompt_tokens']} prompt tokens, and the tokenizer makes {len(prompt)} of {text!r}"
    if written is not None and report["text"] != (said := written(report["tokens"])):
        return f"the text is {report['text']!r}, and the tokens' bytes are {said!r}"
    return wrong_tokens(outcome, config_of(folder), tensors_of(folder), ends_of(folder), prompt, TEXT_TOKENS)


def _content(token: Any) -> str:
    """A special token's text, written as such or as a table."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""


def _rendered(template: str, config: Mapping[str, Any]) -> str:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    special = {key: _content(value) for key, value in config.items() if key.endswith("_token")}
    return environment.from_string(template).render(messages=[{"role": "user", "content": PROMPT}], add_generation_prompt=True, **special)


def _merged(folder: Path, config: Mapping[str, Any], text: str) -> tuple[list[int], int | None, Callable[[Sequence[int]], str]]:
    """A text's tokens in Kimi's vocabulary, its first token, and what turns tokens into text. The campaign's prompts are one word each
    to this: no pair of its small vocabulary lies over a bound between words."""
    lines = (folder / "tiktoken.model").read_bytes().splitlines()
    ranks = {base64.b64decode(line.split()[0]): place for place, line in enumerate(lines)}
    special = {value["content"]: int(key) for key, value in config["added_tokens_decoder"].items()}
    silent = {int(key) for key, value in config["added_tokens_decoder"].items() if value.get("special", True)}
    by_id = {place: piece for piece, place in ranks.items()} | {place: content.encode() for content, place in special.items()}
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
    prompt: list[int] = []
    for part in parts:
        prompt += [special[part]] if part in special else _merge(part.encode(), ranks)

    def written(tokens: Sequence[int]) -> str:
        return b"".join(b"" if token in silent or token >= len(ranks) + 258 else by_id.get(token, b"") for token in tokens).decode(
            "utf-8", "replace"
        )

    return prompt, special.get(_content(config.get("bos_token"))), written


def _merge(data: bytes, ranks: Mapping[bytes, int]) -> list[int]:
    pieces = [bytes([byte]) for byte in data]
    while True:
        pairs = [(ranks[a + b], place) for place, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in ranks]
        if not pairs:
            return [ranks[piece] for piece in pieces]
        place = min(pairs)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


def unlike_source(source: Mapping[str, NDArray[Any]], written: Mapping[str, NDArray[Any]]) -> str:
    """A tensor of a quantized model that is not its source's: by bits, and where it is in INT4 by more than half a step of its group."""
    for name, array in written.items():
        if name.endswith(("_scale", "_shape")):
            continue
        if not name.endswith("_packed"):
            if name not in source or source[name].tobytes() != array.tobytes():
                return f"{name} is not the source's"
            continue
        base = name.removesuffix("_packed")
        weight, scale = source[base].astype(np.float64), written[f"{base}_scale"].astype(np.float64)
        words = array.view(np.uint32)[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32)
        values = (words & 15).reshape(weight.shape).astype(np.float64) - 8
        step = np.repeat(scale, weight.shape[1] // scale.shape[1], axis=1)
        # 7.5 steps up are rounded to 7, and a scale is rounded to eight bits
        if (np.abs(values * step - weight) > 0.5 * step * 1.07).any():
            return f"{base} is more than half a step from its source"
    return ""


def unlike_written(original: bytes, damaged: bytes, damages: Sequence[tuple[str, Damage]]) -> str:
    """A file that ``inspect --verify`` finds whole, and that does not hold what was written. Whoever makes a file's checksums anew has
    written it."""
    if any(damage.title.startswith("sealed") for _, damage in damages):
        return ""
    return "" if split_safetensors(original) == split_safetensors(damaged) else "damage is not noticed"


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
