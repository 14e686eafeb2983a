"""``kdgen generate``: decode with a model's weights, plainly or with draft trees."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click

from kdgen.backends import backend_names
from kdgen.cli.generate_options import DRAFTERS, Options, check_options
from kdgen.cli.generate_report import Run, Timings, report_of, summary
from kdgen.cli.options import Float, FloatRange, Integer, IntRange
from kdgen.cli.output import byte_progress, compile_note, emit_json, status, warn
from kdgen.cli.prompts import encode_prompt, read_prompt, read_text, warn_of_room
from kdgen.cli.ranks import agreed_ranks
from kdgen.cli.streaming import Live, to_nowhere, to_stdout
from kdgen.drafters.base import Drafter
from kdgen.drafters.by_name import OF_USERS, Making, drafter_called
from kdgen.errors import KdgenError
from kdgen.plan.ir import MAX_NODES, MAX_PATH
from kdgen.plan.ops.many_rows import CHUNK_TOKENS
from kdgen.plan.shard import EXCHANGES, Shard, check_shard
from kdgen.ranks.group import Group, joined
from kdgen.ranks.place import Place, place_in
from kdgen.ranks.start import own_command, run_ranks
from kdgen.runtime.decode import Decoded, Decoder, decode_plain, same_rows
from kdgen.runtime.engine import Engine
from kdgen.runtime.model import Model, open_model, random_model, with_drafter
from kdgen.runtime.pipeline import Ranks, check_plan, context_for, open_engine
from kdgen.runtime.request import Request
from kdgen.spec.model import Spec
from kdgen.text.tokenizer import Tokenizer, load_tokenizer

CPU_BUDGET = 15  #: draft nodes of a tree by default; on the CPU, times of emulated kernels cannot choose a budget


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
@click.option("--model", required=True, metavar="DIR|FILE.kdtr", help="A published model's folder, or a file made by `kdgen import`.")
@click.option("--prompt", metavar="TEXT|-", help="The prompt; if - or left out, read from stdin without the newline at its end.")
@click.option("--prompt-ids", metavar="IDS|@FILE", help="The prompt's token ids instead: 5,17,9, or a file of them.")
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template, as a user's message.")
@click.option("--system", metavar="TEXT", help="With --chat: a system message before the user's.")
@click.option("--text", "as_text", is_flag=True, help="With --prompt-ids: print text, not token ids.")
@click.option("--max-new-tokens", type=IntRange(min=1), default=32, show_default=True, help="Most tokens to decode.")
@click.option(
    "--draft",
    metavar="NAME|DIR",
    default="none",
    show_default=True,
    callback=_drafter_name,
    help="What proposes draft trees: a published DFlash drafter's folder; ngram, which searches the text so far; or none. With"
    " --random-weights also dflash, a drafter with random weights.",
)
@click.option(
    "--draft-amplitude", type=FloatRange(min=0, min_open=True), help="YaRN attention factor of the drafter, instead of its config's."
)
@click.option("--chain", is_flag=True, help="Use only the DFlash drafter's best token at each depth: a chain instead of a tree.")
@click.option(
    "--budget",
    metavar="N|auto",
    callback=_budget,
    help=f"Most draft nodes in a tree; auto chooses by measured times.  [default: auto on a GPU, {CPU_BUDGET} on a CPU]",
)
@click.option(
    "--block-size", type=IntRange(2, MAX_PATH), default=8, show_default=True, help="Most nodes on a path of a tree, its root counted."
)
@click.option("--backend", type=click.Choice(backend_names()), help="Where kernels run; if left out, on a GPU if there is one.")
@click.option("--dtype", type=click.Choice(["f32", "bf16"]), help="Compute type; the model's own if left out.")
@click.option("--context", type=IntRange(min=1), help="Tokens that the cache has room for; if left out, as many as prompt and output need.")
@click.option(
    "--chunk",
    type=IntRange(1, CHUNK_TOKENS),
    help="Most prompt tokens in a forward; changes no bit of the result.  [default: 2048 on one Hopper GPU, otherwise 64]",
)
@click.option(
    "--temperature", type=Float(), default=0.0, show_default=True, help="Draw tokens at this temperature; 0 takes the most probable token."
)
@click.option(
    "--top-k", type=Integer(), default=0, show_default=True, help="With --temperature: draw from the k most probable tokens; 0: from all."
)
@click.option(
    "--top-p",
    type=Float(),
    default=1.0,
    show_default=True,
    help="With --temperature: draw from the most probable tokens whose probabilities add up to this.",
)
@click.option(
    "--min-p",
    type=Float(),
    default=0.0,
    show_default=True,
    help="With --temperature: leave out tokens whose probability is below this fraction of the most probable one's.",
)
@click.option(
    "--sample-seed",
    type=Integer(),
    default=0,
    show_default=True,
    help="With --temperature: the same seed draws the same tokens, with or without drafts.",
)
@click.option("--ignore-eos", is_flag=True, help="Do not stop at the model's end-of-sequence tokens.")
@click.option(
    "--check-exact",
    is_flag=True,
    help="Also decode plainly, and compare tokens and the bits of every cache row. The exit code is 1 if any differ. Takes at least twice"
    " the time.",
)
@click.option("--random-weights", is_flag=True, help="Use random weights; --model is then a spec's name or file, or a config's folder.")
@click.option("--layers", type=IntRange(min=1), help="With --random-weights: use only the first N layers.")
@click.option("--seed", type=IntRange(0, 2**64 - 1), default=0, show_default=True, help="Seed of random weights.")
@click.option(
    "--tp",
    type=IntRange(min=1),
    help="GPUs (or CPU processes) that share the model; this command starts them unless torchrun, mpirun or srun did.",
)
@click.option(
    "--exchange",
    type=click.Choice(EXCHANGES),
    help="How ranks exchange data: peer memory, or gathers by NCCL.  [default: peer if they reach each other's memory]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema kdgen.generate/1).")
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> None:
    """Decode with a model's weights, plainly or with draft trees. Draft trees change the time, and no token: neither the most probable
    ones nor those drawn with a --temperature.

    The model is a published folder: config.json, safetensors (unquantized or with INT4 experts), and a tokenizer if the prompt is text.
    The text goes to stdout while it is decoded, statistics go to stderr. Ctrl-C stops decoding and still prints statistics. A prompt may
    spell out special tokens.

    Without --draft, --check-exact compares with a run whose prompt is read one token a forward.
    """
    options = Options(**given)
    check_options(options, ctx.get_parameter_source("temperature") is not click.core.ParameterSource.DEFAULT)
    place = place_in(os.environ)
    ranks = agreed_ranks(place, options.tp, options.exchange)
    first = place is None or place.rank == 0
    text = read_text(options.prompt) if options.prompt_ids is None and first else ""
    with status() as say, _report_to_ranks(place):
        say(f"opening {options.model}")
        model = _open(options)
        for note in model.notes if first else ():
            warn(note)
        tokenizer = load_tokenizer(model.text) if options.as_text or options.prompt_ids is None else None
    check_shard(model.spec, Shard(ranks))  # every rank gets the same result here, so no rank waits for another
    prompt = partial(_prompt_tokens, options, model, tokenizer, text)
    if place is None and ranks > 1:
        ctx.exit(_start_ranks(options, model, ranks, prompt(), text))
    with joined(place) as group:
        code = _generate(options, model, tokenizer, _from_rank_0(group, prompt), group)
    ctx.exit(code)


def _open(options: Options) -> Model:
    if options.random_weights:
        model = random_model(options.model, options.layers, options.seed, options.draft == "dflash")
    else:
        model = open_model(Path(options.model))
    return model if options.draft in DRAFTERS else with_drafter(model, Path(options.draft), options.draft_amplitude)


def _prompt_tokens(options: Options, model: Model, tokenizer: Tokenizer | None, text: str) -> tuple[int, ...]:
    vocab_size = model.spec.vocab_size
    if options.prompt_ids is not None or tokenizer is None:
        return read_prompt(options.prompt_ids or "", vocab_size)
    return encode_prompt(model.text, tokenizer, text, options.chat, options.system_text(), vocab_size)


def _start_ranks(options: Options, model: Model, ranks: int, prompt: tuple[int, ...], text: str) -> int:
    """Run this command as ``ranks`` processes and return the job's exit code. Refuses first what every rank would refuse."""
    room = context_for(model.spec, len(prompt), options.max_new_tokens, options.context)
    check_plan(model, room, options.dtype, Shard(ranks))
    piped = f"{text}\n".encode() if options.prompt_ids is None and options.prompt in (None, "-") else None
    try:
        return run_ranks(own_command(sys.argv[1:]), ranks, given=piped)
    except KeyboardInterrupt:
        return 130  # rank 0 has printed its statistics


