"""Train the demo model and its drafter, and export both as published folders: ``python -m kdgen.demo.train OUT``.

It needs torch (the extra ``train``). The result depends on ``--seed``, the corpus and torch's arithmetic. The state is written every
``--save-every`` steps, and the same command continues an interrupted training. OUT then holds

- ``model/``: the target, bf16, with ``tokenizer.json``; ``model-int4/``: the same with INT4 experts, for which it was trained;
- ``drafter/``: the DFlash drafter in z-lab's layout;
- ``prompts.json``: held-out prompts; ``log.jsonl`` and ``loss.svg``: the losses.

The drafter is trained in two stages: first on the corpus, then on the target's own continuations of prompts from the corpus, because those
are what it has to predict.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

try:
    import torch
    import torch.nn.functional as F
    from safetensors.torch import load_file, save_file
    from torch import Tensor
except ModuleNotFoundError as missing:
    if __name__ != "__main__":
        raise
    print(f"kdgen.demo.train: error: {missing.name} is not installed: pip install 'kdgen[train]'", file=sys.stderr)
    sys.exit(2)

from kdgen.demo import corpus
from kdgen.demo import drafter as drafters
from kdgen.demo import target as targets
from kdgen.demo.curve import write_curve
from kdgen.demo.drafter import TorchDrafter
from kdgen.demo.prompts import write_prompts
from kdgen.demo.target import Parameters, TorchTarget
from kdgen.demo.tokenizer import tokenizer_json
from kdgen.errors import KdgenError
from kdgen.spec.drafter import DraftSpec, no_drafter
from kdgen.spec.model import Spec, load_spec
from kdgen.spec.published_drafter import published_draft_config
from kdgen.spec.publishing import published_config
from kdgen.weights.quantize import quantize_model


@dataclass(frozen=True)
class Settings:
    """The options of ``python -m kdgen.demo.train``."""

    out: Path
    steps: int = 3000
    draft_steps: int = 2600
    batch: int = 128
    length: int = 512
    draft_batch: int = 64
    anchors: int = 16  #: draft blocks in each sequence
    own_text: int = 4096  #: sequences that the target writes for the drafter
    prompt: int = 128  #: bytes of a prompt for those
    learning_rate: float = 2e-3
    balance_speed: float = 1e-3
    depth_decay: float = 0.9  #: factor of the loss from each depth to the next
    prompts: int = 128
    seed: int = 0
    save_every: int = 500
    log_every: int = 50
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


class Run:
    """Training of some parameters by AdamW for a number of steps, with a log, and with saved states from which it continues."""

    def __init__(self, name: str, parameters: Parameters, trained: Parameters, steps: int, settings: Settings) -> None:
        self.name, self.parameters, self.trained = name, parameters, trained
        self.steps, self.settings = steps, settings
        self.first = {key: torch.zeros_like(value) for key, value in trained.items()}
        self.second = {key: torch.zeros_like(value) for key, value in trained.items()}
        self.done = 0
        self._file = settings.out / f"state-{name}.safetensors"
        if self._file.exists():
            self._restore()

    def train(self, loss_of: Callable[[int], Tensor], after: Callable[[], None] | None = None) -> None:
        """Do the remaining steps. ``loss_of(step)`` gives a step's loss; ``after`` is called after each update."""
        for value in self.trained.values():
            value.requires_grad_(True)
        began, total, counted = time.perf_counter(), 0.0, 0
        while self.done < self.steps:
            loss = loss_of(self.done)
            gradients = torch.autograd.grad(loss, list(self.trained.values()), allow_unused=True)
            self._update(gradients)
            if after:
                after()
            self.done += 1
            total, counted = total + loss.detach(), counted + 1
            if self.done % self.settings.log_every == 0 or self.done == self.steps:
                self._log(float(total) / counted, (time.perf_counter() - began) / counted)
                began, total, counted = time.perf_counter(), 0.0, 0
            if self.done % self.settings.save_every == 0 or self.done == self.steps:
                self._save()
        for value in self.trained.values():
            value.requires_grad_(False)

    def rate(self) -> float:
        """Linear warm-up over 2 % of the steps, then a cosine down to a twentieth."""
        warm = max(1, self.steps // 50)
        if self.done < warm:
            return self.settings.learning_rate * (self.done + 1) / warm
        along = (self.done - warm) / max(1, self.steps - warm)
        return self.settings.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * along)))

    @torch.no_grad()
    def _update(self, gradients: Sequence[Tensor | None]) -> None:
        present = [gradient for gradient in gradients if gradient is not None]
        norm = torch.sqrt(torch.stack([gradient.float().square().sum() for gradient in present]).sum())
        shrink = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        rate, count = self.rate(), self.done + 1
        for (key, value), gradient in zip(self.trained.items(), gradients, strict=True):
            if gradient is None:
                continue
            gradient = gradient.float() * shrink
            first, second = self.first[key], self.second[key]
            first.lerp_(gradient, 0.1)
            second.lerp_(gradient.square(), 0.05)
            step = first / (1 - 0.9**count) / (torch.sqrt(second / (1 - 0.95**count)) + 1e-8)
            if value.ndim > 1 and "embed_tokens" not in key:
                step = step + 0.1 * value
            value -= rate * step

    def _log(self, loss: float, seconds: float) -> None:
        entry = {"run": self.name, "step": self.done, "loss": round(loss, 5), "rate": self.rate(), "seconds_a_step": round(seconds, 4)}
        with (self.settings.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        print(f"{self.name} {self.done}/{self.steps}: loss {loss:.4f}, {seconds * 1000:.0f} ms a step", file=sys.stderr, flush=True)

    def _save(self) -> None:
        tensors = {f"value.{key}": value.detach() for key, value in self.parameters.items()}
        tensors |= {f"first.{key}": value for key, value in self.first.items()} | {f"second.{key}": v for key, v in self.second.items()}
        temporary = self._file.with_suffix(".tmp")
        save_file({key: value.contiguous() for key, value in tensors.items()}, temporary, {"done": str(self.done)})
        temporary.replace(self._file)

    def _restore(self) -> None:
        from safetensors import safe_open

        with safe_open(self._file, "pt") as file:
            self.done = int(file.metadata()["done"])
        for key, value in load_file(self._file, self.settings.device).items():
            kind, _, name = key.partition(".")
            {"value": self.parameters, "first": self.first, "second": self.second}[kind][name].copy_(value)
        print(f"{self.name}: continuing at step {self.done}", file=sys.stderr)


# ---- the two models -----------------------------------------------------------------------------------------------------


def autocast(settings: Settings) -> torch.autocast:
    """bf16 on a GPU, as in the kernels; float32 on a CPU."""
    return torch.autocast(settings.device, torch.bfloat16, enabled=settings.device != "cpu")


def train_target(spec: Spec, text: corpus.Text, settings: Settings) -> TorchTarget:
    """Train the target on next-token prediction."""
    parameters = {key: value.to(settings.device) for key, value in targets.initial(spec, settings.seed).items()}
    run = Run("target", parameters, targets.trained(parameters), settings.steps, settings)
    target, loads = TorchTarget(spec, parameters), []

    def loss_of(step: int) -> Tensor:
        nonlocal loads
        tokens = torch.from_numpy(text.windows(settings.batch, settings.length + 1, settings.seed, step)).to(settings.device)
        with autocast(settings):
            forward = target.forward(tokens[:, :-1])
        loads = forward.loads
        return F.cross_entropy(forward.logits.flatten(0, 1), tokens[:, 1:].flatten())

    run.train(loss_of, lambda: targets.balance(spec, parameters, loads, settings.balance_speed))
    rounded = {key: value.detach().bfloat16().float() if key in run.trained else value for key, value in parameters.items()}
    return TorchTarget(spec, rounded)  # as it is exported; the drafter is trained with these weights


def own_text(target: TorchTarget, text: corpus.Text, settings: Settings) -> Tensor:
    """Prompts of the corpus with the target's continuations [own_text, length], half greedy, half at temperature 0.7."""
    parts, each = [], min(2048, max(1, settings.own_text // 2))
    for part in range(-(-settings.own_text // each)):
        prompts = torch.from_numpy(text.windows(each, settings.prompt, settings.seed + 1, part)).to(settings.device)
        with autocast(settings):
            temperature = 0.7 * (part % 2)
            parts.append(targets.generate(target, prompts, settings.length - settings.prompt, temperature, settings.seed + part))
        print(f"own text: {len(parts) * each} of {settings.own_text} sequences", file=sys.stderr, flush=True)
    return torch.cat(parts)


def train_drafter(draft: DraftSpec, target: TorchTarget, text: corpus.Text, settings: Settings) -> Parameters:
    """Train on blocks at random anchors: a third of the steps on the corpus, the rest on the target's own text."""
    parameters = {key: value.to(settings.device) for key, value in drafters.initial(draft, settings.seed + 2).items()}
    run = Run("drafter", parameters, parameters, settings.draft_steps, settings)
    model = TorchDrafter(draft, parameters, target.p["model.embed_tokens.weight"], target.p["lm_head.weight"], settings.length)
    written: Tensor | None = None
    depths = settings.depth_decay ** torch.arange(draft.block_size - 1, device=settings.device)

    def batch_of(step: int) -> tuple[Tensor, int]:
        """Tokens, and the first position of an anchor."""
        nonlocal written
        if step < settings.draft_steps // 3:
            return torch.from_numpy(text.windows(settings.draft_batch, settings.length, settings.seed + 3, step)).to(settings.device), 1
        if written is None:
            written = own_text(target, text, settings)
        generator = torch.Generator().manual_seed((settings.seed << 32) + step)
        rows = torch.randint(len(written), (settings.draft_batch,), generator=generator)
        return written[rows.to(settings.device)], settings.prompt

    def loss_of(step: int) -> Tensor:
        tokens, first = batch_of(step)
        generator = torch.Generator().manual_seed((settings.seed << 32) + step + 1)
        last = settings.length - draft.block_size
        anchors = torch.randint(first, last + 1, (len(tokens), settings.anchors), generator=generator).to(settings.device)
        with torch.no_grad(), autocast(settings):
            features = target.forward(tokens, draft.target_layer_ids).features
        with autocast(settings):
            logits = model.blocks(features, tokens.gather(1, anchors), anchors)
        wanted = anchors[..., None] + torch.arange(1, draft.block_size, device=settings.device)
        labels = tokens.gather(1, wanted.flatten(1)).view(wanted.shape)
        losses = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view(labels.shape)
        return (losses * depths).sum(-1).mean() / depths.sum()

    run.train(loss_of)
    return parameters


# ---- export -------------------------------------------------------------------------------------------------------------


def export(spec: Spec, target: TorchTarget, parameters: Parameters, text: corpus.Text, settings: Settings) -> None:
    """Write the published folders, the held-out prompts, and the loss curve."""
    draft, plain = spec.draft, spec.with_draft(None).model_copy(update={"quantization": None})
    assert draft is not None
    model = settings.out / "model"
    tensors = {}
    for group in plain.tensors():
        stacked = target.p[group.key.replace("experts.{e}.", "experts.")]
        for expert, key in enumerate(group.names()):
            value = stacked[expert] if "{e}" in group.key else stacked
            tensors[key] = value if key.endswith("e_score_correction_bias") else value.bfloat16()
    _folder(model, published_config(plain), tensors)
    (model / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    if spec.quantization is not None:
        int4 = settings.out / "model-int4"
        shutil.rmtree(int4, ignore_errors=True)  # from an earlier export
        quantize_model(model, int4, lambda done, total: None)
    _folder(settings.out / "drafter", published_draft_config(draft), {key: value.bfloat16() for key, value in parameters.items()})
    prompts = corpus.prompts(text.library, settings.prompts, settings.prompt, settings.seed)
    write_prompts(settings.out / "prompts.json", text.sources[0], prompts)
    write_curve(settings.out / "log.jsonl", settings.out / "loss.svg")


def _folder(folder: Path, config: dict[str, object], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    file = folder / "model.safetensors"
    save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, file, {"format": "pt"})
    file.chmod(0o644)  # readable by all users, as safetensors does not make it


@torch.no_grad()
def held_out_loss(target: TorchTarget, text: corpus.Text, settings: Settings) -> float:
    """The loss on held-out files, in nats per byte."""
    tokens = corpus.stream(text.held_out)
    total = 0.0
    for step in range(8):
        batch = torch.from_numpy(corpus.windows(tokens, settings.batch, settings.length + 1, settings.seed + 9, step)).to(settings.device)
        with autocast(settings):
            logits = target.forward(batch[:, :-1]).logits
        total += float(F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()))
    return total / 8


def train(settings: Settings, spec: Spec) -> None:
    """Train and export both models; steps that are done are not repeated. Raises KdgenError when the spec has no drafter."""
    if spec.draft is None:
        raise no_drafter(spec.name)
    settings.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    text = corpus.Text.load()
    print(f"corpus: {len(text.train)} training bytes, {len(text.held_out)} files held out: {'; '.join(text.sources)}", file=sys.stderr)
    print(settings, file=sys.stderr)
    target = train_target(spec, text, settings)
    with (settings.out / "log.jsonl").open("a", encoding="utf-8") as file:
        loss = held_out_loss(target, text, settings)
        file.write(json.dumps({"run": "held out", "step": settings.steps, "loss": round(loss, 5)}) + "\n")
    print(f"held-out loss {loss:.4f} nats a byte", file=sys.stderr)
    export(spec, target, train_drafter(spec.draft, target, text, settings), text, settings)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kdgen.demo.train", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--spec", default="demo", help="a spec with a draft: section (%(default)s)")
    defaults = Settings(Path())
    for name, value in asdict(defaults).items():
        if name != "out":
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help="(%(default)s)")
    arguments = vars(parser.parse_args())
    try:
        spec = load_spec(arguments.pop("spec"))
        train(Settings(**arguments), spec)
    except KdgenError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    main()
