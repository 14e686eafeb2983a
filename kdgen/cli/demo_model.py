"""``kdgen demo``: decode with the shipped model, with draft trees while the text streams, then plainly, and compare."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import click
from rich.text import Text

from kdgen.cli.output import compile_note, console, emit_json, emit_table, status
from kdgen.cli.prompts import as_given, in_utf8, warn_of_room
from kdgen.cli.streaming import Live, harmless, to_nowhere
from kdgen.cli.tree_picture import Node, accepted, draw, guessed, last_tree
from kdgen.demo.prompts import Prompt, read_prompts
from kdgen.drafters.dflash import DFlashDrafter
from kdgen.errors import KdgenError
from kdgen.files.resources import demo_dir
from kdgen.plan.ir import Compute
from kdgen.runtime.decode import Decoded, decode_plain, decode_tree, same_rows
from kdgen.runtime.engine import Engine
from kdgen.runtime.model import open_model, with_drafter
from kdgen.runtime.pipeline import context_for, open_engine
from kdgen.runtime.request import Request
from kdgen.text.tokenizer import Tokenizer, load_tokenizer

#: Colours of consecutive steps in turn; both are legible on dark and on light backgrounds.
STEP_STYLES = ("cyan", "magenta")
BAR = 40  #: characters of the histogram's longest bar


@dataclass(frozen=True)
class Given:
    """The command's options. ``prompt`` is text; None stands for the held-out prompt ``prompt_number``, counted from 1."""

    prompt: str | None
    prompt_number: int
    max_new_tokens: int
    budget: int
    block_size: int
    dtype: Compute | None
    backend: str | None


@dataclass(frozen=True)
class Way:
    """One way of decoding. ``forwards`` leaves out the prompt's forward, which gives the first token."""

    method: str
    forwards: int
    tokens_per_forward: float
    seconds: float

    @classmethod
    def of(cls, method: str, decoded: Decoded) -> Way:
        return cls(method, decoded.target_forwards, decoded.tokens_per_forward, decoded.decode_seconds)


@dataclass(frozen=True)
class Demo:
    """``prompt_path`` and ``prompt_line`` say where the prompt is in the standard library; null if the user gave the prompt.

    ``histogram[i]`` is the number of steps that accepted i + 1 nodes, the root included. ``tree`` is the tree of the step that accepted
    most beyond the first guesses; null unless --tree asked for it.
    """

    backend: str
    dtype: Compute
    budget: int
    block_size: int
    prompt_path: str | None
    prompt_line: int | None
    prompt: str
    tokens: tuple[int, ...]
    text: str
    tree: tuple[Node, ...] | None
    histogram: tuple[int, ...]
    ways: tuple[Way, ...]
    same_tokens: bool
    same_cache_bits: bool
    note: str


@dataclass(frozen=True)
class Listed:
    number: int
    path: str
    line: int
    text: str


@dataclass(frozen=True)
class Listing:
    prompts: tuple[Listed, ...]


def list_prompts(as_json: bool) -> None:
    found = [Listed(number, each.path, each.line, each.text) for number, each in enumerate(read_prompts(demo_dir() / "prompts.json"), 1)]
    if as_json:
        emit_json("kdgen.demo-prompts/1", Listing(tuple(found)))
        return
    rows = [(str(each.number), f"{each.path}:{each.line}", each.text.strip().partition("\n")[0][:32]) for each in found]
    emit_table(("number", "held-out source", "begins"), rows, right=(0,))


