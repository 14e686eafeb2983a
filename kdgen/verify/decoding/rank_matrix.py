"""Ranks in every combination that changes what they compute: 1 to 4 of them, both compute types, biases, INT4 experts, drafters that they
share or have whole, ties over the divided vocabulary, and both exchanges.

Ranks that gather run in one process (``kdgen.verify.decoding.lockstep``), where their sums are held by bits to ((r0 + r1) + r2) + … in
float32 and their logits to the float64 reference. Ranks that read each other's memory are processes; what they give must have the bits of
the ranks that gather. ``python -m kdgen.verify.decoding.rank_matrix`` is one of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import BrokenBarrierError
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.backends import open_backend
from kdgen.codegen.render import render
from kdgen.drafters.dflash import DFlashDrafter
from kdgen.drafters.synthetic import ReplayDrafter
from kdgen.errors import KdgenError
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Limits, Plan
from kdgen.plan.shard import EXCHANGES, Exchange, Shard
from kdgen.ranks.group import joined, place_in
from kdgen.ranks.start import run_ranks
from kdgen.reference.dflash import ReferenceDrafter
from kdgen.runtime.budget import FixedBudget
from kdgen.runtime.decode import decode_plain, decode_rounds, decode_tree
from kdgen.runtime.engine import Engine
from kdgen.runtime.pipeline import open_shard, start_engine
from kdgen.runtime.rounds import Rounds
from kdgen.spec.model import Spec, load_spec
from kdgen.spec.sampling import GREEDY, Sampling
from kdgen.verify.decoding.lockstep import Team
from kdgen.verify.decoding.recording import RecordingEngine, differing_bits
from kdgen.verify.kernels import tolerances
from kdgen.verify.kernels.inboxes import words_out_of_place
from kdgen.verify.kernels.rank_sums import CHECKS
from kdgen.verify.kernels.sampling import may_draw
from kdgen.verify.kernels.twins import with_those_held_to
from kdgen.verify.published import reference_of
from kdgen.verify.report.checks import Check, Status, finite
from kdgen.weights.random import random_weights

Array = NDArray[Any]

PROMPT_TOKENS, NEW_TOKENS = 21, 7
LIMITS = Limits(max_context=PROMPT_TOKENS + NEW_TOKENS + 8, max_sequences=2)
SAMPLING = Sampling(0.9, top_k=60, top_p=0.95, seed=2**40 + 7)
BLOCK = 5  #: rows of a draft block
BUDGET = 15  #: of nodes in a tree, and so of candidates a depth

_DRAFT = {
    "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 16,
    "intermediate_size": 192, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "block_size": BLOCK, "mask_token_id": 5, "target_layer_ids": [0, 1],
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20,
}  # fmt: skip
_BOTH = {
    "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 12, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "intermediate_size": 192, "moe_intermediate_size": 384, "max_position_embeddings": 128,
}  # fmt: skip
#: Dims that 1 to 4 ranks divide, with a vocabulary of which three ranks have odd parts.
_BIASED = _BOTH | {
    "name": "ranks-int4", "vocab_size": 564, "attention_bias": True, "draft": _DRAFT | {"attention_bias": True},
    "quantization": {"num_bits": 4, "group_size": 32, "symmetric": True},
}  # fmt: skip
#: Neither bias nor shared expert, a drafter that no two ranks can share, and a head that is the embedding.
_PLAIN = _BOTH | {
    "name": "ranks-tied", "vocab_size": 540, "tie_word_embeddings": True, "model_type": "deepseek_v2", "scoring_func": "softmax",
    "topk_method": "group_limited_greedy", "norm_topk_prob": False, "n_routed_experts": 12, "n_group": 4, "topk_group": 2,
    "num_experts_per_tok": 4, "q_lora_rank": None, "n_shared_experts": 0, "moe_intermediate_size": 192,
    "draft": _DRAFT | {"num_key_value_heads": 1},
}  # fmt: skip


def rank_specs() -> tuple[Spec, Spec]:
    """A model with whatever ranks can cut wrongly, and one with what they must not add twice."""
    base = load_spec("tiny").model_dump(mode="json")
    biased, plain = (Spec.from_mapping(base | changes) for changes in (_BIASED, _PLAIN))
    return biased, plain


@dataclass(frozen=True)
class Case:
    """One model on some ranks. ``ties``: its head has equal rows on all ranks. ``processes``: by which exchanges it is processes, too."""

    spec: Spec
    compute: Compute
    ranks: int
    ties: bool = False
    processes: tuple[Exchange, ...] = ()

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''} of {self.spec.name}"
        return f"{ranks}, a head of equal rows" if self.ties else ranks

    def weights(self) -> dict[str, Array]:
        """Checkpoint tensors by published key."""
        weights = dict(random_weights(self.spec, 11))
        if self.ties:  # each row so often that every rank has it
            weights["lm_head.weight"] = np.tile(weights["lm_head.weight"][: self.spec.vocab_size // 12], (12, 1))
        return weights


def cases() -> tuple[Case, ...]:
    """Few at a time: whatever depends on the number of ranks, on the type or on the exchange is in one of them."""
    biased, plain = rank_specs()
    return (
        Case(biased, "f32", 1),
        Case(biased, "f32", 2, processes=EXCHANGES),
        Case(plain, "bf16", 2),
        Case(biased, "f32", 3, ties=True, processes=("peer",)),
        Case(biased, "bf16", 4, ties=True, processes=("peer",)),
        Case(plain, "f32", 4, processes=("peer",)),
    )


def join_plans() -> list[tuple[Spec, Plan]]:
    """The kernels that put three and four ranks' parts together, by either exchange, with those that these are held to."""
    spec, _ = rank_specs()
    found = []
    for ranks, exchange in itertools.product((3, 4), EXCHANGES):
        plan = build_plan(spec, "f32", shard=Shard(ranks, 1, exchange))
        joins = [each for each in plan.kernels if each.template in CHECKS]
        found.append((spec, replace(plan, kernels=with_those_held_to(plan.kernels, joins))))
    return found


