"""Checks of the kernels that write a step's rows before the model runs, and its sequences' lengths and tokens after."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.verify.kernels.harness import (
    Grid,
    Harness,
    Registry,
    for_template,
    guard,
    split_guard,
)

Array = NDArray[Any]
CHECKS: Registry = {}
SEQUENCES = 3
CROWD = 130  #: sequences of a step: more than twice the threads of the kernels that have a place a thread


def drawn_lengths(harness: Harness, sequences: int = SEQUENCES) -> NDArray[np.int32]:
    return harness.rng.integers(0, 100, sequences).astype(np.int32)


def small_steps(harness: Harness) -> list[NDArray[np.int32]]:
    """Which sequence stands at each place of a step: one, some, all, in any order."""
    return [harness.rng.permutation(SEQUENCES)[:places].astype(np.int32) for places in range(1, SEQUENCES + 1)]


def crowded_steps(harness: Harness) -> list[NDArray[np.int32]]:
    """Steps of one to a few places, and of a crowd, which takes threads several rounds."""
    return [*small_steps(harness), harness.rng.permutation(CROWD).astype(np.int32)]


@for_template(CHECKS, ["chain_rows.cu.j2"])
def check_chain_rows(harness: Harness) -> None:
    for step in crowded_steps(harness):
        for from_root in (0, 1):
            lengths, roots = drawn_lengths(harness, CROWD), harness.rng.integers(0, 1000, CROWD).astype(np.int32)
            counts = np.ones(len(step), np.int32) if from_root else harness.rng.integers(1, 20, len(step)).astype(np.int32)
            begins, rows = np.cumsum([0, *counts], dtype=np.int32), int(counts.sum())
            tokens = harness.rng.integers(0, 1000, rows).astype(np.int32)
            places, number, ids = harness.integer(len(step)), harness.poisoned("i32", 1), harness.input(tokens)
            begin = harness.poisoned("i32", len(step) + 1) if from_root else harness.input(begins)
            outputs = {name: harness.poisoned("i32", guard(rows)) for name in ("row_sequence", "row_position", "row_prefix", "row_slot")}
            harness.launch(
                Grid(),
                step_count=places,
                step_sequence=harness.input(step),
                step_begin=begin,
                num_tokens=number,
                tokens=ids,
                sequence_length=harness.input(lengths),
                root_token=harness.input(roots),
                from_root=from_root,
                **outputs,
            )
            sequence = np.repeat(step, counts)
            position = lengths[sequence] + np.concatenate([np.arange(count) for count in counts])
            expected = {"row_sequence": sequence, "row_position": position, "row_prefix": position + 1, "row_slot": position}
            for name, values in expected.items():
                harness.findings.equal(name, split_guard(harness, name, harness.read(outputs[name]), rows), values)
            harness.findings.equal("tokens", harness.read(ids), roots[step] if from_root else tokens)
            harness.findings.equal("step_begin", harness.read(begin), begins)
            harness.findings.equal("num_tokens", harness.read(number), np.array([rows]))
            harness.release()


@for_template(CHECKS, ["logit_rows.cu.j2"])
def check_logit_rows(harness: Harness) -> None:
    """None, some or all rows of a place, more of them than a block has threads, too."""
    for step in crowded_steps(harness):
        counts = harness.rng.integers(1, 20, len(step)).astype(np.int32)
        counts[0] += 2 * harness.p.block
        wanted = harness.rng.integers(0, counts + 1).astype(np.int32)
        for chosen in (wanted, counts, np.minimum(counts, 1), np.zeros_like(counts)):
            begins, firsts = np.cumsum([0, *counts], dtype=np.int32), np.cumsum([0, *chosen], dtype=np.int32)
            sequence, position = (harness.rng.integers(0, 1000, begins[-1]).astype(np.int32) for _ in range(2))
            rows = np.concatenate([np.arange(end - number, end) for end, number in zip(begins[1:], chosen, strict=True)])
            expected = {"logit_row": rows, "logit_sequence": sequence[rows], "logit_position": position[rows]}
            number, outputs = harness.poisoned("i32", 1), {name: harness.poisoned("i32", guard(len(rows))) for name in expected}
            harness.launch(
                Grid(),
                step_count=harness.integer(len(step)),
                step_begin=harness.input(begins),
                logit_begin=harness.input(firsts),
                row_sequence=harness.input(sequence),
                row_position=harness.input(position),
                num_logits=number,
                **outputs,
            )
            for name, values in expected.items():
                harness.findings.equal(name, split_guard(harness, name, harness.read(outputs[name]), len(rows)), values)
            harness.findings.equal("num_logits", harness.read(number), np.array([len(rows)]))
            harness.release()


@for_template(CHECKS, ["advance.cu.j2"])
def check_advance(harness: Harness) -> None:
    for step in crowded_steps(harness):
        lengths, roots = drawn_lengths(harness, CROWD), np.full(CROWD, 7, np.int32)
        counts = harness.rng.integers(1, 20, len(step)).astype(np.int32)
        begins = np.cumsum([0, *counts], dtype=np.int32)
        firsts = np.cumsum([0, *harness.rng.integers(1, counts + 1)], dtype=np.int32)
        choices = harness.rng.integers(0, 1000, firsts[-1]).astype(np.int32)
        length, root = harness.input(lengths), harness.input(roots)
        harness.launch(
            Grid(),
            step_count=harness.integer(len(step)),
            step_sequence=harness.input(step),
            step_begin=harness.input(begins),
            logit_begin=harness.input(firsts),
            next_token=harness.input(choices),
            sequence_length=length,
            root_token=root,
        )
        lengths[step] += counts
        roots[step] = choices[firsts[1:] - 1]
        harness.findings.equal("sequence_length", harness.read(length), lengths)
        harness.findings.equal("root_token", harness.read(root), roots)
        harness.release()
