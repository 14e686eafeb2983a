"""Engine: a plan, its weights and a backend, holding sequences that are prefilled, decoded and verified.

Lengths, root tokens, draft trees and what was accepted live in device memory; the host keeps a mirror of the lengths only to
size grids, and reads results after a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kdgen.backends.base import Argument, Backend, DeviceArray, Launch, Pointer, Replay, Work
from kdgen.drafters.base import DeviceDraftRequest, DraftLogits, Proposal
from kdgen.errors import KdgenError, LogitsError
from kdgen.plan.cache_layout import from_tiles, to_tiles
from kdgen.plan.ir import MAX_CANDIDATES, MAX_PATH, PAGE_SLOTS, Plan, RowKind
from kdgen.plan.ops.many_rows import twin_name
from kdgen.plan.step import SAMPLED
from kdgen.runtime.memory import Memory
from kdgen.runtime.pages import Pages
from kdgen.runtime.request import need_budget
from kdgen.spec.drafter import no_drafter
from kdgen.spec.model import Spec
from kdgen.spec.rope import rope_tables
from kdgen.spec.sampling import GREEDY, Sampling
from kdgen.weights.formats import numpy_dtype
from kdgen.weights.pack import PackedWeights


@dataclass(frozen=True)
class Verified:
    """What one verify step committed: the accepted path's tokens (the old root first) and the target's next token, the new root.

    ``rows`` are the accepted nodes' rows among the step's token rows.
    """

    accepted: tuple[int, ...]
    next_token: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Draft:
    """One sequence's part of a verify step."""

    sequence: int
    proposal: Proposal
    budget: int