def run(given: Given, with_tree: bool, as_json: bool) -> bool:
    """Decode and print. Returns whether both ways gave the same tokens and cache bits."""
    folder = demo_dir()
    model = with_drafter(open_model(folder / "model-int4"), folder / "drafter")
    spec, tokenizer = model.spec, load_tokenizer(model.text)
    prompt = _prompt(given, tokenizer)
    context = context_for(spec, len(prompt.tokens), given.max_new_tokens)
    warn_of_room(context, len(prompt.tokens), given.max_new_tokens)
    with status() as say:
        say("generating and compiling kernels (later runs read them from the cache)")
        engine = open_engine(model, context, given.dtype, given.backend, compiling=compile_note).engine
    if not as_json:
        click.echo(f"A small language model of Python source, {engine.plan.compute} on {engine.backend.description}.")
        click.echo(f"{len(engine.plan.kernels)} kernels made for it; draft trees of at most {given.budget} nodes.")
        click.echo(_legend(prompt) + "\n")
    trees: list[tuple[Node, ...]] = []
    with contextlib.ExitStack() as waiting:
        waiting.enter_context(status())("reading the prompt")
        live = Live(tokenizer, spec.eos_token_id, *((to_nowhere,) if as_json else (_painter(prompt.text), waiting.close)))

        def emit(tokens: tuple[int, ...]) -> None:
            if live.steps and with_tree:
                trees.append(last_tree(engine))
            live(tokens)

        request = Request(prompt.tokens, given.max_new_tokens, spec.eos_token_id)
        drafted = replace(request, drafter=DFlashDrafter(given.block_size), budget=given.budget, block_size=given.block_size)
        try:
            tree = decode_tree(engine, drafted, emit=emit)
        finally:
            if live.steps:
                live.finish()
    rows = engine.cache_rows()
    with status() as say:
        say("decoding the same plainly, one token a forward")
        plain = decode_plain(engine, Request(prompt.tokens, given.max_new_tokens, stop=spec.eos_token_id))
    same_bits = same_rows(engine.cache_rows(), rows)
    counts = Counter(tree.acceptance_lengths)
    report = Demo(
        backend=engine.backend.description,
        dtype=engine.plan.compute,
        budget=given.budget,
        block_size=given.block_size,
        prompt_path=prompt.path or None,
        prompt_line=prompt.line or None,
        prompt=prompt.text,
        tokens=tree.tokens,
        text=live.text,
        tree=max(trees, key=lambda nodes: (accepted(nodes) - guessed(nodes), accepted(nodes)), default=None),
        histogram=tuple(counts[length] for length in range(1, max(counts, default=0) + 1)),
        ways=(Way.of("draft trees", tree), Way.of("plain", plain)),
        same_tokens=tree.tokens == plain.tokens,
        same_cache_bits=same_bits,
        note=_note_on_times(engine),
    )
    if as_json:
        emit_json("kdgen.demo-model/1", report)
    else:
        _print(report, tokenizer)
    return report.same_tokens and report.same_cache_bits


def _prompt(given: Given, tokenizer: Tokenizer) -> Prompt:
    if given.prompt is not None:
        if not given.prompt:
            raise KdgenError("--prompt: the prompt is empty: give it some text, or leave it out")
        return Prompt("", 0, tokenizer.encode(in_utf8(as_given(given.prompt), "--prompt"), begin=True))
    prompts = read_prompts(demo_dir() / "prompts.json")
    if given.prompt_number > len(prompts):
        raise KdgenError(
            f"--prompt-number: there are {len(prompts)} held-out prompts, and no {given.prompt_number}th; --list-prompts shows them"
        )
    return prompts[given.prompt_number - 1]


def _legend(prompt: Prompt) -> str:
    source = f"Prompt: {prompt.path}, line {prompt.line}, not trained on." if prompt.path else "Prompt: as given."
    out = console()
    return source if out.color_system is None or out.no_color else f"{source}\nThe colour changes with every step."


def _painter(prompt: str) -> Callable[[str], None]:
    """A function that writes the prompt before its first text, and each step's text in the other colour."""
    out, steps = console(), 0

    def write(text: str) -> None:
        nonlocal steps
        if not steps:
            out.print(Text(harmless(prompt), style="dim"), end="", soft_wrap=True)
        style = STEP_STYLES[steps % len(STEP_STYLES)]
        steps += 1
        out.print(Text(harmless(text), style=style), end="", soft_wrap=True)
        sys.stdout.flush()

    return write


def _print(report: Demo, tokenizer: Tokenizer) -> None:
    out = console()
    if report.tree:
        count, of, chain = accepted(report.tree), len(report.tree), guessed(report.tree)
        click.echo(f"\nThe step in which the tree gained most: {count} of {of} nodes accepted (✓), the root included;")
        click.echo(f"a chain of the first guesses would have had {chain} accepted.")
        out.print(draw(report.tree, tokenizer))
    click.echo()
    emit_table(
        ("decoding", "target forwards", "tokens a forward", "seconds"),
        [(way.method, str(way.forwards), f"{way.tokens_per_forward:.2f}", f"{way.seconds:.2f}") for way in report.ways],
        right=(1, 2, 3),
    )
    if report.histogram:
        click.echo("\nnodes accepted in a step, the root included, and the number of such steps")
    most = max(report.histogram, default=1)
    for length, count in enumerate(report.histogram, 1):
        click.echo(f"{length:4} {'█' * -(-count * BAR // most)} {count}")
    tokens, bits = ("yes" if same else "NO" for same in (report.same_tokens, report.same_cache_bits))
    click.echo(f"\nsame tokens: {tokens}; same bits in every cache row: {bits}.")
    click.echo(f"Times: {report.note}.")


def _note_on_times(engine: Engine) -> str:
    if engine.backend.name == "cuda":
        return "the first step of each size is recorded as a CUDA graph, which takes longer"
    return "the CPU emulates every GPU thread: compare forwards, not seconds"
