"""Record, at every position of decoded texts, what a drafter expects and what of its tree is right:
``python -m tests.record_budget_trace OUT.npz MODEL DRAFTER PROMPTS.json``. The texts follow each other in the trace."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from kdgen.demo.prompts import read_prompts
from kdgen.drafters.base import DeviceDraftRequest
from kdgen.reference.tree import build_tree, ranked_rows
from kdgen.runtime.decode import decode_plain, prefill
from kdgen.runtime.engine import Engine
from kdgen.runtime.model import open_model, with_drafter
from kdgen.runtime.pipeline import open_engine
from kdgen.runtime.request import Request
from tests.budget_traces import NODES, RECORDED_WIDTH, Position, Trace, save


def record(engine: Engine, prompt: tuple[int, ...], new_tokens: int) -> Trace:
    draft = engine.spec.draft
    assert draft is not None
    depths = draft.block_size - 1
    tokens = decode_plain(engine, Request(prompt, new_tokens)).tokens
    prefill(engine, prompt)
    found = []
    for place in range(len(tokens) - depths - 1):
        length = len(prompt) + place
        engine.verify(DeviceDraftRequest(depths, draft.block_size), 1)
        logits = engine.read("draft_logits").reshape(-1, engine.spec.vocab_size)[1 : depths + 1]
        candidates, log_probs = ranked_rows(logits, RECORDED_WIDTH)
        tree = build_tree(candidates, log_probs, NODES)
        children = {
            (int(parent), int(token)): node for node, (parent, token) in enumerate(zip(tree.parents[1:], tree.tokens, strict=True), 1)
        }
        accepted = [0]
        for token in tokens[place + 1 :]:
            if (node := children.get((accepted[-1], token))) is None:
                break
            accepted.append(node)
        found.append(Position(log_probs.astype(np.float32), tuple(accepted)))
        engine.cut(length + 1, tokens[place + 1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.record_budget_trace", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--count", type=int, default=16, help="prompts of the file (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens after each (%(default)s)")
    options = parser.parse_args()
    prompts = [prompt.tokens for prompt in read_prompts(options.prompts)[: options.count]]
    context = max(map(len, prompts)) + options.new_tokens
    engine = open_engine(with_drafter(open_model(options.model), options.drafter), context).engine
    trace = [position for prompt in prompts for position in record(engine, prompt, options.new_tokens)]
    save(options.out, trace)
    print(f"{len(trace)} positions, {sum(len(p.accepted) for p in trace) / len(trace):.2f} tokens a round of {NODES} nodes")


if __name__ == "__main__":
    main()
