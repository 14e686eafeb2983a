"""Every loop of every template runs twice or more in a kernel check of the default ``kdgen verify``, so that wrong second passes are seen.

A part of the default checks is enough to show it. ``python -m tests.loops`` prints the table of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kdgen.backends.cpu import CpuBackend
from kdgen.spec.model import load_spec
from tests.loops import Checked, Loop, Trips, all_checked, counted, loops, trips_of

#: Models whose kernels run beside those in full size: (spec, compute type).
MODELS = {("tiny2", "f32"), ("tiny-wgmma", "bf16"), ("tiny-wgmma-8", "bf16"), ("tiny-v2", "f32")}
#: Loops that run once at most, and why: (template, part of the head).
ONCE = {
    ("mla_attention_f32.cu.j2", "j < keys; j += BLOCK"): "a tile has 32 keys, and no block fewer threads",
    ("router_logits.cu.j2", "i < BLOCK_EXPERTS * count"): "2 experts of 8 rows, and a block of 256 threads",
    ("tree_rows.cu.j2", "i < size; i += BLOCK"): "a tree has 64 nodes at most, and the block as many threads",
    (
        "peer_sum.cu.j2",
        "while (!round.receive_if_there",
    ): "waits for another rank, whose words a check has sent already; ranks' decodes wait",
    ("peer_sum_norm.cu.j2", "do {"): "waits for other ranks, as above",
    ("inbox.cuh.j2", "do {"): "waits for other ranks, as above",
}


def _checked() -> Iterator[Checked]:
    for each in all_checked([load_spec("tiny2")]):
        full_size = each.spec.name.startswith("k26") or each.spec.name in ("tiny-crowded", "tiny-narrow", "tiny-odd-widths")
        if full_size or ((each.spec.name, each.plan.compute) in MODELS and each.plan.shard.whole):
            yield each


def test_every_loop_runs_twice() -> None:
    backend = CpuBackend()
    found = dict.fromkeys(loops(), Trips())
    for each in _checked():
        for kernel in trips_of(backend, each).values():
            for loop, trips in kernel.items():
                found[loop] |= trips
    few = [loop for loop, trips in found.items() if not trips.more]
    unexplained = [f"{loop.template}:{loop.line}: {loop.head} ran {found[loop].most} times" for loop in few if _reason(loop) is None]
    assert not unexplained, "no default check runs these loops twice:\n" + "\n".join(unexplained)
    stale = set(ONCE) - {key for key in ONCE if any(_is(loop, key) for loop in few)}
    assert not stale, f"these loops are said to run once at most, and are not there or run more often: {stale}"


def _is(loop: Loop, key: tuple[str, str]) -> bool:
    return loop.template == key[0] and key[1] in loop.head


def _reason(loop: Loop) -> str | None:
    return next((reason for key, reason in ONCE.items() if _is(loop, key)), None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("for (int i = 0; i < n; ++i) f(i);", ["for (int i = 0; loop_0.again(i < n);  ++i) f(i);"]),
        ("for (int i = 1;; ++i) {\n  if (i > 3) break;\n}", ["loop_0.again(true)"]),
        ("// for (it) while (true)\nwhile (more(a, b)) {\n}", ["while (loop_0.again(more(a, b))) {"]),
        ("do {\n  x = g();\n} while (x);\n#pragma unroll\nfor (;;) {}", ["do { loop_0.again(true);", "} while (x);", "loop_1.again(true)"]),
    ],
)
def test_counters_stand_in_heads(text: str, expected: list[str]) -> None:
    result = counted("none.j2", text)
    assert all(part.replace(" ", "") in result.replace(" ", "") for part in expected), result
    assert "#pragma" not in result
