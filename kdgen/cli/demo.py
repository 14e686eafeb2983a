"""``kdgen demo``: the options of the command. demo_model.py runs it."""

from __future__ import annotations

import click
from click.core import ParameterSource

from kdgen.backends import backend_names
from kdgen.cli.options import IntRange
from kdgen.plan.ir import MAX_NODES, MAX_PATH, Compute


@click.command("demo", short_help="Decode with draft trees and plainly, and compare.")
@click.option("--prompt", metavar="TEXT", help="Python source to continue.")
@click.option(
    "--prompt-number", type=IntRange(min=1), default=4, show_default=True, help="Number of a held-out prompt, instead of --prompt."
)
@click.option("--list-prompts", is_flag=True, help="Show the held-out prompts, and decode nothing.")
@click.option("--tree", is_flag=True, help="Draw the draft tree of the step in which it gained most.")
@click.option("--max-new-tokens", type=IntRange(min=1), default=192, show_default=True, help="Tokens to decode.")
@click.option("--budget", type=IntRange(0, MAX_NODES - 1), default=15, show_default=True, help="Most draft nodes in a tree.")
@click.option(
    "--block-size", type=IntRange(2, MAX_PATH), default=16, show_default=True, help="Most nodes on a path of a tree, its root counted."
)
@click.option("--dtype", type=click.Choice(["f32", "bf16"]), help="Compute type; the model's own if left out.")
@click.option("--backend", type=click.Choice(backend_names()), help="Where kernels run; if left out, on a GPU if there is one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema kdgen.demo-model/1).")
@click.pass_context
def command(
    ctx: click.Context, prompt: str | None, prompt_number: int, list_prompts: bool, tree: bool, max_new_tokens: int, budget: int,
    block_size: int, dtype: Compute | None, backend: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Decode with draft trees and plainly, and compare tokens, bits and work.

    The small model shipped with kdgen continues Python source that it was not trained on. On a terminal, the colour of its text changes
    with every step. The exit code is 1 if draft trees changed anything. `kdgen generate --model SPEC --random-weights --check-exact`
    compares the same for any model.
    """
    if sum((prompt is not None, list_prompts, ctx.get_parameter_source("prompt_number") is ParameterSource.COMMANDLINE)) > 1:
        raise click.UsageError("--prompt, --prompt-number and --list-prompts do not go together: give one of them")
    from kdgen.cli import demo_model  # not for --help

    if list_prompts:
        demo_model.list_prompts(as_json)
        return
    given = demo_model.Given(prompt, prompt_number, max_new_tokens, budget, block_size, dtype, backend)
    ctx.exit(0 if demo_model.run(given, tree, as_json) else 1)
