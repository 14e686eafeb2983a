"""Seeded sampling in float64: Philox noise, Gumbel-max, and the filters top-k, top-p and min-p."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kdgen.spec.sampling import Sampling


def philox(seed: int, position: int, counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): 32-bit words [len(counters), 4].

    The key is the 64-bit seed, the counter (counters[i], position, 0, 0).
    """
    low = np.uint64(0xFFFFFFFF)
    c = [counters & low, np.full_like(counters, position), np.zeros_like(counters), np.zeros_like(counters)]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        shift = np.uint64(32)
        c = [(b >> shift) ^ c[1] ^ np.uint64(key[0]), b & low, (a >> shift) ^ c[3] ^ np.uint64(key[1]), a & low]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(c, axis=1)


def gumbel(seed: int, position: int, vocab: int) -> NDArray[np.float64]:
    """Standard Gumbel noise [vocab] for the token at ``position``; uniforms lie on the grid (n + 1/2) 2^-23."""
    words = philox(seed, position, np.arange(-(-vocab // 4), dtype=np.uint64)).reshape(-1)[:vocab]
    uniform = ((words >> np.uint64(9)).astype(np.float64) + 0.5) * 2.0**-23
    return -np.log(-np.log(uniform))


def kept(logits: NDArray[np.float32], sampling: Sampling, slack: float = 0.0) -> NDArray[np.bool_]:
    """Which tokens [vocab] the filters leave. ``slack`` is added to top_p and taken from min_p: float32 sums are not float64's."""
    keep = np.ones(logits.size, bool)
    order = np.lexsort((np.arange(logits.size), -logits.astype(np.float64)))
    if 0 < sampling.top_k < logits.size:
        keep[order[sampling.top_k :]] = False
    weights = np.exp((logits.astype(np.float64) - logits.max()) / sampling.temperature)
    if sampling.top_p < 1:
        inside = np.where(keep, weights, 0.0)
        before = np.cumsum(inside[order]) - inside[order]
        within = (before < min(sampling.top_p + slack, 1.0) * inside.sum()) & keep[order]
        smallest = logits[order][within].min(initial=np.inf)  # a slack beyond top_p leaves nothing that is surely kept
        keep &= logits >= smallest  # equal logits are in or out together
    result: NDArray[np.bool_] = keep & (weights >= sampling.min_p - slack)
    return result


def scores(logits: NDArray[np.float32], sampling: Sampling, position: int) -> NDArray[np.float64]:
    """logit / T + noise, [vocab]; the token drawn at ``position`` is the largest of those kept."""
    noise = gumbel(sampling.seed, position, logits.size)
    values: NDArray[np.float64] = (logits.astype(np.float64) - logits.max()) / sampling.temperature + noise
    return values


def draw(logits: NDArray[np.float32], sampling: Sampling, position: int) -> int:
    """The token at ``position`` after a row of logits [vocab]; the lowest id on ties."""
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    return int(np.argmax(np.where(kept(logits, sampling), scores(logits, sampling, position), -np.inf)))