class Engine:
    """One model, or a rank's part of it, on one backend and by the plan for its targets, holding up to ``limits.max_sequences`` sequences,
    whose caches lie in ``pages``.

    Engines of several ranks are called alike, each in its own process, and give the same tokens; their backends have joined before.
    A sequence's bits depend on its own tokens alone, so any set of them may be stepped together. ``plan`` is the one for the backend's
    targets, and the backend has loaded its kernels (``kdgen.runtime.pipeline`` does that). ``progress`` is called with (bytes done, bytes
    in all) before the first weight and while they load. Raises BackendError when memory is short, and WeightError when the weights do not
    fit the plan or are damaged. A step
    raises LogitsError when a token would have to be chosen by logits that are not finite.
    """

    def __init__(
        self,
        spec: Spec,
        plan: Plan,
        backend: Backend,
        weights: PackedWeights,
        draft_weights: PackedWeights,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.spec, self.backend, self._plan = spec, backend, plan
        self._name = weights.where or spec.name  # for messages
        self._memory = Memory(plan, backend, weights, draft_weights, progress)
        self._buffers = self._memory.buffers
        for prefix, rotated in (("", spec), ("draft_", spec.draft)):
            if rotated is not None:
                cos, sin = rope_tables(rotated, plan.limits.capacity)
                self._write(f"{prefix}cos_table", cos)
                self._write(f"{prefix}sin_table", sin)
        self._programs = {p.name: self._memory.bind(p) for p in plan.programs}
        self._seen: set[tuple[str, int, int, int, int | None]] = set()
        self._replays: dict[tuple[str, int, int, int, int | None], Replay] = {}
        limits = plan.limits
        self.pages = Pages(limits.pool_pages, limits.sequence_pages, limits.max_sequences)
        self._write("page_table", np.zeros((limits.max_sequences, limits.sequence_pages), np.int32))
        self._lengths = [0] * plan.limits.max_sequences
        zeros = np.zeros(plan.limits.max_sequences, np.int32)
        self._write("root_token", zeros)
        self._write("sequence_length", zeros)
        # kernels look where a row is before they know whether a step has it
        self._write("row_position", np.zeros(plan.limits.max_rows, np.int32))
        self._sampling = [GREEDY] * plan.limits.max_sequences
        self._write_sampling()

    @property
    def plan(self) -> Plan:
        return self._plan

    # ---- steps ------------------------------------------------------------------------------------------------------

    def length(self, sequence: int = 0) -> int:
        """Committed tokens, whose cache rows are final. The root token is not among them."""
        return self._lengths[sequence]

    def reset(self, sequence: int = 0, sampling: Sampling = GREEDY) -> None:
        """Forget a sequence, whose pages are given back; its next tokens are chosen as ``sampling`` says."""
        self.pages.release(sequence)
        self._set_length(sequence, 0)
        if self._sampling[sequence] != sampling:
            self._sampling[sequence] = sampling
            self._write_sampling()

    def reuse(self, sequence: int, tokens: Sequence[int]) -> int:
        """Begin a sequence, which was reset, with what the cache still has of ``tokens``; returns how many of them are committed now.

        At least the last one is not: a prefill of the rest gives the token after it.
        """
        found = self.pages.reuse(sequence, tokens)
        self._write_table(sequence)
        self._set_length(sequence, found)
        return found

    def share(self, sequence: int, tokens: Sequence[int]) -> None:
        """Let later sequences reuse what this one has committed: ``tokens``, or more than those."""
        self.pages.share(sequence, tokens[: self._lengths[sequence]])

    def fork(self, source: int, target: int) -> None:
        """Make ``target``, which was reset, continue as ``source`` does: with its committed tokens and its root. Its sampling stays."""
        self.pages.fork(source, target, self._lengths[source])
        self._write_table(target)
        self._set_length(target, self._lengths[source])
        self.backend.copy(self._buffers["root_token"], source, target, 1)

    def reserve(self, sequence: int, end_slot: int) -> None:
        """Give a sequence pages of its own for what it writes behind its committed tokens, up to ``end_slot``.

        Steps do so themselves. Raises PagesError when the pool has too few.
        """
        before = len(self.pages.tables[sequence])
        copies = self.pages.extend(sequence, self._lengths[sequence], end_slot)
        for name in self._caches:
            cache = self._buffers[name]
            page, layer = math.prod(cache.shape[2:]), math.prod(cache.shape[1:])
            for start in range(0, cache.shape[0] * layer, layer):
                for each in copies:
                    self.backend.copy(cache, start + each.source * page, start + each.target * page, page)
        if copies or len(self.pages.tables[sequence]) > before:
            self._write_table(sequence)

    def prefill(self, tokens: Sequence[int], sequence: int = 0, every_logit: bool = False) -> int:
        """Commit one chunk of at most ``limits.max_tokens`` tokens; returns the token after it, which becomes the root.

        Logits are computed of the chunk's last token alone, or of every one, at most ``limits.max_logits``.
        Raises KdgenError for an empty or too long chunk, ids out of range, or a full context.
        """
        return self.prefill_many([(sequence, tokens)], every_logit)[0]

    def prefill_many(self, chunks: Sequence[tuple[int, Sequence[int]]], every_logit: bool = False) -> tuple[int, ...]:
        """``prefill`` of a chunk for each of several (sequence, tokens), in one step; together at most ``limits.max_tokens`` tokens."""
        flat = [token for _, tokens in chunks for token in tokens]
        if not all(tokens for _, tokens in chunks) or len(flat) > self._plan.limits.max_tokens or not flat:
            raise KdgenError(f"a prefill step holds 1 to {self._plan.limits.max_tokens} tokens, not {len(flat)}")
        if every_logit and len(flat) > self._plan.limits.max_logits:
            raise KdgenError(f"a step has logits of at most {self._plan.limits.max_logits} tokens, not {len(flat)}")
        bad = next((t for t in flat if not 0 <= t < self.spec.vocab_size), None)
        if bad is not None:
            raise KdgenError(f"token id {bad} is outside the vocabulary of {self.spec.vocab_size}")
        sequences = [sequence for sequence, _ in chunks]
        for sequence, tokens in chunks:
            self._need_room(sequence, len(tokens))
        self._write_step(sequences)
        self._write("step_begin", np.cumsum([0, *(len(tokens) for _, tokens in chunks)], dtype=np.int32))
        begins = np.cumsum([0, *(len(tokens) if every_logit else 1 for _, tokens in chunks)], dtype=np.int32)
        self._write("logit_begin", begins)
        self._write("tokens", np.asarray(flat, np.int32))
        self._run("prefill", len(flat), sequences, int(begins[-1]))
        for sequence, tokens in chunks:
            self._lengths[sequence] += len(tokens)
        return self._roots(sequences)

    def decode(self, sequence: int = 0) -> int:
        """Commit the root token; returns the token after it, the new root."""
        return self.decode_many([sequence])[0]

    def decode_many(self, sequences: Sequence[int]) -> tuple[int, ...]:
        """``decode`` of several sequences in one step."""
        for sequence in sequences:
            self._need_room(sequence, 1)
        self._write_step(sequences)
        self._run("decode", len(sequences), sequences)
        for sequence in sequences:
            self._lengths[sequence] += 1
        return self._roots(sequences)

    def verify(self, proposal: Proposal, budget: int, sequence: int = 0) -> Verified:
        """Build the draft tree of at most ``budget`` nodes, verify it in one forward and commit the accepted path.

        The deepest node must lie within the context. Raises KdgenError when it does not or ``budget`` is outside 0 … 63.
        """
        return self.verify_many([Draft(sequence, proposal, budget)])[0]

    def verify_many(self, drafts: Sequence[Draft]) -> tuple[Verified, ...]:
        """``verify`` of several sequences' trees in one forward."""
        sequences = [draft.sequence for draft in drafts]
        self._write_step(sequences)
        self._write_proposals(drafts)
        self._run("verify", sum(draft.budget + 1 if draft.proposal.depths else 1 for draft in drafts), sequences)
        counts, begins = self.read("accepted_count"), self.read("step_begin")
        nodes, tokens = self.read("accepted_nodes"), self.read("accepted_tokens")
        for place, sequence in enumerate(sequences):
            self._lengths[sequence] += int(counts[place])
        done = []
        for place, root in enumerate(self._roots(sequences)):
            count = int(counts[place])
            rows = tuple(int(begins[place]) + int(node) for node in nodes[place, :count])
            done.append(Verified(tuple(int(t) for t in tokens[place, :count]), root, rows))
        return tuple(done)

    def begin_rounds(self, block_rows: int) -> None:
        """Make the next steps those of sequence 0 alone, with draft blocks of so many rows (0: no drafts)."""
        self._write_step([0])
        if block_rows:
            self.backend.write(self._buffers["draft_begin"], np.array([0, block_rows], np.int32))

    def cut(self, length: int, root: int) -> None:
        """Make sequence 0 end after ``length`` tokens, whose cache rows must be there, with ``root`` as the token after them."""
        self.backend.write(self._buffers["root_token"], np.array([root], np.int32))
        self.fill_length(length)

    def fill(self, length: int, seed: int = 0) -> None:
        """Commit ``length`` made-up cache rows of every layer to sequence 0, whose next token is then token 0: for measurements."""
        self.pages.release(0)
        self._lengths[0] = 0
        self.reserve(0, length)
        for name in self._caches:
            cache = self._buffers[name]
            made_up = np.random.default_rng(seed).standard_normal((length, cache.shape[-1]), np.float32)
            rows = np.zeros((-(-length // PAGE_SLOTS), *cache.shape[2:]), numpy_dtype(cache.dtype))
            rows.reshape(-1, cache.shape[-1])[:length] = made_up
            if name == "kv_cache" and self._plan.key_tiles:
                rows = to_tiles(rows)
            for layer in range(cache.shape[0]):
                for values, page in zip(rows, self.pages.tables[0], strict=False):
                    self.backend.write(cache, values, (layer * cache.shape[1] + page) * values.size)
        self.cut(length, 0)

    def fill_length(self, length: int) -> None:
        """Set sequence 0 back to ``length`` of its rows."""
        self._set_length(0, length)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def read(self, buffer: str) -> NDArray[np.generic]:
        """A plan buffer's contents, whole."""
        return self.backend.to_host(self._buffers[buffer])

    def logits(self, rows: int) -> NDArray[np.float32]:
        """The first of the last step's logits, float32 [rows, vocab_size], one row a token row, or after a prefill one for each that it
        computed logits of; of a rank, those of its part of the vocabulary."""
        return self.backend.to_host(self._buffers["logits"], rows).astype(np.float32, copy=False)

    def cache_rows(self, sequence: int = 0) -> NDArray[np.generic]:
        """Committed cache rows, [layers, length, cache_row_dim] in the compute dtype."""
        return self._rows("kv_cache", sequence)

    def draft_rows(self, sequence: int = 0) -> NDArray[np.generic]:
        """The drafter's committed cache rows, [layers, length, keys and values] in the compute dtype."""
        return self._rows("draft_cache", sequence)

    def _rows(self, name: str, sequence: int) -> NDArray[np.generic]:
        pages = self.read(name)[:, self.pages.tables[sequence]]
        pages = from_tiles(pages) if name == "kv_cache" and self._plan.key_tiles else pages
        return pages.reshape(len(pages), -1, pages.shape[-1])[:, : self._lengths[sequence]]

    def need_finite(self, root: int, position: int, sequence: int = 0) -> None:
        """Raise LogitsError when ``root``, the token chosen for ``position``, was chosen by logits that hold a NaN or an infinity.

        The kernels that choose flip such a token's bits, which makes it negative: whoever reads a root need look at nothing else.
        """
        if root < 0:
            raise LogitsError(self._name, sequence, position)

    # ---- internals --------------------------------------------------------------------------------------------------

    def _roots(self, sequences: Sequence[int]) -> tuple[int, ...]:
        """The roots behind what is committed now."""
        roots = self.read("root_token")
        for sequence in sequences:
            self.need_finite(int(roots[sequence]), self._lengths[sequence], sequence)
        return tuple(int(roots[sequence]) for sequence in sequences)

    @property
    def _caches(self) -> tuple[str, ...]:
        return ("kv_cache", "draft_cache") if self.spec.draft else ("kv_cache",)

    def _set_length(self, sequence: int, length: int) -> None:
        self.backend.write(self._buffers["sequence_length"], np.array([length], np.int32), sequence)
        self._lengths[sequence] = length

    def _write_table(self, sequence: int) -> None:
        pages = np.asarray(self.pages.tables[sequence], np.int32)
        self.backend.write(self._buffers["page_table"], pages, sequence * self._plan.limits.sequence_pages)

    def _need_room(self, sequence: int, rows: int, written: int | None = None) -> None:
        """Raises KdgenError when ``rows`` tokens do not fit behind a sequence; then gives it pages for them, or for as many as are
        ``written``."""
        if self._lengths[sequence] + rows > self._plan.limits.max_context:
            raise KdgenError(
                f"{self._lengths[sequence]} + {rows} tokens exceed the context of {self._plan.limits.max_context}: raise --context"
            )
        self.reserve(sequence, self._lengths[sequence] + (rows if written is None else written))

    def _write(self, buffer: str, values: NDArray[np.generic]) -> None:
        self._memory.write(buffer, values)

    def _write_step(self, sequences: Sequence[int]) -> None:
        most = self._plan.limits.max_sequences
        if not sequences or len(set(sequences)) != len(sequences) or not all(0 <= s < most for s in sequences):
            raise KdgenError(f"a step takes different sequences of 0 … {most - 1}, not {list(sequences)}")
        self._write("step_count", np.array([len(sequences)], np.int32))
        self._write("step_sequence", np.asarray(sequences, np.int32))

    def _write_sampling(self) -> None:
        chosen = self._sampling
        self._write("temperature", np.array([s.temperature for s in chosen], np.float32))
        self._write("top_k", np.array([s.top_k for s in chosen], np.int32))
        self._write("top_p", np.array([s.top_p for s in chosen], np.float32))
        self._write("min_p", np.array([s.min_p for s in chosen], np.float32))
        self._write("seed", np.array([s.seed for s in chosen], np.uint64).view(np.int32))

    def _write_proposals(self, drafts: Sequence[Draft]) -> None:
        """Bring proposals to the candidate buffers; logits go through the device's top-k, and blocks through the drafter before it."""
        count = len(drafts)
        shape = np.zeros((count, 4), np.int32)
        tokens = np.zeros((count, MAX_PATH, MAX_CANDIDATES), np.int32)
        log_probs = np.full((count, MAX_PATH, MAX_CANDIDATES), -np.inf, np.float32)
        begins = np.zeros(count + 1, np.int32)
        for place, draft in enumerate(drafts):
            proposal = draft.proposal
            need_budget(draft.budget)
            depths = proposal.depths if draft.budget else 0
            if depths >= MAX_PATH:
                raise KdgenError(f"a draft has at most {MAX_PATH - 1} depths, not {depths}")
            self._need_room(draft.sequence, depths + 1, self._written(draft))
            width, first = min(draft.budget, self.spec.vocab_size, MAX_CANDIDATES), place * MAX_PATH
            begins[place + 1] = begins[place]
            if isinstance(proposal, DeviceDraftRequest):
                width = min(width, proposal.width) if proposal.width else width
                first = int(begins[place]) + 1  # behind the root's row
                begins[place + 1] += self.block_rows(proposal) if depths else 0
            elif isinstance(proposal, DraftLogits):
                if depths:
                    logits = np.ascontiguousarray(proposal.logits[:depths], np.float32)
                    self.backend.write(self._buffers["draft_logits"], logits, first * self.spec.vocab_size)
            else:
                width = min(proposal.tokens.shape[1], MAX_CANDIDATES) if depths else 0
                tokens[place, :depths, :width] = proposal.tokens[:depths, :width]
                log_probs[place, :depths, :width] = proposal.log_probs[:depths, :width]
            shape[place] = depths, width, draft.budget, first
        self._write("candidate_tokens", tokens)
        self._write("candidate_log_probs", log_probs)
        sequences = [draft.sequence for draft in drafts]
        if rows := self._write_shape(shape, drafts, DraftLogits):
            self._run("draft_top_k", rows, sequences)
        if self._write_shape(shape, drafts, DeviceDraftRequest):
            self._write("draft_begin", begins)
            self._run("draft", int(begins[-1]), sequences)
        self._write("draft_shape", shape)

    def _write_shape(self, shape: NDArray[np.int32], drafts: Sequence[Draft], kind: type[Proposal]) -> int:
        """``shape`` of the proposals of one kind, the others left out, for their candidates are there already; the most depths it has."""
        chosen = np.array([isinstance(draft.proposal, kind) for draft in drafts])
        most = int(shape[chosen, 0].max(initial=0))
        if most:
            self._write("draft_shape", np.where(chosen[:, None], shape, 0).astype(np.int32))
        return most

    def _written(self, draft: Draft) -> int:
        """Slots behind the committed ones that a draft's tree and its drafter's block fill."""
        if not draft.proposal.depths or not draft.budget:
            return 1
        return max(draft.budget + 1, self.block_rows(draft.proposal) if isinstance(draft.proposal, DeviceDraftRequest) else 0)

    def block_rows(self, proposal: DeviceDraftRequest) -> int:
        """Rows of a draft block. Raises KdgenError where there is no drafter, or it does not fill such blocks."""
        if self.spec.draft is None:
            raise no_drafter(self.spec.name)
        if not 2 <= proposal.block_size <= self.spec.draft.block_size:
            raise KdgenError(f"the drafter fills blocks of 2 … {self.spec.draft.block_size} rows, not {proposal.block_size}")
        if proposal.depths >= proposal.block_size:
            raise KdgenError(f"a block of {proposal.block_size} rows gives at most {proposal.block_size - 1} depths, not {proposal.depths}")
        return proposal.block_size

    def buffer(self, name: str) -> DeviceArray:
        """A plan buffer's memory."""
        return self._buffers[name]

    def work(
        self, program: str, tokens: int, context: int, sequences: int = 1, logits: int | None = None,
        instead: Mapping[str, DeviceArray] | None = None,
    ) -> tuple[Work, ...]:  # fmt: skip
        """A program's launches and collectives for steps of at most ``tokens`` rows that see at most ``context`` keys.

        ``logits``: rows of a prefill that have logits, if not one a sequence. ``instead`` names buffers whose place another array takes.
        """
        other = {self._buffers[name].handle: array for name, array in (instead or {}).items()}

        def argument(arg: Argument) -> Argument:
            return Pointer(other[arg.array.handle], arg.offset) if isinstance(arg, Pointer) and arg.array.handle in other else arg

        rows: dict[RowKind, int] = {"tokens": tokens, "logits": sequences if logits is None else logits}
        work = [step.at(rows[step.rows], context, sequences, self.backend.processors) for step in self._programs[program]]
        if other:
            work = [replace(each, args=tuple(map(argument, each.args))) if isinstance(each, Launch) else each for each in work]
        return tuple(work)

    def choosing(self, program: str, sequences: Sequence[int]) -> str:
        """The version of ``program`` that chooses tokens as these sequences' sampling wants: one that draws, where it is another."""
        drawing = program + SAMPLED
        return drawing if drawing in self._programs and any(self._sampling[each].temperature for each in sequences) else program

    def _run(self, program: str, tokens: int, sequences: Sequence[int], logits: int | None = None) -> None:
        """Start a program. A step of a kind seen before is recorded, so that from then on the host starts it with one call."""
        context = self.backend.recorded_context(max(self._lengths[sequence] for sequence in sequences) + tokens)
        program = self.choosing(program, sequences)
        if 0 < self._plan.tiled_rows <= tokens and twin_name(program) in self._programs:
            program = twin_name(program)
        kind = (program, tokens, context, len(sequences), logits)
        if kind not in self._replays:
            work = self.work(*kind)
            if kind not in self._seen:
                self._seen.add(kind)
                for each in work:
                    self.backend.start(each)
                return
            self._replays[kind] = self.backend.record(work)
        self._replays[kind]()