@dataclass(frozen=True)
class Observed:
    """What one rank saw of the fixed course of ``observe``; logits are of its part of the vocabulary, the rest every rank has alike."""

    logits: Array  #: [T, V / ranks], of the prompt and the tokens after it but the last
    cache: Array  #: [layers, T, row]
    tokens: tuple[int, ...]
    sampled: tuple[int, ...]
    sampled_logits: Array
    features: Array  #: of the prompt, as the drafter was given them
    drafts: Array  #: logits [BLOCK - 1, V] of a block behind the prompt
    candidates: Array  #: i32 [BLOCK - 1, BUDGET], best first
    problem: str = ""  #: the first course that left plain decoding

    def digests(self) -> tuple[str, ...]:
        """A hash of each result but the problem, in their order."""
        values = [getattr(self, each.name) for each in dataclasses.fields(self)[:-1]]
        return tuple(hashlib.sha256(np.asarray(value).tobytes()).hexdigest() for value in values)


def prompt_of(spec: Spec) -> tuple[int, ...]:
    return tuple(np.random.default_rng(3).integers(0, spec.vocab_size, PROMPT_TOKENS).tolist())


def observe(engine: Engine) -> Observed:
    """Prefill, plain decoding, trees and rounds, greedy and sampled, with the drafter that the model has and one that repeats."""
    recorder, prompt, problem = RecordingEngine(engine), prompt_of(engine.spec), ""
    block = DFlashDrafter(BLOCK).propose((), BLOCK - 1)
    recorder.reset()
    root = recorder.prefill(prompt)
    whole, features = recorder.logits, engine.read("features")[:PROMPT_TOKENS]
    engine.verify(block, BUDGET)
    drafts = engine.read("draft_logits").reshape(-1, engine.spec.vocab_size)[1:BLOCK].astype(np.float32)  # row 0 is the root's
    candidates = engine.read("candidate_tokens")[0, : BLOCK - 1, :BUDGET]
    plain = decode_plain(recorder, prompt, NEW_TOKENS, chunk=1)
    logits, cache = np.stack(recorder.logits), recorder.cache_rows()
    if plain.tokens[0] != root or differing_bits(np.stack(whole), logits[:PROMPT_TOKENS]):
        problem = "the prompt in one piece gives other bits than token by token (L3)"
    truth = (*prompt, *plain.tokens)
    for drafter, chunk in ((ReplayDrafter(truth, engine.spec.vocab_size, 0.2), 12), (DFlashDrafter(BLOCK), 64)):
        tree = decode_tree(recorder, prompt, NEW_TOKENS, drafter, BUDGET, BLOCK, chunk=chunk)
        if tree.tokens != plain.tokens:
            problem = problem or f"other tokens than plain decoding, drafted by {drafter.name} (L1)"
        problem = problem or _other_rows(recorder, logits, cache, f"drafted by {drafter.name} (L2)")
    rounds = Rounds(engine, block, (BUDGET,))
    got = decode_rounds(rounds, prompt, NEW_TOKENS, lambda _: FixedBudget(BUDGET), chunk=9, ahead=1)
    if got.tokens != plain.tokens or differing_bits(engine.cache_rows(), cache):
        problem = problem or "rounds give other tokens or cache rows than plain decoding (L1, L2)"
    problem = problem or _in_company(engine, GREEDY, truth, logits, cache)
    drawn = decode_plain(recorder, prompt, NEW_TOKENS, chunk=8, sampling=SAMPLING)
    drawn_logits, drawn_cache = np.stack(recorder.logits), recorder.cache_rows()
    problem = problem or _in_company(engine, SAMPLING, (*prompt, *drawn.tokens), drawn_logits, drawn_cache)
    half = ReplayDrafter((*prompt, *drawn.tokens), engine.spec.vocab_size, 0.5)
    again = decode_tree(recorder, prompt, NEW_TOKENS, half, 15, 8, sampling=SAMPLING)
    problem = problem or _other_rows(recorder, drawn_logits, drawn_cache, "sampled, with trees (L5)")
    other = decode_rounds(rounds, prompt, NEW_TOKENS, lambda _: FixedBudget(BUDGET), chunk=9, sampling=SAMPLING)
    if again.tokens != drawn.tokens or other.tokens != drawn.tokens:
        problem = problem or "other tokens than plain sampling (L5)"
    return Observed(logits, cache, plain.tokens, drawn.tokens, drawn_logits, features, drafts, candidates, problem)


