"""``kdgen demo``: the main job, on the small model that comes with kdgen or on any with random weights."""

from __future__ import annotations

import click
from click.core import ParameterSource

from kdgen.backends import backend_names
from kdgen.cli.options import FloatRange, IntRange
from kdgen.plan.ir import Compute

DRAFTERS = ("replay", "ngram", "random", "adversarial")
OF_THE_MODEL = ("prompt", "prompt_number", "list_prompts", "tree")
OF_A_SPEC = ("draft", "error_rate", "seed")


@click.command("demo", short_help="Decode with draft trees and plainly, and compare.")
@click.argument("spec_name", metavar="[SPEC]", required=False)
@click.option("--prompt", metavar="TEXT", help="Python source to continue.")
@click.option("--prompt-number", type=IntRange(min=1), default=4, show_default=True, help="One of the held-out prompts instead.")
@click.option("--list-prompts", is_flag=True, help="Show the held-out prompts, and decode nothing.")
@click.option("--tree", is_flag=True, help="Draw the draft tree of the step in which it helped most.")
@click.option("--max-new-tokens", type=IntRange(min=1), help="Tokens to decode.  [default: 192; 25 with SPEC]")
@click.option("--budget", type=IntRange(0, 63), default=15, show_default=True, help="Most draft nodes of a tree.")
@click.option("--block-size", type=IntRange(2, 16), help="Root and deepest draft token.  [default: 16; 8 with SPEC]")
@click.option("--dtype", type=click.Choice(["f32", "bf16"]), help="Compute type; the model decides without it.")
@click.option("--backend", type=click.Choice(backend_names()), help="Where kernels run; a GPU if there is one.")
@click.option("--draft", type=click.Choice(DRAFTERS), help="With SPEC: one drafter only; without it, several are compared.")
@click.option("--error-rate", type=FloatRange(0, 1), help="With SPEC: how often replay is wrong; without it, 0 and 0.2 are shown.")
@click.option("--seed", type=IntRange(0, 2**64 - 1), default=0, show_default=True, help="With SPEC: of weights, prompt and drafters.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema kdgen.demo-model/1; kdgen.demo/1 with SPEC).")
@click.pass_context
def command(
    ctx: click.Context, spec_name: str | None, prompt: str | None, prompt_number: int, list_prompts: bool, tree: bool,
    max_new_tokens: int | None, budget: int, block_size: int | None, dtype: Compute | None, backend: str | None, draft: str | None,
    error_rate: float | None, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Decode with draft trees and plainly, and compare tokens, bits and work.

    The model that comes with kdgen continues Python source that it was not trained on; on a terminal, the colour of its text changes with
    every step. With SPEC (a YAML file or a shipped name) the model is that one, with random weights: what it says means nothing, but
    every kernel of the full architecture runs. Exit code 1 if a draft tree changed anything.
    """
    for name in OF_THE_MODEL if spec_name else OF_A_SPEC:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(
                f"{option} is for the model that comes with kdgen: leave out SPEC" if spec_name else f"{option} needs a SPEC"
            )
    if sum((prompt is not None, list_prompts, ctx.get_parameter_source("prompt_number") is ParameterSource.COMMANDLINE)) > 1:
        raise click.UsageError("--prompt, --prompt-number and --list-prompts do not go together: give one of them")
    if spec_name:
        from kdgen.cli import demo_random

        exact = demo_random.run(spec_name, max_new_tokens or 25, draft, error_rate, budget, block_size or 8, dtype, backend, seed, as_json)
    else:
        from kdgen.cli import demo_model

        if list_prompts:
            demo_model.list_prompts(as_json)
            return
        given = demo_model.Given(prompt, prompt_number, max_new_tokens or 192, budget, block_size or 16, dtype, backend)
        exact = demo_model.run(given, tree, as_json)
    ctx.exit(0 if exact else 1)
