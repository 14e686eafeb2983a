"""Engine: a plan, its weights and a backend, as one sequence that is prefilled, decoded and verified.

Lengths, the root token, the draft tree and what was accepted live in device memory; the host keeps a mirror of the length
only to size grids, and reads results after a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kdgen.backends.base import Argument, Backend, DeviceArray, Pointer, Source
from kdgen.drafters.base import DraftLogits, Proposal
from kdgen.errors import KdgenError
from kdgen.plan.ir import ITEM_BYTES, MAX_CANDIDATES, MAX_NODES, MAX_PATH, Arg, Extent, Plan, Program
from kdgen.render import render
from kdgen.rope import rope_tables
from kdgen.spec import Spec
from kdgen.weights.pack import CheckpointWeights, PackedWeights, Tensors


@dataclass(frozen=True)
class _Step:
    """A launch with its arguments resolved to device addresses."""

    kernel: str
    grid: tuple[Extent, Extent, Extent]
    block: int
    smem: int
    args: tuple[Argument, ...]


@dataclass(frozen=True)
class Verified:
    """What one verify step committed: the accepted path's tokens (the old root first) and the target's next token, the new root."""

    accepted: tuple[int, ...]
    next_token: int
    nodes: int  #: rows of the verify step, root included


class Engine:
    """One model on one backend.

    ``weights`` are in the plan's layouts already, or give checkpoint tensors by key. ``progress`` is called with (bytes done,
    bytes in all) before the first weight and while they load. Raises BackendError when kernels do not load or memory is short,
    and WeightError when the weights do not fit the plan or are damaged.
    """

    def __init__(
        self, spec: Spec, plan: Plan, backend: Backend, weights: Tensors | PackedWeights, progress: Callable[[int, int], None] | None = None
    ) -> None:
        self.spec, self.backend = spec, backend
        self._plan = plan
        backend.load([Source(r.kernel.name, r.text, r.kernel.block, r.kernel.smem) for r in render(plan)])
        self._weights = self._load_weights(weights if isinstance(weights, PackedWeights) else CheckpointWeights(weights), progress)
        self._buffers = {b.name: backend.empty(b.shape, b.dtype) for b in plan.buffers}
        for name, table in zip(("cos_table", "sin_table"), rope_tables(spec, plan.limits.capacity), strict=True):
            self._write(name, table)
        self._programs = {p.name: self._resolve(p) for p in plan.programs}
        self._length = 0
        self.reset()

    @property
    def plan(self) -> Plan:
        return self._plan

    # ---- steps ------------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Committed tokens, whose cache rows are final. The root token is not among them."""
        return self._length

    def reset(self) -> None:
        """Forget the sequence."""
        self._length = 0
        self._write("sequence_length", np.zeros(self.plan.limits.max_sequences, np.int32))
        self._write("root_token", np.zeros(self.plan.limits.max_sequences, np.int32))

    def prefill(self, tokens: Sequence[int]) -> int:
        """Commit one chunk of at most ``limits.max_tokens`` tokens; returns the token after it, which becomes the root.

        Raises KdgenError for an empty or too long chunk, ids out of range, or a full context.
        """
        if not 0 < len(tokens) <= self.plan.limits.max_tokens:
            raise KdgenError(f"a prefill chunk holds 1 to {self.plan.limits.max_tokens} tokens, not {len(tokens)}")
        bad = next((t for t in tokens if not 0 <= t < self.spec.vocab_size), None)
        if bad is not None:
            raise KdgenError(f"token id {bad} is outside the vocabulary of {self.spec.vocab_size}")
        self._need_room(len(tokens))
        self._write("num_tokens", np.array([len(tokens)], np.int32))
        self._write("tokens", np.asarray(tokens, np.int32))
        self._run("prefill", len(tokens))
        self._length += len(tokens)
        return self._root()

    def decode(self) -> int:
        """Commit the root token; returns the token after it, the new root."""
        self._need_room(1)
        self._run("decode", 1)
        self._length += 1
        return self._root()

    def verify(self, proposal: Proposal, budget: int) -> Verified:
        """Build the draft tree of at most ``budget`` nodes, verify it in one forward and commit the accepted path.

        The deepest node must lie within the context. Raises KdgenError when it does not or ``budget`` is outside 0 … 63.
        """
        if not 0 <= budget < MAX_NODES:
            raise KdgenError(f"a budget lies between 0 and {MAX_NODES - 1}, not at {budget}")
        depths = self._write_proposal(proposal, budget)
        self._need_room(depths + 1)
        nodes = budget + 1 if depths else 1
        self._run("verify", nodes)
        count = int(self.read("accepted_count")[0])
        accepted = tuple(int(t) for t in self.read("accepted_tokens")[:count])
        self._length += count
        return Verified(accepted, self._root(), int(self.read("tree_size")[0]))

    # ---- reading ----------------------------------------------------------------------------------------------------

    def read(self, buffer: str) -> NDArray[np.generic]:
        """A plan buffer's contents, whole."""
        return self.backend.to_host(self._buffers[buffer])

    def logits(self, rows: int) -> NDArray[np.float32]:
        """The last step's logits, float32 [rows, vocab_size]."""
        return self.read("logits")[:rows].astype(np.float32, copy=False)

    def cache_rows(self) -> NDArray[np.generic]:
        """Committed cache rows, [layers, length, cache_row_dim] in the compute dtype."""
        return self.read("kv_cache")[:, 0, : self._length]

    # ---- internals --------------------------------------------------------------------------------------------------

    def _root(self) -> int:
        return int(self.read("root_token")[0])

    def _need_room(self, rows: int) -> None:
        if self._length + rows > self.plan.limits.max_context:
            raise KdgenError(f"{self._length} + {rows} tokens exceed the context of {self.plan.limits.max_context}: raise --context")

    def _write(self, buffer: str, values: NDArray[np.generic]) -> None:
        self.backend.write(self._buffers[buffer], np.ascontiguousarray(values))

    def _write_proposal(self, proposal: Proposal, budget: int) -> int:
        """Bring a proposal to the candidate buffers (device top-k for logits); returns its number of depths."""
        depths = proposal.depths if budget else 0
        if depths >= MAX_PATH:
            raise KdgenError(f"a draft has at most {MAX_PATH - 1} depths, not {depths}")
        if isinstance(proposal, DraftLogits):
            width = min(max(budget, 1), self.spec.vocab_size, MAX_CANDIDATES)
            self._write("draft_shape", np.array([depths, width, budget], np.int32))
            if depths:
                self._write("draft_logits", proposal.logits.astype(np.float32, copy=False))
                self._run("draft_top_k", depths)
            return depths
        width = min(proposal.tokens.shape[1], MAX_CANDIDATES) if depths else 0
        self._write("draft_shape", np.array([depths, width, budget], np.int32))
        tokens = np.zeros((MAX_PATH, MAX_CANDIDATES), np.int32)
        log_probs = np.full((MAX_PATH, MAX_CANDIDATES), -np.inf, np.float32)
        tokens[:depths, :width] = proposal.tokens[:depths, :width]
        log_probs[:depths, :width] = proposal.log_probs[:depths, :width]
        self._write("candidate_tokens", tokens)
        self._write("candidate_log_probs", log_probs)
        return depths

    def _run(self, program: str, tokens: int) -> None:
        context = self._length + tokens
        for step in self._programs[program]:
            x, y, z = (extent.value(tokens, context) for extent in step.grid)
            self.backend.launch(step.kernel, (x, y, z), step.block, step.smem, step.args)

    def _resolve(self, program: Program) -> tuple[_Step, ...]:
        kernels = {k.name: k for k in self.plan.kernels}
        steps = []
        for launch, layer in program.launches():
            kernel = kernels[launch.kernel]
            args = tuple(self._argument(arg, layer) for arg in launch.args)
            steps.append(_Step(kernel.name, kernel.grid, kernel.block, kernel.smem, args))
        return tuple(steps)

    def _argument(self, arg: Arg, layer: int) -> Argument:
        if arg.kind == "int":
            return arg.value
        if arg.kind == "weight":
            return Pointer(self._weights[arg.name])
        if arg.kind == "layer_weight":
            return Pointer(self._weights[f"layers.{layer}.{arg.name}"])
        array = self._buffers[arg.name]
        return Pointer(array, layer * array.nbytes // array.shape[0] if arg.kind == "layer_buffer" else 0)

    def _load_weights(self, weights: PackedWeights, progress: Callable[[int, int], None] | None) -> dict[str, DeviceArray]:
        weights.check(self.plan)
        total, done = sum(w.total_bytes for w in self.plan.weights), 0
        if progress:
            progress(done, total)
        loaded = {}
        for weight in self.plan.weights:
            for layer in range(*weight.layers) if weight.layers else (0,):
                array = self.backend.empty((weight.stored_bytes // ITEM_BYTES[weight.dtype],), weight.dtype)
                at = 0
                for part in weights.parts(weight, layer):
                    self.backend.write(array, part, at)
                    at += part.size
                    done += part.nbytes
                    if progress:
                        progress(done, total)
                loaded[weight.device_name(layer)] = array
        return loaded