def _generate(options: Options, model: Model, tokenizer: Tokenizer | None, prompt: tuple[int, ...], group: Group | None) -> int:
    """Build the engine, decode, report, and return the exit code."""
    rank = group.rank if group else 0
    room = context_for(model.spec, len(prompt), options.max_new_tokens, options.context)
    if not rank:
        warn_of_room(room, len(prompt), options.max_new_tokens)
    stop = () if options.ignore_eos else tuple(dict.fromkeys((*model.spec.eos_token_id, *model.text.end_tokens())))
    if group:
        _need_same_options(group, options, stop)
    with byte_progress(f"{model.spec.name}: compiling kernels", f"{model.spec.name}: loading weights") as bar:
        note = contextlib.nullcontext if rank else compile_note
        exchange = Ranks(group, options.exchange) if group else None
        opened = open_engine(model, room, options.dtype, options.backend, options.seed, bar, exchange, note)
    budget = options.budget if options.budget is not None else "auto" if opened.engine.backend.name == "cuda" else CPU_BUDGET
    run = Run(
        prompt, options.max_new_tokens, stop, options.draft, options.chain, budget, options.block_size, options.chunk, options.seed,
        options.sampling,
    )  # fmt: skip
    interrupted = False
    with contextlib.ExitStack() as waiting:
        say = waiting.enter_context(status())
        live = Live(tokenizer, stop, *((to_nowhere,) if options.as_json or rank else (to_stdout, waiting.close)))
        try:
            decoded, exact = _decode(opened.engine, run, options.check_exact, live, say)
        except KeyboardInterrupt:
            if not live.steps:
                raise
            interrupted, decoded, exact = True, live.decoded(options.draft != "none"), None
    live.finish()
    if group and exact is not None:
        exact = all(json.loads(each) for each in group.exchange(json.dumps(exact).encode()))  # each rank compares its own cache
    if not rank:
        seconds = (decoded.prefill_seconds, decoded.prepare_seconds, decoded.decode_seconds)
        timings = Timings(opened.build_seconds, opened.load_seconds, *seconds, live.first_token)
        report = report_of(options.model, opened, run, decoded, timings, live.text if tokenizer else None, interrupted, exact)
        if options.as_json:
            emit_json("kdgen.generate/1", report)
        else:
            click.echo(summary(report, opened.engine), err=True)
    if interrupted and group:
        raise SystemExit(130)  # through the group's block, which reports it to the other ranks
    return 130 if interrupted else 1 if exact is False else 0


