"""``kdgen demo``: the main job on a model small enough for any machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import click
import numpy as np

from kdgen.backends import backend_names, open_backend
from kdgen.cli.output import emit_json, emit_table, status
from kdgen.decode import Decoded, decode_plain, decode_tree
from kdgen.drafters.base import Drafter
from kdgen.drafters.ngram import NgramDrafter
from kdgen.drafters.synthetic import AdversarialDrafter, RandomDrafter, ReplayDrafter
from kdgen.engine import Engine
from kdgen.errors import KdgenError
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Limits
from kdgen.spec import Spec, load_spec
from kdgen.weights.random import random_weights

PROMPT_TOKENS = 16
MOST_WEIGHTS = 4e9  #: bytes
DRAFTERS = ("replay", "ngram", "random", "adversarial")


@dataclass(frozen=True)
class Row:
    """One way of decoding. ``exact``: the tokens, and the bits of every committed cache row, are those of plain decoding."""

    method: str
    exact: bool
    forwards: int
    tokens_per_forward: float
    seconds: float


@dataclass(frozen=True)
class Demo:
    spec: str
    compute: str
    backend: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    tree_tokens: tuple[int, ...]
    rows: tuple[Row, ...]
    exact: bool
    note: str


@click.command("demo")
@click.argument("spec_name", metavar="[SPEC]", default="tiny")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=25, show_default=True, help="Tokens to decode.")
@click.option("--draft", type=click.Choice(DRAFTERS), help="One drafter only; without it, several are compared.")
@click.option("--error-rate", type=click.FloatRange(0, 1), help="How often replay is wrong; without it, 0 and 0.2 are shown.")
@click.option("--budget", type=click.IntRange(0, 63), default=15, show_default=True, help="Most draft nodes of a tree.")
@click.option("--block-size", type=click.IntRange(2, 16), default=8, show_default=True, help="Root and deepest draft token.")
@click.option("--dtype", type=click.Choice(["f32", "bf16"]), help="Compute type; the spec decides without it.")
@click.option("--backend", type=click.Choice(backend_names()), help="Where kernels run; a GPU if there is one.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True, help="Of weights, prompt and drafters.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(
    ctx: click.Context, spec_name: str, max_new_tokens: int, draft: str | None, error_rate: float | None, budget: int, block_size: int,
    dtype: Compute | None, backend: str | None, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Decode plainly and with draft trees, and compare tokens, bits and work.

    The model is SPEC (a YAML file or a shipped name) with random weights: what it says means nothing, but every kernel of the full
    architecture runs. Exit code 1 if a draft tree changed anything.
    """
    spec = load_spec(spec_name)
    with status() as say:
        report, engine = _demo(spec, max_new_tokens, draft, error_rate, budget, block_size, dtype, backend, seed, say)
    if as_json:
        emit_json("kdgen.demo/1", report)
    else:
        _print(report, engine, budget, block_size)
    ctx.exit(0 if report.exact else 1)


def _demo(
    spec: Spec, max_new_tokens: int, draft: str | None, error_rate: float | None, budget: int, block_size: int, dtype: Compute | None,
    backend: str | None, seed: int, say: Callable[[str], None],
) -> tuple[Demo, Engine]:  # fmt: skip
    say(f"{spec.name}: generating and compiling kernels")
    engine = _engine(spec, dtype, backend, seed, max_new_tokens)
    prompt = tuple(int(t) for t in np.random.default_rng(seed).integers(0, spec.vocab_size, PROMPT_TOKENS))
    say("decoding plainly")
    plain = decode_plain(engine, prompt, max_new_tokens)
    cache = engine.cache_rows().tobytes()
    committed = engine.length()
    rows, trees = [_row("plain", plain, True)], []
    for label, drafter in _drafters(spec, (*prompt, *plain.tokens), draft, error_rate, seed):
        say(f"decoding with draft trees: {label}")
        tree = decode_tree(engine, prompt, max_new_tokens, drafter, budget, block_size)
        same_cache = engine.length() == committed and engine.cache_rows().tobytes() == cache
        trees.append(tree)
        rows.append(_row(f"tree, {label}", tree, tree.tokens == plain.tokens and same_cache))
    exact = all(row.exact for row in rows)
    note = "the GPU runs one launch at a time here; captured graphs are faster"
    if engine.backend.name != "cuda":
        note = "the CPU emulates the GPU thread by thread: compare forwards, not seconds"
    where = engine.backend.description
    return Demo(spec.name, engine.plan.compute, where, prompt, plain.tokens, trees[0].tokens, tuple(rows), exact, note), engine


def _engine(spec: Spec, dtype: Compute | None, backend: str | None, seed: int, max_new_tokens: int) -> Engine:
    plan = build_plan(spec, dtype, Limits(max_context=min(PROMPT_TOKENS + max_new_tokens, spec.max_position_embeddings)))
    size = sum(w.total_bytes for w in plan.weights)
    if size > MOST_WEIGHTS:
        raise KdgenError(f"{spec.name} has {size / 1e9:.0f} GB of weights, too many for a demonstration: try `kdgen demo tiny`")
    return Engine(spec, plan, open_backend(backend, seed), random_weights(spec, seed).__getitem__)


def _drafters(spec: Spec, truth: tuple[int, ...], draft: str | None, error_rate: float | None, seed: int) -> Iterator[tuple[str, Drafter]]:
    """What to compare, with a label for each."""
    for rate in (0.0, 0.2) if error_rate is None else (error_rate,):
        if draft in (None, "replay"):
            yield f"replay wrong {rate:.0%} of the time", ReplayDrafter(truth, spec.vocab_size, rate, seed)
    if draft in (None, "ngram"):
        yield "ngram (prompt lookup)", NgramDrafter()
    if draft in (None, "random"):
        yield "random", RandomDrafter(spec.vocab_size, seed)
    if draft in (None, "adversarial"):
        yield "adversarial (always wrong)", AdversarialDrafter(truth, spec.vocab_size, seed=seed)


def _row(method: str, decoded: Decoded, exact: bool) -> Row:
    # the first token comes from the prefill
    per_forward = (len(decoded.tokens) - 1) / decoded.target_forwards if decoded.target_forwards else 0.0
    return Row(method, exact, decoded.target_forwards, per_forward, decoded.decode_seconds)


def _print(report: Demo, engine: Engine, budget: int, block_size: int) -> None:
    spec = engine.spec
    click.echo(
        f"{report.spec}: {spec.num_hidden_layers} layers, hidden {spec.hidden_size}, {spec.n_routed_experts or 'no'} experts, "
        f"random weights; {report.compute} on {report.backend}"
    )
    click.echo(f"{len(engine.plan.kernels)} kernels generated for these shapes; trees of at most {budget} nodes, block {block_size}\n")
    click.echo(f"prompt       {_ids(report.prompt)}")
    click.echo(f"plain        {_ids(report.tokens)}")
    click.echo(f"draft tree   {_ids(report.tree_tokens)}\n")
    emit_table(
        ("decoding", "target forwards", "tokens a forward", "seconds", "same tokens and cache bits"),
        [(r.method, str(r.forwards), f"{r.tokens_per_forward:.2f}", f"{r.seconds:.3f}", "yes" if r.exact else "NO") for r in report.rows],
        right=(1, 2, 3),
    )
    click.echo(f"\ngreedy-exact: {'yes' if report.exact else 'NO'}. About the times: {report.note}.")


def _ids(tokens: tuple[int, ...]) -> str:
    return " ".join(map(str, tokens))