def _in_company(engine: Engine, sampling: Sampling, truth: Sequence[int], logits: Array, cache: Array) -> str:
    """Steps with another sequence, whose tokens are not drawn; this one, whose tokens are chosen as ``sampling`` says, stands second."""
    for sequence, chosen in enumerate((GREEDY, sampling)):
        engine.reset(sequence, chosen)
    _, token = engine.prefill_many([(0, truth[7:12]), (1, truth[:PROMPT_TOKENS])])
    for place in range(2):
        got, expected = engine.logits(2)[1], logits[PROMPT_TOKENS - 1 + place]
        if differing_bits(got, expected):
            return f"row {PROMPT_TOKENS - 1 + place} has other logits than alone (L4)"
        if token != truth[PROMPT_TOKENS + place]:
            return f"token {place} is {token}, beside another sequence, instead of {truth[PROMPT_TOKENS + place]} (L4)"
        _, token = engine.decode_many([0, 1])
    return "" if not differing_bits(engine.cache_rows(1), cache[:, : engine.length(1)]) else "other cache rows than alone (L4)"


def _other_rows(recorder: RecordingEngine, logits: Array, cache: Array, what: str) -> str:
    rows = min(len(recorder.logits), len(logits))
    if differing_bits(np.stack(recorder.logits[:rows]), logits[:rows]) or differing_bits(recorder.cache_rows()[:, :rows], cache[:, :rows]):
        return f"other logits or cache rows than plain decoding, {what}"
    return ""


# ---- ranks of one process -----------------------------------------------------------------------------------------------


def check_case(case: Case, weights: Mapping[str, Array]) -> tuple[str, float, float, list[Observed]]:
    """(problem, largest error of the logits, its tolerance, what each rank saw) of ranks that gather."""
    team = Team(case.spec, case.compute, case.ranks, LIMITS, weights)
    prompt = prompt_of(case.spec)
    sums = team.watched((lambda engine: engine.prefill(prompt), Engine.decode), weights)
    found = team.run(observe)
    problem = sums.problem or next((f"rank {rank}: {each.problem}" for rank, each in enumerate(found) if each.problem), "")
    if case.ranks > 1 and not sums.seen:
        problem = problem or "no sum over ranks was seen"
    if case.ranks > 2 and not sums.ordered:
        problem = problem or "no sum over ranks depends on their order"
    problem = problem or _alike(found) or _chosen(found)
    error, tolerance = _logits_error(case, found, weights)
    if not error <= tolerance:
        problem = problem or f"logits are off the float64 reference's by {error:.3g}"
    return problem or _drafts(case, found[0], weights), error, tolerance, found


