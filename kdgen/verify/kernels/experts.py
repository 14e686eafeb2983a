"""Checks of routing and of the routed experts: the choice with its ties and groups, the grouping by expert, the expert layers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.plan.formats import format_of
from kdgen.plan.ir import ITEM_BYTES, Kernel
from kdgen.reference import ops
from kdgen.reference.stored import stored_tensor
from kdgen.verify.kernels import tolerances
from kdgen.verify.kernels.dense import interleaved
from kdgen.verify.kernels.harness import SLICE_TILES, Grid, Harness, Registry, check_rows, for_template, guard, poison, spaced, split_guard
from kdgen.verify.published import router_of
from kdgen.weights.formats import numpy_dtype, on_host, pack_mma_a

Array = NDArray[Any]

CHECKS: Registry = {}
#: Choice scores that float64 separates by less than this, relatively, are drawn again: float32 may order them either way. Equal
#: scores are kept, for those the rule is the lowest index.
NEAR = 4e-6
GROUP = 32  #: inputs whose products tensor cores add up before a scale
MANY_BLOCKS = 40
CROWD = 20  #: tokens of one expert: more than the 16 of two tiles
#: Grids that logits are drawn from, (step, most steps to either side): each has fewer values than the last, so more ties and fewer
#: near ones.
GRIDS = ((1 / 16, 24), (1 / 4, 24), (1, 4), (2, 1))


@for_template(CHECKS, ["router_topk.cu.j2"])
def check_router_topk(harness: Harness) -> None:
    """Experts and weights, in order; logits from a coarse grid, so that many scores are equal."""
    p, most = harness.p, max(harness.tokens)
    bias = _choice_bias(harness, p)
    logits = np.stack([_router_row(harness, p, row, bias) for row in range(most)])

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        experts, weights = harness.poisoned("i32", guard(count), p.top_k), harness.poisoned("f32", guard(count), p.top_k)
        biases = {} if bias is None else {"correction_bias": harness.input(bias)}
        harness.launch(
            Grid(count), num_tokens=harness.integer(count), logits=harness.input(logits[rows]), topk_experts=experts, topk_weights=weights,
            **biases,
        )  # fmt: skip
        return {
            "topk_experts": split_guard(harness, "topk_experts", harness.read(experts), count),
            "topk_weights": split_guard(harness, "topk_weights", harness.read(weights), count),
        }

    experts, weights = ops.router(logits, router_of(harness.spec), bias)
    error = tolerances.positive_sum(weights, p.experts if p.softmax else p.top_k) + 2 * tolerances.formula(weights)
    check_rows(harness, run, {"topk_experts": (experts, np.zeros(1)), "topk_weights": (weights, error)})


def _choice_bias(harness: Harness, p: Any) -> Array | None:
    """The correction bias [E] of a choice with parameters ``p``, where it has one."""
    if not p.has_bias:
        return None
    bias = (harness.rng.integers(-7, 2, p.experts) / 8).astype(np.float32)
    bias[1::32] = 0.25  # the best are equal where logits are, and all of one lane
    return np.asarray(bias)


def _router_row(harness: Harness, p: Any, row: int, bias: Array | None) -> Array:
    """Logits [E] without near ties. Rows 0 and 1 are extreme: all equal, and so far apart that sigmoids saturate. The others take
    turns at the grids, or where those give near ties at the next coarser one.
    """
    if row == 0:
        return np.zeros(p.experts, np.float32)
    for attempt in range(400):
        step, most = (40, 1) if row == 1 else GRIDS[min(row % len(GRIDS) + attempt // 100, len(GRIDS) - 1)]
        logits = (harness.rng.integers(-most, most + 1, p.experts) * step).astype(np.float32)
        if not _near_ties(p, logits, bias):
            return np.asarray(logits)
    return np.zeros(p.experts, np.float32)


def _near_ties(p: Any, logits: Array, bias: Array | None) -> bool:
    scores = ops.softmax(logits) if p.softmax else ops.sigmoid(logits)
    choice = scores if bias is None else scores + bias
    # scores are exact to so many digits; with a bias, which cancels some of them, so are sums to so many of the largest
    floor = 0.0 if bias is None else float(np.abs(choice).max())
    if _near(choice, np.arange(len(choice)), floor):
        return True
    if p.groups == 1:
        return False
    best = -np.sort(-choice.reshape(p.groups, -1), axis=1)[:, : 2 if p.group_top2 else 1]
    # sums of different parts may be equal in one precision alone: only those of the same parts may tie
    _, parts = np.unique(best, axis=0, return_inverse=True)
    return _near(best.sum(axis=1), parts.reshape(-1), floor, ties=False)


def _near(values: Array, kinds: Array, floor: float, ties: bool = True) -> bool:
    """Whether float32 might order two values of different kinds otherwise than float64. ``ties``: equal ones are safe."""
    order = np.argsort(values)
    v, k = values[order], kinds[order]
    close = np.diff(v) <= NEAR * np.maximum(np.maximum(np.abs(v[1:]), np.abs(v[:-1])), floor)
    return bool((close & (k[1:] != k[:-1]) & ((np.diff(v) > 0) | (not ties))).any())


def sorted_by_expert(topk: Array, experts: int) -> tuple[Array, Array, Array, Array]:
    """What moe_sort gives for topk [M, k]: active experts, their begins and ends, and the assignments, token order inside each."""
    flat = topk.reshape(-1)
    assignments = np.argsort(flat, kind="stable").astype(np.int32)
    counts = np.bincount(flat, minlength=experts)
    active = np.flatnonzero(counts).astype(np.int32)
    ends = np.cumsum(counts)[active].astype(np.int32)
    return active, (ends - counts[active]).astype(np.int32), ends, assignments


def _random_topk(harness: Harness, count: int, experts: int, top_k: int) -> NDArray[np.int32]:
    """Distinct experts a token; some experts are popular, so that token tiles fill and overflow."""
    popularity = np.exp2(-np.arange(experts) / max(1, experts / 4))
    keys = harness.rng.random((count, experts)) ** (1 / popularity)
    return np.argsort(-keys, axis=1)[:, :top_k].astype(np.int32)


class _Lists:
    """Buffers for ``total`` assignments grouped by expert, and what should be in them."""

    def __init__(self, harness: Harness, experts: int, total: int) -> None:
        self.experts = experts
        sizes = {"num_active": 1, "active_expert": experts, "active_begin": experts, "active_end": experts, "assignments": total + 2}
        self.arrays = {name: harness.poisoned("i32", size) for name, size in sizes.items()}  # by the names of kernels' parameters

    def check(self, harness: Harness, topk: Array) -> None:
        """``topk``: [M, k], the experts that were grouped; where some are none, their own check says so."""
        if topk.min() < 0 or topk.max() >= self.experts:
            return
        found = {name: harness.read(array) for name, array in self.arrays.items()}
        active, begins, ends, order = sorted_by_expert(topk, self.experts)
        harness.findings.equal("num_active", found["num_active"], np.array([len(active)], np.int32))
        for name, expected in (("active_expert", active), ("active_begin", begins), ("active_end", ends)):
            got = found[name]
            harness.findings.equal(name, got[: len(active)], expected)
            harness.findings.equal(f"{name} beyond the active experts", got[len(active) :], np.zeros(self.experts - len(active), np.int32))
        harness.findings.equal("assignments", found["assignments"][: topk.size], order)
        harness.findings.untouched("assignments beyond the last", found["assignments"][topk.size :])


@for_template(CHECKS, ["moe_sort.cu.j2"])
def check_moe_sort(harness: Harness) -> None:
    p = harness.p
    for count in (*harness.tokens, 1024 // p.top_k + 2):  # more assignments than a thread each, and than fit one tile of them
        uniform = np.argsort(harness.rng.random((count, p.experts)), axis=1)[:, : p.top_k].astype(np.int32)
        same = np.broadcast_to(np.arange(p.experts - p.top_k, p.experts, dtype=np.int32)[::-1], (count, p.top_k))
        for topk in (uniform, _random_topk(harness, count, p.experts, p.top_k), np.ascontiguousarray(same)):
            lists = _Lists(harness, p.experts, count * p.top_k)
            harness.launch(Grid(count), num_tokens=harness.integer(count), topk_experts=harness.input(topk), **lists.arrays)
            lists.check(harness, topk)
            harness.release()


@for_template(CHECKS, ["linear_and_choice.cu.j2"])
def check_linear_and_choice(harness: Harness) -> None:
    """A linear layer's y[m] = W x[m], added to what is there or not, the experts that logits choose, and these grouped."""
    p, most = harness.p.linear, max(harness.tokens)
    choice, wanted = harness.p.choice, harness.few(p.rows, SLICE_TILES * 16)
    x = harness.random("bf16", most, p.cols)
    w = harness.random("f32", 1, wanted, p.cols, scale=p.cols**-0.5).astype(numpy_dtype("bf16"))
    packed = pack_mma_a(w)
    residual = harness.random("f32", most, wanted) if p.accumulate else np.zeros((most, wanted), np.float32)
    bias = _choice_bias(harness, choice)
    logits = np.stack([_router_row(harness, choice, row, bias) for row in range(most)])

    def run(rows: NDArray[np.int64]) -> dict[str, Array]:
        count = len(rows)
        y = poison("f32", guard(count), p.y_stride)
        if p.accumulate:
            y[:count, :wanted] = residual[rows]
        outputs = {
            "y": harness.input(y),
            "topk_experts": harness.poisoned("i32", guard(count), choice.top_k),
            "topk_weights": harness.poisoned("f32", guard(count), choice.top_k),
        }
        lists = _Lists(harness, choice.experts, count * choice.top_k)
        biases = {} if bias is None else {"correction_bias": harness.input(bias)}
        harness.launch(
            # two blocks for the linear layer, so that each takes one row tile after another
            Grid(count, replaced={0: 3}, row_tiles=-(-wanted // 16)),
            num_tokens=harness.integer(count),
            x=harness.input(x[rows]),
            weight=harness.input(packed),
            router_logits=harness.input(logits[rows]),
            **biases,
            **outputs,
            **lists.arrays,
        )
        found = {name: split_guard(harness, name, harness.read(array), count) for name, array in outputs.items()}
        lists.check(harness, found["topk_experts"])
        harness.findings.untouched("y of other rows", found["y"][:, wanted:])
        return found | {"y": found["y"][:, :wanted]}

    experts, weights = ops.router(logits, router_of(harness.spec), bias)
    off = tolerances.positive_sum(weights, choice.experts if choice.softmax else choice.top_k) + 2 * tolerances.formula(weights)
    y = ops.linear(x, w[0])
    error = tolerances.dot(tolerances.terms_norm(x, w[0]), p.cols) + 2 * tolerances.EPS32 * (np.abs(y) + np.abs(y + residual))
    expected = {"y": (y + residual, error), "topk_experts": (experts, np.zeros(1)), "topk_weights": (weights, off)}
    check_rows(harness, run, expected)


#: Templates that read weights in tensor-core fragments.
MMA_EXPERTS = ("experts_mma.cu.j2", "experts_wgmma.cu.j2")


@for_template(CHECKS, ["experts_f32.cu.j2", *MMA_EXPERTS])
def check_experts(harness: Harness) -> None:
    """y[assignment] = W[expert] x, for tokens grouped by expert as moe_sort does. A token's bits must not depend on its company, and a
    kernel for many rows must have those of the one for few.
    """
    p, spec = harness.p, harness.spec
    if harness.decode_twin:
        harness.tokens += (p.tokens + 1,)
    most = max(harness.tokens)
    mma = harness.kernel.template in MMA_EXPERTS
    outputs = p.rows // 2 if p.gated else p.rows
    experts = harness.few(spec.n_routed_experts or 0)
    top_k = min(spec.num_experts_per_tok, experts)
    tile = (8 if p.gated else 16) if mma else 32
    wanted = harness.few(outputs, SLICE_TILES * tile)
    full_top_k = spec.num_experts_per_tok
    x_places = full_top_k // p.assignments_per_x_row  # 1 where every place reads its token's row
    out = p.out if mma else "float"

    topk = _random_topk(harness, most, experts, top_k)
    x = harness.random(harness.act, most, x_places, p.cols)
    packed, w, group_terms = _expert_weights(harness, experts, wanted)
    far = spaced(experts, spec.n_routed_experts or 0)

    def run(rows: NDArray[np.int64], kernel: Kernel | None = None, blocks: int = 0) -> dict[str, Array]:
        """``blocks``: of the grid, where it is another one than the kernel's own here."""
        count = len(rows)
        active, begins, ends, order = sorted_by_expert(topk[rows], experts)
        weight, numbers = harness.spread(packed, far, spec.n_routed_experts or 0)
        # an assignment is token * (experts a token) + place; a slice may have fewer experts than a token takes places
        order = (order // top_k * full_top_k + order % top_k).astype(np.int32)
        y = harness.poisoned("bf16" if out == "bf16" else "f32", guard(count) * full_top_k, outputs)
        unused = np.full((spec.n_routed_experts or 0) - len(active), 1 << 30, np.int32)  # what old lists left behind the new
        row_tiles = -(-wanted // tile)
        harness.launch(
            Grid(count, replaced={0: blocks or row_tiles} if blocks or not mma else {}, row_tiles=row_tiles, kernel=kernel),
            num_active=harness.integer(len(active)),
            active_expert=harness.input(np.append(numbers[active], unused)),
            active_begin=harness.input(np.append(begins, unused)),
            active_end=harness.input(np.append(ends, unused)),
            assignments=harness.input(order),
            x=harness.input(x[rows]),
            weight=weight,
            y=y,
        )
        got = split_guard(harness, "y", harness.read(y), count * full_top_k).reshape(count, full_top_k, outputs)
        harness.findings.untouched("y of other rows", got[:, :, wanted:])
        harness.findings.untouched("y of other places", got[:, top_k:])
        return {"y": got[:, :top_k, :wanted]}

    check_rows(harness, run, {"y": _expected(p, topk, x, w, group_terms, out)})
    # one row over and over: its experts get more tokens than the kernel takes at a time
    count = p.tokens + 6 if harness.decode_twin else CROWD
    crowd, alone = run(np.zeros(count, np.int64))["y"], run(np.zeros(1, np.int64))["y"]
    harness.findings.same_bits(f"y of {count} equal rows", crowd, np.repeat(alone, count, axis=0))
    if twin := harness.decode_twin:
        rows = np.arange(most)
        base = run(rows)["y"]
        harness.findings.same_bits(f"y of {twin.name}", base, run(rows, twin)["y"])
        # one block begins with nearly every expert, as on a GPU with many multiprocessors
        harness.findings.same_bits(f"y of {MANY_BLOCKS} blocks", run(rows, blocks=MANY_BLOCKS)["y"], base)


def _expected(p: Any, topk: Array, x: Array, w: Array, group_terms: Array | None, out: str) -> tuple[Array, Array]:
    """(y, tolerance) [M, k, N] of the experts ``topk`` [M, k] for x [M, k, K], or [M, 1, K] where every place reads its token's row; w and
    the sizes of the terms in a group are as ``_expert_weights`` gives them.
    """
    wanted = w.shape[1] // 2 if p.gated else w.shape[1]
    expected, error = np.empty((2, *topk.shape, wanted))
    for expert in range(len(w)):
        rows, places = np.nonzero(topk == expert)
        inputs = x[rows, np.minimum(places, x.shape[1] - 1)]
        y, off = ops.linear(inputs, w[expert]), tolerances.dot(tolerances.terms_norm(inputs, w[expert]), p.cols)
        if group_terms is not None:
            off = off + tolerances.dot(tolerances.terms_norm(inputs, group_terms[expert]), 2 * GROUP)
        if p.gated:
            gate, up = y[:, :wanted], y[:, wanted:]
            y, off = ops.silu(gate) * up, tolerances.swiglu(gate, up, off[:, :wanted], off[:, wanted:])
        expected[rows, places], error[rows, places] = y, off + tolerances.stored(y, out)
    return expected, error


def _expert_weights(harness: Harness, experts: int, wanted: int) -> tuple[Array, Array, Array | None]:
    """(the kernel's memory, logical weights [experts, wanted or 2·wanted (gate, then up), K] in float64, sizes of the terms in a group).

    Experts lie whole strides apart even where only their first rows are filled. Where tensor cores add up terms that are larger than the
    weights, what rounding does to those terms remains: the last result is their size for each weight (``HostFormat.term_sizes``).
    """
    p = harness.p
    weight = next(each for each in harness.plan.weights if each.of_experts)
    form, rows = on_host(format_of(weight)), (2 if p.gated else 1) * wanted
    mma = harness.kernel.template in MMA_EXPERTS
    memory = poison(weight.dtype, experts, form.form.matrix_bytes(weight.layout, p.rows, p.cols) // ITEM_BYTES[weight.dtype])
    logical, terms = np.empty((experts, rows, p.cols)), []
    for expert in range(experts):
        parts = form.example(harness.rng, rows, p.cols)
        named = {f"w{suffix}": part for suffix, part in zip(form.suffixes, parts, strict=True)}
        logical[expert] = stored_tensor(named | {"w_shape": np.array([rows, p.cols])}, "w")
        sizes = form.term_sizes(parts) if mma else None
        terms += [] if sizes is None else [sizes]
        packed = form.pack(weight.layout, [_laid_out(part, mma, wanted, p) for part in parts])
        memory[expert, : len(packed)] = packed
    return memory, logical, np.stack(terms) if terms else None


def _laid_out(part: Array, mma: bool, wanted: int, p: Any) -> Array:
    """The first ``wanted`` outputs (and their up halves) of a checkpoint tensor, in the kernel's order of rows. Generic kernels read them
    among all rows; the others are NaN, or have every bit set."""
    if mma:
        return interleaved(part, 8) if p.gated else part
    whole = np.full((p.rows, part.shape[1]), -1 if part.dtype.kind == "i" else np.nan, part.dtype)
    whole[:wanted] = part[:wanted]
    if p.gated:
        whole[p.rows // 2 : p.rows // 2 + wanted] = part[wanted:]
    return whole
