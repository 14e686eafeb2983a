"""The options of ``kdgen generate``, and which of them contradict each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import click

from kdgen.cli.prompts import as_given, in_utf8
from kdgen.drafters.by_name import OF_USERS
from kdgen.plan.ir import Compute
from kdgen.plan.shard import Exchange
from kdgen.spec.sampling import GREEDY, Sampling

DRAFTERS = ("none", *OF_USERS)


@dataclass(frozen=True)
class Options:
    """The values of the command's options; None where an option without a default was left out."""

    model: str
    prompt: str | None
    prompt_ids: str | None
    chat: bool
    system: str | None
    as_text: bool
    max_new_tokens: int
    draft: str
    draft_amplitude: float | None
    chain: bool
    budget: int | Literal["auto"] | None
    block_size: int
    backend: str | None
    dtype: Compute | None
    context: int | None
    chunk: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    sample_seed: int
    ignore_eos: bool
    check_exact: bool
    random_weights: bool
    layers: int | None
    seed: int
    tp: int | None
    exchange: Exchange | None
    as_json: bool

    @property
    def sampling(self) -> Sampling:
        """Raises KdgenError when one of the values is out of range."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.sample_seed)

    def system_text(self) -> str | None:
        """Raises KdgenError when --system is not UTF-8."""
        return None if self.system is None else in_utf8(as_given(self.system), "--system")


def check_options(options: Options, temperature_given: bool) -> None:
    """Raises UsageError when options contradict each other or have no effect, KdgenError when a value of one is out of range."""
    if options.draft == "dflash" and not options.random_weights:
        raise click.UsageError("--draft dflash uses a drafter with random weights: add --random-weights, or name the drafter's folder")
    if options.draft_amplitude is not None and options.draft in DRAFTERS:
        raise click.UsageError("--draft-amplitude needs a drafter's folder: name one with --draft")
    if options.chain and options.draft in DRAFTERS and options.draft != "dflash":
        raise click.UsageError("--chain needs a DFlash drafter: name its folder with --draft")
    if options.layers is not None and not options.random_weights:
        raise click.UsageError("--layers needs a model with random weights: add --random-weights")
    if options.prompt_ids is not None and (options.prompt is not None or options.chat):
        raise click.UsageError("--prompt-ids is the whole prompt: leave out --prompt and --chat")
    if options.system is not None and not options.chat:
        raise click.UsageError("--system is a message of a chat: add --chat")
    if options.system is not None:
        options.system_text()
    _check_sampling(options, options.sampling, temperature_given)


def _check_sampling(options: Options, sampling: Sampling, temperature_given: bool) -> None:
    if options.temperature != 0 or sampling == GREEDY:
        return
    values = {
        "--top-k": (options.top_k, 0), "--top-p": (options.top_p, 1), "--min-p": (options.min_p, 0),
        "--sample-seed": (options.sample_seed, 0),
    }  # fmt: skip
    unused = " and ".join(option for option, (value, default) in values.items() if value != default)
    if not temperature_given:
        raise click.UsageError(f"{unused}: has an effect only on tokens that are drawn: add --temperature")
    raise click.UsageError(f"{unused}: has no effect at --temperature 0, which takes the most probable token: leave it out, or raise that")