def _alike(found: Sequence[Observed]) -> str:
    """Everything but the logits' parts is the same on every rank."""
    for rank, each in enumerate(found[1:], 1):
        for name in ("tokens", "sampled", "cache", "features", "drafts", "candidates"):
            if np.asarray(getattr(each, name)).tobytes() != np.asarray(getattr(found[0], name)).tobytes():
                return f"rank {rank} has other {name} than rank 0"
    return ""


def _chosen(found: Sequence[Observed]) -> str:
    """Each token is what the ranks' logits side by side give; of equals, the lowest."""
    whole, drawn = (np.concatenate([getattr(each, name) for each in found], axis=1) for name in ("logits", "sampled_logits"))
    for place, token in enumerate(found[0].tokens):
        if token != (best := int(whole[PROMPT_TOKENS - 1 + place].argmax())):
            return f"token {place} is {token}, and the largest of all ranks' logits is that of {best}"
    for place, token in enumerate(found[0].sampled):
        if not may_draw(drawn[PROMPT_TOKENS - 1 + place], SAMPLING, PROMPT_TOKENS + place, token):
            return f"sampled token {place}, {token}, is not what all ranks' logits give"
    drafts = found[0].drafts
    if (found[0].candidates != np.argsort(-drafts, axis=1, kind="stable")[:, :BUDGET]).any():
        return "the candidates of a draft are not the largest of its logits, the lowest of equals first"
    return ""


def _logits_error(case: Case, found: Sequence[Observed], weights: Mapping[str, Array]) -> tuple[float, float]:
    tokens = [*prompt_of(case.spec), *found[0].tokens[:-1]]
    expected = reference_of(case.spec, weights).forward(tokens).logits
    return _error(case, np.concatenate([each.logits for each in found], axis=1), expected, case.spec.num_hidden_layers)


def _error(case: Case, got: Array, expected: Array, layers: int) -> tuple[float, float]:
    """In float32 each element, in bf16 the rows' typical error."""
    error = np.abs(got.astype(np.float64) - expected)
    if case.compute == "f32":
        return float(error.max()), tolerances.float32_logits(expected)
    return float(np.median(np.sqrt(np.square(error).mean(axis=1)))), tolerances.bf16_logits(expected, layers)


def _drafts(case: Case, found: Observed, weights: Mapping[str, Array]) -> str:
    draft = case.spec.draft
    assert draft is not None
    head = "model.embed_tokens.weight" if case.spec.tie_word_embeddings else "lm_head.weight"
    drafter = ReferenceDrafter(draft, weights, weights["model.embed_tokens.weight"], weights[head])
    _, expected = drafter.block(drafter.extend(drafter.empty_cache(), found.features), found.tokens[0], BLOCK)
    error, tolerance = _error(case, found.drafts, expected, draft.num_hidden_layers + 1)
    return "" if error <= tolerance else f"the drafter's logits are off the float64 reference's by {error:.3g}"


# ---- ranks that are processes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What a process saw: the digests of ``Observed``, and its problem."""

    digests: tuple[str, ...]
    problem: str


def processes_see(wanted: Sequence[tuple[Case, Exchange]], ranks: int) -> list[list[Seen]]:
    """What each of ``ranks`` processes sees of each wanted case, by its exchange. Raises KdgenError, with what they said, if they fail."""
    for case, exchange in wanted:  # once, not by every rank
        plan = build_plan(case.spec, case.compute, LIMITS, Shard(ranks, 0, exchange))
        open_backend("cpu").load([rendered.source for rendered in render(plan)])
    jobs = [(case.spec.model_dump(mode="json"), case.compute, case.ties, exchange) for case, exchange in wanted]
    command = [sys.executable, "-P", "-m", "kdgen.verify.decoding.rank_matrix", json.dumps(jobs)]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        code = run_ranks(command, ranks, output=output, errors=errors)
        for file in (output, errors):
            file.seek(0)
        if code:
            raise KdgenError(f"{ranks} ranks ended with {code}: {errors.read().decode(errors='replace').strip()}")
        return [[Seen(tuple(digests), problem) for digests, problem in each] for each in json.loads(output.read())]


