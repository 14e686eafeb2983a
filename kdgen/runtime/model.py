"""A model to run: what ``--model`` names, as a spec and its weights.

It is a published folder (``config.json`` and safetensors), a ``.kdtr`` file of packed weights, or any description with
made-up weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from kdgen.errors import KdgenError, SpecError
from kdgen.plan.ir import Compute
from kdgen.spec.drafter import DraftSpec, no_drafter
from kdgen.spec.model import Spec, load_spec, shipped_specs
from kdgen.spec.published import load_config
from kdgen.spec.published_drafter import draft_origins, load_draft_config
from kdgen.text.tokenizer import TextFiles
from kdgen.weights.checkpoint import Checkpoint, as_stored
from kdgen.weights.pack import CheckpointWeights, PackedWeights
from kdgen.weights.packed import PackedFile
from kdgen.weights.random import random_weights
from kdgen.weights.synthetic import MOST_DRAWN, SyntheticWeights, checkpoint_bytes

#: Experts, or layers of a dense model, up to which made-up weights are named one by one; the largest models have tens of thousands.
_MOST_PARTS = 2_000_000


@dataclass(frozen=True)
class Model:
    """A spec and its weights. ``compute`` is the compute type that they are packed for, None while any will do.

    ``draft_weights`` are those of the spec's drafter; None: it has none, or they are among the others, made up. ``text`` has what
    came with it for text: a tokenizer, a chat template. ``notes`` is what its user should know, a sentence each.
    """

    spec: Spec
    weights: PackedWeights
    compute: Compute | None = None
    draft_weights: PackedWeights | None = None
    text: TextFiles = field(default_factory=lambda: TextFiles("the model"))
    notes: tuple[str, ...] = ()


def open_model(path: Path) -> Model:
    """A published model folder, or a .kdtr file. Every tensor's place, shape and type is checked, and none is read.

    Raises SpecError for a config, WeightError for weights that are damaged, incomplete or unsupported, with everything that is wrong.
    """
    if not path.exists():
        if str(path) in shipped_specs():
            raise KdgenError(f"{path}: a shipped spec, which has no weights: add --random-weights, or give a published model's folder")
        raise KdgenError(f"{path}: there is no such model; --model takes a folder with config.json and safetensors, or a .kdtr file")
    if path.suffix in (".yaml", ".yml", ".json"):
        raise KdgenError(f"{path}: describes a model and has no weights: add --random-weights, or give the model's folder")
    if not path.is_dir():
        packed = PackedFile(path)
        return Model(packed.spec, packed, packed.compute, text=packed.text)
    described = load_config(path)
    checkpoint = Checkpoint(path)
    spec = as_stored(described, checkpoint)
    checkpoint.validate(spec)
    notes: tuple[str, ...] = ()
    if spec.tie_word_embeddings != described.tie_word_embeddings:
        notes = (f"{path}: tie_word_embeddings is true, but lm_head.weight is stored and differs: the stored head is used",)
    return Model(spec, _weights_of(checkpoint), text=TextFiles.of_folder(path), notes=notes)


def _weights_of(checkpoint: Checkpoint) -> CheckpointWeights:
    return CheckpointWeights(checkpoint.__getitem__, str(checkpoint.path), lambda key: checkpoint.entry(key).file)


def described(path: Path) -> Spec:
    """The spec of a published model, its folder or its ``config.json``, with what the weights say of it where there are some.

    Raises SpecError for a config, WeightError for weights that are damaged or incomplete.
    """
    spec = load_config(path)
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        return spec
    return as_stored(spec, Checkpoint(path))


def with_drafter(model: Model, path: Path, amplitude: float | None = None) -> Model:
    """``model`` with the published DFlash drafter in the folder ``path``; ``amplitude`` overrides its YaRN amplitude of cos and sin.

    Raises SpecError for a config that is no drafter's or a drafter that does not fit, WeightError for damaged or incomplete weights,
    KdgenError for an amplitude where nothing is stretched.
    """
    if not path.is_dir():
        raise KdgenError(f"{path}: there is no such drafter; --draft takes a folder with config.json and safetensors, or one of the names")
    draft = load_draft_config(path)
    if amplitude is not None:
        if draft.rope_scaling is None:
            raise KdgenError(f"{path}: this drafter has no YaRN, so it has no amplitude to set")
        values = draft.model_dump(mode="json")
        values["rope_scaling"]["attention_factor"] = amplitude
        draft = DraftSpec.from_mapping(values, str(path))
    try:
        spec = model.spec.with_draft(draft)
    except SpecError as error:  # about the drafter as a part of a spec; the user has its folder
        origins, file = draft_origins(), str(path / "config.json")
        named = (replace(found, file=file, key=origins.key(found.key.removeprefix("draft."))) for found in error.findings)
        raise SpecError([*named]) from None
    checkpoint = Checkpoint(path)
    checkpoint.validate(draft)
    return replace(model, spec=spec, draft_weights=_weights_of(checkpoint))


def random_model(source: str, layers: int | None = None, seed: int = 0, draft: bool = False) -> Model:
    """Made-up weights for a spec (a shipped name, a YAML file) or a config (its file or folder), cut to ``layers`` layers.

    Those of large models are tiled from a small pool, which takes seconds. A ``draft:`` section counts only with ``draft``. Raises
    SpecError for a bad description, KdgenError when there are fewer layers than that, or no drafter where one is wanted.
    """
    path = Path(source)
    spec = load_config(path) if path.suffix == ".json" or (path / "config.json").exists() else load_spec(source)
    if draft and spec.draft is None:
        raise no_drafter(spec.name)
    if not draft:
        spec = spec.with_draft(None)
    if layers is not None:
        spec = shorten(spec, layers)
    if (parts := spec.num_hidden_layers * (spec.n_routed_experts or 1)) > _MOST_PARTS:
        raise KdgenError(f"{spec.name} has {parts} layers and experts in all, too many to make weights up for: --layers cuts the model")
    text = TextFiles.of_folder(path) if path.is_dir() else TextFiles(source)
    if checkpoint_bytes(spec) > MOST_DRAWN:
        return Model(spec, SyntheticWeights(spec, seed), text=text)
    return Model(spec, CheckpointWeights(random_weights(spec, seed).__getitem__), text=text)


def shorten(spec: Spec, layers: int) -> Spec:
    """The first ``layers`` layers of a model; one with routed experts keeps at least one layer of them.

    Its drafter reads as many layers as before, spread over what is left, or as many as there are. Raises KdgenError when the model
    has fewer layers.
    """
    if not 1 <= layers <= spec.num_hidden_layers:
        raise KdgenError(f"{spec.name} has {spec.num_hidden_layers} layers and cannot be cut to {layers}")
    dense = min(spec.first_k_dense_replace, layers - 1 if spec.has_moe else layers)
    draft = spec.draft
    if draft is not None:
        count = min(len(draft.target_layer_ids), layers)
        spread = tuple(place * layers // count for place in range(count))
        draft = draft.model_copy(update={"target_layer_ids": spread})
    values = spec.with_draft(None).model_dump(mode="json") | {"num_hidden_layers": layers, "first_k_dense_replace": dense}
    return Spec.from_mapping(values, spec.name).with_draft(draft)
