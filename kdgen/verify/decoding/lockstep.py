"""Several ranks of one model in one process, with one thread for each: their gathers go through the host, which checks the sums.

Threads take turns in the emulator, so a forward of N ranks costs N forwards and no process, and the data of all ranks are accessible.
Kernels that wait for other ranks' words within a launch need processes (``kdgen.verify.decoding.rank_matrix`` starts them).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kdgen.backends.base import AllGather
from kdgen.backends.cpu import CpuBackend
from kdgen.errors import BackendError
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Limits
from kdgen.plan.ops.ranks import gather_name
from kdgen.plan.shard import WHOLE, Shard
from kdgen.runtime.engine import Engine
from kdgen.runtime.pipeline import start_engine
from kdgen.spec.model import Spec
from kdgen.verify.decoding.recording import differing_bits

Array = NDArray[Any]
T = TypeVar("T")

PATIENCE_SECONDS = 120.0  #: for a rank to reach the gather in which the others wait


class LockStep(CpuBackend):
    """The CPU backend of one of a team's ranks."""

    def __init__(self, team: Team, rank: int) -> None:
        super().__init__(threads=1)
        self._team, self.rank = team, rank

    def gather(self, work: AllGather) -> None:
        array, target = work.source.array, work.target.array
        source = self.to_host(array, work.nbytes * array.shape[0] // array.nbytes)  # a gather starts at its buffers' first rows
        parts = self._team.meet(self.rank, work.name, source)
        self.write(target, parts.reshape(-1))


class Team:
    """Engines of all ``ranks`` of ``spec`` with ``weights``, called alike by ``run``; their exchange is ``gather``."""

    def __init__(self, spec: Spec, compute: Compute, ranks: int, limits: Limits, weights: Mapping[str, Array]) -> None:
        """Raises BackendError when kernels do not load, RanksError when the ranks cannot share the model."""
        self.spec, self.ranks = spec, ranks
        self._barrier = threading.Barrier(ranks, timeout=PATIENCE_SECONDS)
        self._given: list[tuple[str, Array]] = [("", np.zeros(0))] * ranks
        self._sums: Sums | None = None
        self.engines = []
        for rank in range(ranks):
            plan = build_plan(spec, compute, limits, Shard(ranks, rank) if ranks > 1 else WHOLE)
            self.engines.append(start_engine(spec, plan, LockStep(self, rank), weights.__getitem__))

    def run(self, action: Callable[[Engine], T]) -> list[T]:
        """What ``action`` gives for each rank's engine, by rank. Raises what the first of them raised."""
        found: list[T] = []
        failed: list[BaseException] = []
        results: list[T | None] = [None] * self.ranks

        def call(rank: int) -> None:
            try:
                results[rank] = action(self.engines[rank])
            except BaseException as error:  # the others wait in a gather for ever
                failed.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=call, args=(rank,), name=f"rank {rank}") for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise next((error for error in failed if not isinstance(error, threading.BrokenBarrierError)), failed[0])
        found = [each for each in results if each is not None]
        return found

    def watched(self, steps: Sequence[Callable[[Engine], object]], weights: Mapping[str, Array]) -> Sums:
        """What is seen of the sums over ranks while all run ``steps``, each of them one forward of the target."""
        sums = Sums(self, weights)
        for step in steps:
            sums.begin()
            self._sums = sums
            try:
                self.run(step)
            finally:
                self._sums = None
        return sums

    def meet(self, rank: int, name: str, source: Array) -> Array:
        """Every rank's ``source`` in the gather ``name``, [ranks, ...]. Raises BackendError when the ranks gather different things."""
        self._given[rank] = name, source
        place = self._barrier.wait()
        names, sizes = {each for each, _ in self._given}, {each.size for _, each in self._given}
        if len(names) > 1 or len(sizes) > 1:
            raise BackendError(f"ranks gather different things at the same time: {', '.join(sorted(names))} of {sorted(sizes)} bytes")
        parts = np.stack([each for _, each in self._given])
        if place == 0 and self._sums is not None:
            self._sums.see(name, parts)
        self._barrier.wait()
        return parts


class Sums:
    """Sums over ranks as they are seen between gathers: a residual is the one before plus ((r0 + r1) + r2) + … of the parts, in float32,
    and a bias once.

    ``problem`` says which was the first that is not; ``seen`` counts elements that were compared, ``ordered`` those of them that another
    order of ranks would change.
    """

    def __init__(self, team: Team, weights: Mapping[str, Array]) -> None:
        self._team, self._weights = team, weights
        self.problem, self.seen, self.ordered = "", 0, 0
        self.begin()

    def begin(self) -> None:
        """The next gather is that of a step's embeddings."""
        self._expected: list[Array] | None = None
        self._what, self._layer, self._ended = "", -1, False

    def see(self, name: str, parts: Array) -> None:
        if self._ended:
            return
        self._settle()
        if name not in (gather_name("attention"), gather_name("mlp")):  # a token is chosen; the drafter's sums after it show in its logits
            self._ended = True
            return
        spec, values = self._team.spec, parts.reshape(self._team.ranks, -1, self._team.spec.hidden_size)
        total, other = np.add.accumulate(values, axis=0)[-1], np.add.accumulate(values[::-1], axis=0)[-1]
        self.ordered += int((total != other).sum())
        if name == gather_name("mlp"):
            self._what = "the embedding" if self._layer < 0 else f"the MLP of layer {self._layer}"
            self._layer += 1
        else:
            self._what = f"the attention of layer {self._layer}"
            if spec.attention_bias:
                total = total + self._weights[f"model.layers.{self._layer}.self_attn.o_proj.bias"].astype(np.float32)
        self._expected = [residual + total for residual in self._residuals(len(total))]

    def _settle(self) -> None:
        if self._expected is None:
            return
        rows = len(self._expected[0])
        for rank, (got, expected) in enumerate(zip(self._residuals(rows), self._expected, strict=True)):
            if (count := differing_bits(got, expected)) and not self.problem:
                self.problem = f"rank {rank}: {self._what} is not added in the order of ranks, in {count} of {got.size} elements"
            self.seen += got.size
        self._expected = None

    def _residuals(self, rows: int) -> list[Array]:
        return [engine.backend.to_host(engine.buffer("residual"), rows) for engine in self._team.engines]
