"""The undamaged files of the campaign: small models as hubs publish them, a packed one, a drafter, specs, and what they answer."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kdgen.files.resources import demo_dir, specs_dir
from kdgen.spec.model import Spec, load_spec
from kdgen.weights.random import random_weights
from tests.campaign.process import environment, run
from tests.checkpoints import write_model
from tests.tokenizers_made import byte_level, kimi

PROMPT = "def f(x):"
PROMPT_IDS = "5,17,9,3"
NEW_TOKENS = 4
TEXT_TOKENS = 2  #: after a prompt of text
ON_CPU = ("--backend", "cpu", "--json")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '>' }}{{ message.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Subject:
    """A folder or file to be damaged. ``path`` is what commands are given."""

    name: str
    path: Path

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(sorted(file.name for file in self.path.iterdir())) if self.path.is_dir() else (self.path.name,)


@dataclass(frozen=True)
class Subjects:
    """``models`` are folders, ``packed`` a .kdtr of the first, ``spec`` a YAML file, ``drafter`` the demo's, whose target is the last
    model."""

    models: tuple[Subject, ...]
    packed: Subject
    spec: Subject
    cache: Path  #: of compiled kernels, warm for all of them
    drafter: Subject | None = None

    @property
    def demo(self) -> Path:
        return self.models[-1].path

    @property
    def all(self) -> tuple[Subject, ...]:
        return (*self.models, self.packed, self.spec, *(() if self.drafter is None else (self.drafter,)))


def _small(name: str, **changes: object) -> Spec:
    values = load_spec("tiny").model_dump(mode="json") | {"num_hidden_layers": 2, "vocab_size": 320} | changes
    return Spec.from_mapping(values | {"name": name}, name)


def make_subjects(folder: Path, whole: bool = True) -> Subjects:
    """Write all subjects below ``folder`` and run each once, so that every kernel is in the cache and every answer is there. Where not
    ``whole``, one model alone, packed too, and a spec: a fifth of the time.

    Raises RuntimeError where an undamaged subject is refused: nothing could be judged then.
    """
    plain = write_model(folder / "plain", spec := _small("plain"), random_weights(spec, 1))
    for file, data in byte_level(310, {"add_bos_token": False, "chat_template": CHAT_TEMPLATE}).contents.items():
        (plain / file).write_bytes(data)
    (plain / "generation_config.json").write_text(json.dumps({"eos_token_id": [1], "bos_token_id": 0}))
    shutil.copyfile(specs_dir() / "tiny.yaml", folder / "tiny.yaml")
    cache, packed = folder / "cache", folder / "packed.kdtr"
    _must(["import", str(plain), str(packed)], folder, cache)
    first = Subjects((Subject("plain", plain),), Subject("packed", packed), Subject("spec", folder / "tiny.yaml"), cache)
    subjects = _with_others(first, folder) if whole else first
    for subject in (*subjects.models, subjects.packed):
        _must(generate(subject.path), folder, cache)
    for subject in subjects.models if whole else ():
        _must([*generate(subject.path), "--dtype", "f32"], folder, cache)
    if subjects.drafter is not None:
        _must([*generate(subjects.demo), "--draft", str(subjects.drafter.path)], folder, cache)
    return subjects


def _with_others(first: Subjects, folder: Path) -> Subjects:
    """A wrapped model in shards with a tiktoken.model, and the demo model in INT4 with its drafter."""
    sharded = _small("sharded", tie_word_embeddings=False)
    shards = write_model(folder / "sharded", sharded, random_weights(sharded, 2), shards=3, prefix="language_model.")
    for file, data in kimi({"chat_template": CHAT_TEMPLATE}).contents.items():
        (shards / file).write_bytes(data)
    shutil.copytree(demo_dir() / "model-int4", folder / "demo")
    shutil.copytree(demo_dir() / "drafter", folder / "drafter")
    models = (*first.models, Subject("sharded", shards), Subject("demo", folder / "demo"))
    return replace(first, models=models, drafter=Subject("drafter", folder / "drafter"))


def generate(model: Path) -> list[str]:
    """The command that continues the subjects' prompt of token ids with ``model``."""
    return ["generate", "--model", str(model), "--prompt-ids", PROMPT_IDS, "--max-new-tokens", str(NEW_TOKENS), *ON_CPU]


def generate_text(model: Path) -> list[str]:
    """The command that continues the subjects' prompt of text."""
    return ["generate", "--model", str(model), "--prompt", PROMPT, "--max-new-tokens", str(TEXT_TOKENS), *ON_CPU]


def _must(arguments: list[str], folder: Path, cache: Path) -> None:
    outcome = run(arguments, folder, environment(cache), most_seconds=600)
    if outcome.code != 0:
        raise RuntimeError(f"kdgen {' '.join(arguments)} ended with {outcome.code}: {outcome.stderr}")


def prompt_ids() -> tuple[int, ...]:
    return tuple(int(number) for number in PROMPT_IDS.split(","))


def clone(subject: Subject, folder: Path) -> Path:
    """A copy of a subject below ``folder``, its large files as hard links: ``damage.apply`` replaces a file and never writes into it."""
    if not subject.path.is_dir():
        target = folder / subject.path.name
        target.hardlink_to(subject.path)
        return target
    target = folder / subject.path.name
    target.mkdir()
    for name in subject.files:
        (target / name).hardlink_to(subject.path / name)
    return target


def random_seed(seed: int, *more: int) -> np.random.Generator:
    return np.random.default_rng([seed, *more])
