"""``kdgen generate``: decode with a model's weights."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import click

from kdgen.backends import backend_names
from kdgen.cli.generate_report import Run, Timings, report_of, summary
from kdgen.cli.options import Float, FloatRange, Integer, IntRange
from kdgen.cli.output import byte_progress, compile_note, emit_json, status, warn
from kdgen.cli.prompts import as_given, encode_prompt, in_utf8, read_prompt, read_text, warn_of_room
from kdgen.cli.ranks import agreed_ranks
from kdgen.cli.streaming import Live, to_nowhere, to_stdout
from kdgen.drafters.base import Drafter
from kdgen.drafters.by_name import OF_USERS, Making, drafter_called
from kdgen.errors import KdgenError
from kdgen.plan.ir import MAX_NODES, MAX_PATH, Compute
from kdgen.plan.ops.many_rows import CHUNK_TOKENS
from kdgen.plan.shard import EXCHANGES, Exchange, Shard, check_shard
from kdgen.ranks.group import Group, joined
from kdgen.ranks.place import Place, place_in
from kdgen.ranks.start import own_command, run_ranks
from kdgen.runtime.decode import Decoded, Decoder, decode_plain, same_rows
from kdgen.runtime.engine import Engine
from kdgen.runtime.model import open_model, random_model, with_drafter
from kdgen.runtime.pipeline import Ranks, check_plan, context_for, open_engine
from kdgen.runtime.request import Request
from kdgen.spec.model import Spec
from kdgen.spec.sampling import GREEDY, Sampling
from kdgen.text.tokenizer import load_tokenizer

CPU_BUDGET = 15  #: emulated times say nothing about what pays
DRAFTERS = ("none", *OF_USERS)


def _drafter_name(_ctx: click.Context, _param: click.Parameter, text: str) -> str:
    if text not in DRAFTERS and not (text and Path(text).is_dir()):
        raise click.BadParameter(f"{text!r} is neither a drafter's folder nor one of {', '.join(DRAFTERS)}")
    return text


def _budget(_ctx: click.Context, _param: click.Parameter, text: str | None) -> int | Literal["auto"] | None:
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if re.fullmatch("[0-9]{1,4}", text) and int(text) < MAX_NODES:
        return int(text)
    raise click.BadParameter(f"{text!r} is neither auto nor a number from 0 to {MAX_NODES - 1}")


@click.command("generate", short_help="Continue text or token ids with a model's weights, plainly or with draft trees.")
@click.option("--model", required=True, metavar="DIR|FILE.kdtr", help="A published model's folder, or what `kdgen import` made of it.")
@click.option("--prompt", metavar="TEXT|-", help="The prompt; - or nothing: what is piped in, less a newline at its end.")
@click.option("--prompt-ids", metavar="IDS|@FILE", help="The prompt's token ids instead: 5,17,9, or a file of them.")
@click.option("--chat", is_flag=True, help="The prompt is a message, put into the model's chat template.")
@click.option("--system", metavar="TEXT", help="With --chat: the system message before it.")
@click.option("--text", "as_text", is_flag=True, help="With --prompt-ids: print text, not token ids.")
@click.option("--max-new-tokens", type=IntRange(min=1), default=32, show_default=True, help="Tokens to decode at most.")
@click.option(
    "--draft",
    metavar="NAME|DIR",
    default="none",
    show_default=True,
    callback=_drafter_name,
    help="Who proposes draft trees: a published DFlash drafter's folder; ngram, which looks in the text so far; none. With --random-weights"
    " also dflash, a drafter with such weights.",
)
@click.option("--draft-amplitude", type=FloatRange(min=0, min_open=True), help="Amplitude of a drafter's YaRN, instead of its config's.")
@click.option("--chain", is_flag=True, help="A DFlash drafter's best token at each depth, and no tree.")
@click.option(
    "--budget",
    metavar="N|auto",
    callback=_budget,
    help=f"Most draft nodes of a tree; auto: as many as pay. [default: auto on a GPU, {CPU_BUDGET} on a CPU]",
)
@click.option("--block-size", type=IntRange(2, MAX_PATH), default=8, show_default=True, help="Root and deepest draft token.")
@click.option("--backend", type=click.Choice(backend_names()), help="Where kernels run; a GPU if there is one.")
@click.option("--dtype", type=click.Choice(["f32", "bf16"]), help="Compute type; the model decides without it.")
@click.option("--context", type=IntRange(min=1), help="Tokens to make room for; as many as prompt and output need without it.")
@click.option(
    "--chunk",
    type=IntRange(1, CHUNK_TOKENS),
    help="Most prompt tokens a forward; changes no bit. [default: 2048 on one Hopper GPU, 64 elsewhere]",
)
@click.option("--temperature", type=Float(), default=0.0, show_default=True, help="Draw tokens at this temperature; 0 takes the likeliest.")
@click.option(
    "--top-k", type=Integer(), default=0, show_default=True, help="With --temperature: draw from the k likeliest tokens; 0: from all."
)
@click.option(
    "--top-p",
    type=Float(),
    default=1.0,
    show_default=True,
    help="With --temperature: draw from the likeliest tokens that together have this probability.",
)
@click.option(
    "--min-p",
    type=Float(),
    default=0.0,
    show_default=True,
    help="With --temperature: leave out tokens less likely than this part of the likeliest.",
)
@click.option(
    "--sample-seed",
    type=Integer(),
    default=0,
    show_default=True,
    help="With --temperature: the same seed draws the same tokens, with drafts or without.",
)
@click.option("--ignore-eos", is_flag=True, help="Go on past the model's end-of-sequence tokens.")
@click.option(
    "--check-exact",
    is_flag=True,
    help="Decode a second time, plainly, and compare tokens and the bits of every cache row: exit code 1 if any differ, and at least"
    " twice the time. Off without it.",
)
@click.option("--random-weights", is_flag=True, help="Make weights up; --model is then a spec (name or file) or a config's folder.")
@click.option("--layers", type=IntRange(min=1), help="With --random-weights: the first so many layers only.")
@click.option("--seed", type=IntRange(0, 2**64 - 1), default=0, show_default=True, help="Of random weights and drafters.")
@click.option(
    "--tp",
    type=IntRange(min=1),
    help="GPUs (or CPU processes) that share the model, started here unless torchrun, mpirun or srun did.",
)
@click.option(
    "--exchange",
    type=click.Choice(EXCHANGES),
    help="How ranks exchange: peer memory, or gathers by NCCL. [default: peer where they reach each other's memory]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema kdgen.generate/1).")
@click.pass_context
def command(
    ctx: click.Context, model: str, prompt: str | None, prompt_ids: str | None, chat: bool, system: str | None, as_text: bool,
    max_new_tokens: int, draft: str, draft_amplitude: float | None, chain: bool, budget: int | Literal["auto"] | None,
    block_size: int,
    backend: str | None, dtype: Compute | None, context: int | None, chunk: int | None, temperature: float, top_k: int, top_p: float,
    min_p: float, sample_seed: int, ignore_eos: bool, check_exact: bool, random_weights: bool, layers: int | None, seed: int,
    tp: int | None, exchange: Exchange | None, as_json: bool,
) -> None:  # fmt: skip
    """Decode with a model's weights, plainly or with draft trees, which change the time it takes and nothing else: neither the likeliest
    tokens nor those drawn with a --temperature.

    The model is a folder as published: config.json and safetensors, unquantized or with INT4 experts, and its tokenizer for text. What
    it says goes to stdout as it comes, statistics to stderr. Ctrl-C ends it with those. Special tokens may be written out in a prompt.

    Without --draft, --check-exact compares with a run that takes the prompt token by token.
    """
    if draft == "dflash" and not random_weights:
        raise click.UsageError("--draft dflash makes a drafter up: add --random-weights, or name the drafter's folder")
    if draft_amplitude is not None and draft in DRAFTERS:
        raise click.UsageError("--draft-amplitude belongs to a drafter's folder: name one with --draft")
    if chain and draft in DRAFTERS and draft != "dflash":
        raise click.UsageError("--chain is for DFlash drafters")
    if layers is not None and not random_weights:
        raise click.UsageError("--layers cuts a model with made-up weights: add --random-weights")
    if prompt_ids is not None and (prompt is not None or chat):
        raise click.UsageError("--prompt-ids stands for the whole prompt: leave out --prompt and --chat")
    if system is not None and not chat:
        raise click.UsageError("--system is a message of a chat: add --chat")
    if system is not None:
        system = in_utf8(as_given(system), "--system")
    sampling = Sampling(temperature, top_k, top_p, min_p, sample_seed)
    if temperature == 0 and sampling != GREEDY:
        values = {"--top-k": (top_k, 0), "--top-p": (top_p, 1), "--min-p": (min_p, 0), "--sample-seed": (sample_seed, 0)}
        idle = " and ".join(option for option, (value, without) in values.items() if value != without)
        if ctx.get_parameter_source("temperature") is click.core.ParameterSource.DEFAULT:
            raise click.UsageError(f"{idle}: for drawing tokens: add --temperature")
        raise click.UsageError(f"{idle}: without effect at --temperature 0, which takes the likeliest token: leave it out, or raise that")
    place = place_in(os.environ)
    ranks = agreed_ranks(place, tp, exchange)
    first = place is None or place.rank == 0
    given = read_text(prompt) if prompt_ids is None and first else ""
    with status() as say, _told(place):
        say(f"opening {model}")
        opened_model = random_model(model, layers, seed, draft == "dflash") if random_weights else open_model(Path(model))
        if draft not in DRAFTERS:
            opened_model = with_drafter(opened_model, Path(draft), draft_amplitude)
        for note in opened_model.notes if first else ():
            warn(note)
        spec, files = opened_model.spec, opened_model.text
        tokenizer = load_tokenizer(files) if as_text or prompt_ids is None else None
    check_shard(spec, Shard(ranks))  # which every rank finds alike, so that none waits for others

    def prompt_tokens() -> tuple[int, ...]:
        if prompt_ids is not None or tokenizer is None:
            return read_prompt(prompt_ids or "", spec.vocab_size)
        return encode_prompt(files, tokenizer, given, chat, system, spec.vocab_size)

    if place is None and ranks > 1:
        room = context_for(spec, len(prompt_tokens()), max_new_tokens, context)
        check_plan(opened_model, room, dtype, Shard(ranks))
        piped = f"{given}\n".encode() if prompt_ids is None and prompt in (None, "-") else None
        try:
            ctx.exit(run_ranks(own_command(sys.argv[1:]), ranks, given=piped))
        except KeyboardInterrupt:
            ctx.exit(130)  # the first rank has said what there is to say
    with joined(place) as group:
        rank = group.rank if group else 0
        tokens = _from_first(group, () if rank else prompt_tokens())
        room = context_for(spec, len(tokens), max_new_tokens, context)
        if not rank:
            warn_of_room(room, len(tokens), max_new_tokens)
        stop = () if ignore_eos else tuple(dict.fromkeys((*spec.eos_token_id, *files.end_tokens())))
        if group:
            who = draft if draft in DRAFTERS else "dflash"  # whose folder may have another path on another host
            group.need_same(
                {
                    "--max-new-tokens": max_new_tokens, "end-of-sequence tokens": stop, "--draft": who, "--chain": chain,
                    "--budget": budget, "--block-size": block_size, "--chunk": chunk, "--seed": seed,
                    "options of sampling": sampling, "--check-exact": check_exact,
                }
            )  # fmt: skip
        with byte_progress(f"{spec.name}: compiling kernels", f"{spec.name}: loading weights") as bar:
            say_so = contextlib.nullcontext if rank else compile_note
            opened = open_engine(opened_model, room, dtype, backend, seed, bar, Ranks(group, exchange) if group else None, say_so)
        if budget is None:
            budget = "auto" if opened.engine.backend.name == "cuda" else CPU_BUDGET
        run = Run(tokens, max_new_tokens, stop, draft, chain, budget, block_size, chunk, seed, sampling)
        interrupted = False
        with contextlib.ExitStack() as waiting:
            say = waiting.enter_context(status())
            live = Live(tokenizer, stop, *((to_nowhere,) if as_json or rank else (to_stdout, waiting.close)))
            try:
                decoded, exact = _decode(opened.engine, run, check_exact, live, say)
            except KeyboardInterrupt:
                if not live.steps:
                    raise
                interrupted, decoded, exact = True, live.decoded(draft != "none"), None
        live.finish()
        if group and exact is not None:
            exact = all(json.loads(each) for each in group.exchange(json.dumps(exact).encode()))  # each compares a cache of its own
        seconds = (decoded.prefill_seconds, decoded.prepare_seconds, decoded.decode_seconds)
        timings = Timings(opened.build_seconds, opened.load_seconds, *seconds, live.first_token)
        report = report_of(model, opened, run, decoded, timings, live.text if tokenizer else None, interrupted, exact)
        if as_json and not rank:
            emit_json("kdgen.generate/1", report)
        elif not rank:
            click.echo(summary(report, opened.engine), err=True)
        if interrupted and group:
            raise SystemExit(130)  # out of the block, for the other ranks must hear of it
    ctx.exit(130 if interrupted else 1 if exact is False else 0)


@contextlib.contextmanager
def _told(place: Place | None) -> Iterator[None]:
    """While the block runs before the ranks meet, they do once it has failed: the others hear why, and need not wait for this one."""
    try:
        yield
    except KdgenError:
        with joined(place):
            raise


def _from_first(group: Group | None, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Rank 0's ``tokens``: it alone has the input."""
    return tokens if group is None else tuple(json.loads(group.exchange(json.dumps(tokens).encode())[0]))


