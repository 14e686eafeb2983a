"""INT4 experts by Humming, vLLM's kernels for Hopper, for ``kdgen bench --peers`` if ``humming-kernels`` is installed
(https://github.com/vllm-project/humming, 0.1.19). Humming compiles a kernel at its first call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.bench.peers import Torch
from kdgen.bench.timing import Contender

SILU_AND_MUL = "a / (1.0f + __expf(-a)) * b"


def open_humming(torch: Torch, experts: int, hidden: int, width: int, group: int) -> Humming | str:
    """Humming with one layer's experts, or the reason why there are no times of it."""
    try:
        return Humming(torch, experts, hidden, width, group)
    except (ImportError, PackageNotFoundError):
        return "Humming is not installed (pip install humming-kernels)"
    except (AssertionError, OSError, RuntimeError, ValueError) as error:  # no compiler, no CUDA headers, or unsupported shapes
        return f"Humming does not run here: {error or type(error).__name__}"


class Humming:
    """gate_up, SiLU and down of one layer's experts in bf16, INT4 weights drawn at random. Raises what Humming raises."""

    def __init__(self, torch: Torch, experts: int, hidden: int, width: int, group: int) -> None:
        from humming.layer import HummingLayer
        from humming.ops import process_input
        from humming.tune import get_heuristics_config

        self.name = f"Humming {version('humming-kernels')}"
        self._torch, self._experts = torch, experts
        self._process_input, self._heuristics = process_input, get_heuristics_config

        def layer(outputs: int, inputs: int) -> Any:
            made = HummingLayer(outputs, inputs, {"dtype": "int4", "group_size": group}, num_experts=experts, torch_dtype=torch.bf16)
            made.weight.data = torch.random_words(*made.weight.shape)
            made.weight_scale.data = torch.random(*made.weight_scale.shape)
            made.transform()
            return made

        self._gate_up, self._down = layer(2 * width, hidden), layer(hidden, width)

    def contenders(self, routings: Sequence[NDArray[np.int32]]) -> Iterator[tuple[str, Contender]]:
        """Humming in its default and in its batch-invariant mode. ``routings`` has, for each call in turn, the experts of every token,
        [tokens, top_k]."""
        x = self._torch.random(len(routings[0]), self._gate_up.shape_k)
        for name, keeps_bits in ((self.name, False), (f"{self.name}, bits kept", True)):
            yield name, self._torch.recorded([self._call(x, routing, keeps_bits) for routing in routings])

    def _call(self, x: Any, routing: NDArray[np.int32], keeps_bits: bool) -> partial[None]:
        gate_up, down = (self._arguments(layer, routing, keeps_bits) for layer in (self._gate_up, self._down))

        def run() -> None:
            y = self._gate_up(x, top_k=routing.shape[1], **gate_up)
            y, _, _ = self._process_input(inputs=y, activation_type="binary_split", activation_impl=SILU_AND_MUL)
            self._down(y, top_k=1, **down)

        return partial(run)

    def _arguments(self, layer: Any, routing: NDArray[np.int32], keeps_bits: bool) -> dict[str, Any]:
        """Keyword arguments of a layer's call: assignments sorted by expert, each expert's padded to whole blocks of rows."""
        mode = {"use_batch_invariant": keeps_bits, "gemm_type": "indexed"}
        tuning = self._heuristics(layer.humming_config, shape_m=routing.size, **mode)
        block = tuning["block_shape"][0]
        chosen = routing.reshape(-1)
        lists = [np.flatnonzero(chosen == expert) for expert in range(self._experts)]
        padded = [np.pad(each, (0, -len(each) % block), constant_values=routing.size) for each in lists]
        blocks = np.repeat(np.arange(self._experts), [len(each) // block for each in padded])
        rows = np.concatenate(padded)
        return {
            "sorted_ids": self._torch.integers(rows),
            "expert_ids": self._torch.integers(blocks),
            "num_tokens_padded": self._torch.integers(np.array(len(rows))),
            "compute_config": mode,
            "tuning_config": tuning,
        }