def run_rank(jobs: Sequence[tuple[dict[str, Any], Compute, bool, Exchange]]) -> list[list[tuple[tuple[str, ...], str]]] | None:
    """This process's part of ``jobs``: on rank 0 what every rank saw, else None."""
    with joined(place_in(os.environ)) as group:
        backend, shard = open_shard(group, "cpu")
        found = []
        for values, compute, ties, exchange in jobs:
            case = Case(Spec.from_mapping(values), compute, shard.ranks, ties)
            plan = build_plan(case.spec, compute, LIMITS, replace(shard, exchange=exchange))
            seen = observe(engine := start_engine(case.spec, plan, backend, case.weights().__getitem__))
            found.append((seen.digests(), seen.problem or words_out_of_place(engine)))
        if group is None:
            return [[each] for each in found]
        everybody = [json.loads(each) for each in group.exchange(json.dumps(found).encode())]
        return None if group.rank else [list(ranks) for ranks in zip(*everybody, strict=True)]


# ---- all of them --------------------------------------------------------------------------------------------------------


def check_rank_matrix(wanted: Sequence[Case]) -> Iterator[Check]:
    """A Check for each case, all of them of one number of ranks, and one for each exchange by which a case is processes."""
    expected: list[list[Seen]] = []
    for case in wanted:
        began = perf_counter()
        try:
            problem, error, tolerance, found = check_case(case, case.weights())
        except (KdgenError, BrokenBarrierError) as failed:
            expected.append([])
            yield _check(case, str(case), str(failed) or "a rank did not reach a gather", perf_counter() - began)
            continue
        expected.append([Seen(each.digests(), each.problem) for each in found])
        bits = 0 if problem else 8 * sum(each.logits.nbytes + each.cache.nbytes for each in found)
        detail = "sums rank after rank, by bits; tokens, drafts, trees, rounds and samples are those of all ranks' logits"
        yield _check(case, str(case), problem, perf_counter() - began, detail, finite(error), tolerance, bits)
    started = [(case, exchange, seen) for case, seen in zip(wanted, expected, strict=True) for exchange in case.processes]
    if not started:
        return
    began, problem, everything = perf_counter(), "", []
    try:
        everything = processes_see([(case, exchange) for case, exchange, _ in started], wanted[0].ranks)
    except KdgenError as failed:
        problem = str(failed)
    seconds = (perf_counter() - began) / len(started)
    for place, (case, exchange, seen) in enumerate(started):
        detail = "the bits of the same ranks in one process, on every rank"
        yield _check(case, f"{case}, processes, {exchange}", problem or _other_bits(seen, everything[place]), seconds, detail)


def _other_bits(expected: Sequence[Seen], found: Sequence[Seen]) -> str:
    if len(expected) != len(found):
        return f"{len(found)} ranks saw something, to be held to {len(expected)} in one process"
    for rank, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        if theirs.problem:
            return f"rank {rank}: {theirs.problem}"
        names = (each.name for each in dataclasses.fields(Observed))
        for name, one, other in zip(names, ours.digests, theirs.digests, strict=False):
            if one != other:
                return f"rank {rank} has other {name} than the same rank that gathers in one process"
    return ""


def _check(
    case: Case, name: str, problem: str, seconds: float, detail: str = "", figure: float | None = None, tolerance: float | None = None,
    bits: int = 0,
) -> Check:  # fmt: skip
    status: Status = "failed" if problem else "ok"
    detail = "" if problem else detail
    return Check(case.spec.name, case.compute, "ranks", name, "cpu", status, figure, tolerance, detail, problem, seconds, bits)


def main(arguments: Sequence[str]) -> int:
    """The entry point of a rank."""
    try:
        found = run_rank(json.loads(arguments[0]))
    except KdgenError as error:
        sys.stderr.write(f"kdgen: error: {error}\n")
        return 2
    if found is not None:
        sys.stdout.write(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