def _need_same_options(group: Group, options: Options, stop: tuple[int, ...]) -> None:
    """Raises BackendError unless all ranks decode with the same options."""
    drafter = options.draft if options.draft in DRAFTERS else "dflash"  # its folder may have another path on another host
    group.need_same(
        {
            "--max-new-tokens": options.max_new_tokens, "end-of-sequence tokens": stop, "--draft": drafter, "--chain": options.chain,
            "--budget": options.budget, "--block-size": options.block_size, "--chunk": options.chunk, "--seed": options.seed,
            "options of sampling": options.sampling, "--check-exact": options.check_exact,
        }
    )  # fmt: skip


@contextlib.contextmanager
def _report_to_ranks(place: Place | None) -> Iterator[None]:
    """While the block runs before the ranks are joined, report its error to them, so that they do not wait for this rank."""
    try:
        yield
    except KdgenError:
        with joined(place):
            raise


def _from_rank_0(group: Group | None, prompt: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
    """The prompt's tokens, by a call of ``prompt`` on rank 0, because only rank 0 has the input."""
    if group is None:
        return prompt()
    return tuple(json.loads(group.exchange(json.dumps(() if group.rank else prompt()).encode())[0]))


def _decode(engine: Engine, run: Run, check: bool, live: Live, say: Callable[[str], None]) -> tuple[Decoded, bool | None]:
    """Decode ``run`` and show its tokens on ``live``. With ``check``, the second value is whether plain decoding gives the same."""
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
    name = run.draft if run.draft in OF_USERS else "dflash"  # otherwise it is a drafter's folder
    return drafter_called(name, Making(spec.vocab_size, block_size=block_size, chain=run.chain))
