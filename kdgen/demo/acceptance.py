"""How many tokens a forward gives on held-out prompts: ``python -m kdgen.demo.acceptance [TRAINED]``.

TRAINED is a folder written by ``kdgen.demo.train``; without it, the shipped model is measured.

Every prompt is decoded plainly, with chains of the drafter, and with trees of several budgets; all must give the same tokens. A round's
acceptance length counts the root, so 1 means that no drafted token was accepted. Prints a table, or JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kdgen.demo.prompts import read_prompts
from kdgen.drafters.dflash import DFlashDrafter
from kdgen.errors import KdgenError
from kdgen.files.resources import demo_dir
from kdgen.runtime.decode import decode_plain, decode_tree
from kdgen.runtime.engine import Engine
from kdgen.runtime.model import open_model, with_drafter
from kdgen.runtime.pipeline import open_engine
from kdgen.runtime.request import Request
from kdgen.spec.drafter import no_drafter

BUDGETS = (7, 15, 31, 63)
SCHEMA = "kdgen.acceptance/1"


@dataclass(frozen=True)
class Accepted:
    """The results of one way of drafting over all prompts. ``histogram[i]`` is the number of rounds with acceptance length i + 1."""

    method: str
    mean: float
    rounds: int
    tokens: int
    histogram: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    model: str
    backend: str
    dtype: str
    prompts: int
    new_tokens: int
    rows: tuple[Accepted, ...]


def measure(engine: Engine, prompts: Sequence[tuple[int, ...]], new_tokens: int) -> Iterator[Accepted]:
    """Measure chains, then trees. Raises KdgenError when a draft changes a token, which would be a bug."""
    draft = engine.spec.draft
    if draft is None:
        raise no_drafter(engine.spec.name)
    block, stop = draft.block_size, engine.spec.eos_token_id
    plain = [decode_plain(engine, Request(prompt, new_tokens, stop=stop)).tokens for prompt in prompts]
    for method, drafter, budget in (
        ("chain", DFlashDrafter(block, chain=True), block - 1),
        *((f"tree of {budget}", DFlashDrafter(block), budget) for budget in BUDGETS),
    ):
        histogram, tokens = [0] * block, 0
        for prompt, expected in zip(prompts, plain, strict=True):
            decoded = decode_tree(engine, Request(prompt, new_tokens, stop=stop, drafter=drafter, budget=budget, block_size=block))
            if decoded.tokens != expected:
                raise KdgenError(f"{method}: drafts changed the tokens after a prompt that begins {prompt[:8]}")
            tokens += len(decoded.tokens)
            for length in decoded.acceptance_lengths:
                histogram[length - 1] += 1
        rounds = sum(histogram)
        total = sum((place + 1) * count for place, count in enumerate(histogram))
        yield Accepted(method, total / max(1, rounds), rounds, tokens, tuple(histogram))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kdgen.demo.acceptance", description=__doc__)
    parser.add_argument("trained", type=Path, nargs="?", help="folder with model-int4/, drafter/ and prompts.json")
    parser.add_argument("--count", type=int, default=128, help="prompts of the file (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens after each (%(default)s)")
    parser.add_argument("--backend", help="cuda or cpu; a GPU if there is one")
    parser.add_argument("--dtype", choices=("f32", "bf16"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        folder = options.trained or demo_dir()
        prompts = [prompt.tokens for prompt in read_prompts(folder / "prompts.json")[: options.count]]
        model = with_drafter(open_model(folder / "model-int4"), folder / "drafter")
        context = max(map(len, prompts)) + options.new_tokens
        engine = open_engine(model, context, options.dtype, options.backend).engine
        rows = []
        for row in measure(engine, prompts, options.new_tokens):
            rows.append(row)
            print(f"{row.method:12} {row.mean:6.2f} tokens a forward, {row.rounds} rounds", file=sys.stderr, flush=True)
    except KdgenError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    report = Report(model.spec.name, engine.backend.description, engine.plan.compute, len(prompts), options.new_tokens, tuple(rows))
    if options.json:
        print(json.dumps({"schema": SCHEMA, **asdict(report)}))
        return
    print(f"{report.prompts} held-out prompts, {report.new_tokens} new tokens each, {report.dtype} on {report.backend}\n")
    print("| draft | tokens a forward |\n|---|---|")
    for row in report.rows:
        print(f"| {row.method} | {row.mean:.2f} |")


if __name__ == "__main__":
    main()