def _decode(engine: Engine, run: Run, check: bool, live: Live, say: Callable[[str], None]) -> tuple[Decoded, bool | None]:
    """The run asked for, shown on ``live``, and whether it equals plain decoding where that was asked too."""
    name = engine.spec.name
    request = Request(run.prompt, run.max_new_tokens, run.stop, run.sampling, run.chunk or 0)
    plain = None
    if check:
        say(f"{name}: decoding plainly first")
        plain = decode_plain(engine, replace(request, chunk=1) if run.draft == "none" else request)
    rows = engine.cache_rows() if check else None
    say(f"{name}: reading the prompt")
    live.begin()
    drafter = _drafter(run, engine.spec)
    budget = 0 if run.budget == "auto" else run.budget
    request = replace(request, drafter=drafter, budget=budget, block_size=run.block_size)
    decoded = Decoder(engine).decode(request, run.budget == "auto", live)
    if plain is None or rows is None:
        return decoded, None
    return decoded, decoded.tokens == plain.tokens and same_rows(rows, engine.cache_rows())


def _drafter(run: Run, spec: Spec) -> Drafter | None:
    if run.draft == "none":
        return None
    block_size = min(run.block_size, spec.draft.block_size) if spec.draft else run.block_size
    name = run.draft if run.draft in OF_USERS else "dflash"  # else it is the folder of one
    return drafter_called(name, Making(spec.vocab_size, block_size=block_size, chain=run.chain))
