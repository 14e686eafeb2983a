"""The work of kdgen's kernels by torch, for ``kdgen bench --peers``: bf16 linear layers, INT4 experts one by one, and attention by matrix
products. Every call reads other memory than the previous one, and all calls are one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.bench.timing import Contender, seconds

#: Bytes that calls read before memory is read again: more than any GPU caches.
ROTATION = 256 * 2**20
MOST_CALLS = 24
INNER_K_TILES = 8


def open_torch() -> Torch | str:
    """torch, or the reason why there are no times of it."""
    try:
        import torch
    except ImportError:
        return "torch is not installed (pip install torch)"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    return Torch(torch)


class Torch:
    """torch on the first GPU, in this process's CUDA context."""

    def __init__(self, torch: Any) -> None:
        self._torch, self.bf16 = torch, torch.bfloat16
        self.name = f"torch {torch.__version__}"

    def linear(self, outputs: int, inputs: int, tokens: int) -> Contender:
        """x [tokens, inputs] times the transpose of w [outputs, inputs], in bf16."""
        torch, x = self._torch, self.random(tokens, inputs)
        weights = [self.random(outputs, inputs) for _ in range(_copies(2 * outputs * inputs))]
        return self.recorded([partial(torch.nn.functional.linear, x, w) for w in weights])

    def batched(self, batch: int, outputs: int, inputs: int, tokens: int) -> Contender:
        """A product as in ``linear`` for each of ``batch`` heads."""
        torch, x = self._torch, self.random(batch, tokens, inputs)
        weights = [self.random(batch, inputs, outputs) for _ in range(_copies(2 * batch * outputs * inputs))]
        return self.recorded([partial(torch.bmm, x, w) for w in weights])

    def attention(self, heads: int, rows: int, keys: int, row: int, latent: int, scale: float, values: int = 0) -> Contender:
        """Absorbed MLA of ``rows`` tokens over one sequence's ``keys``: two matrix products around a softmax, and with ``values`` a third
        from the latent space to ``values`` outputs of each head."""
        torch, queries = self._torch, self.random(rows * heads, row)
        layers = [
            (self.random(keys, row), self.random(heads, latent, values)) for _ in range(_copies(2 * (keys * row + heads * latent * values)))
        ]

        def attend(cache: Any, weight: Any) -> Any:
            scores = torch.softmax((queries @ cache.T).float() * scale, dim=-1)
            latents = scores.to(torch.bfloat16) @ cache[:, :latent]
            return torch.bmm(latents.view(rows, heads, latent).transpose(0, 1), weight) if values else latents

        return self.recorded([partial(attend, *layer) for layer in layers])

    def experts(self, hidden: int, width: int, group: int, tokens: Sequence[int]) -> Contender | None:
        """gate_up, SiLU and down in INT4 for experts, ``tokens`` of each; None if torch's kernel does not support the shapes."""
        torch, k_step = self._torch, INNER_K_TILES * 16
        if group not in (32, 64, 128, 256) or hidden % k_step or width % k_step:
            return None

        def matrix(outputs: int, inputs: int) -> tuple[Any, Any]:
            shape = (outputs // 8, inputs // k_step, 32, INNER_K_TILES // 2)
            return self.random_words(*shape), self.random(inputs // group, outputs, 2)

        layers = [(self.random(count, hidden), matrix(2 * width, hidden), matrix(hidden, width)) for count in tokens]

        def run() -> None:
            for x, (gate_up, gate_up_scales), (down, down_scales) in layers:
                y = torch.ops.aten._weight_int4pack_mm(x, gate_up, group, gate_up_scales)
                y = torch.nn.functional.silu(y[:, :width]) * y[:, width:]
                torch.ops.aten._weight_int4pack_mm(y, down, group, down_scales)

        return self.recorded([run])

    def matrix_rate(self, size: int = 8192) -> float:
        """Operations per second of one large bf16 product."""
        x, w = self.random(size, size), self.random(size, size)
        return 2 * size**3 / seconds(self.recorded([partial(self._torch.matmul, x, w)]))

    def random(self, *shape: int) -> Any:
        return self._torch.randn(shape, dtype=self.bf16, device="cuda") * 0.05

    def random_words(self, *shape: int) -> Any:
        return self._torch.randint(-(2**31), 2**31 - 1, shape, dtype=self._torch.int32, device="cuda")

    def integers(self, values: NDArray[np.integer[Any]]) -> Any:
        return self._torch.tensor(values.astype(np.int32), device="cuda")

    def recorded(self, calls: Sequence[Callable[[], object]]) -> Contender:
        torch = self._torch
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # the first call initialises libraries, which must not be recorded
            calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()

        def timer() -> Callable[[], float]:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()

            def stop() -> float:
                end.record()
                end.synchronize()
                return float(start.elapsed_time(end)) / 1e3

            return stop

        return Contender(graph.replay, timer, len(calls))


def _copies(nbytes: int) -> int:
    return max(1, min(MOST_CALLS, -(-ROTATION // nbytes)))
