"""What the n-gram drafter proposes: what followed the longest suffix, the latest occurrence first."""

from __future__ import annotations

import pytest

from kdgen.drafters.ngram import NgramDrafter


def test_the_latest_occurrence_weighs_most() -> None:
    proposal = NgramDrafter().propose([1, 2, 9, 1, 3, 8, 1], 2)
    assert proposal.tokens[0].tolist()[:2] == [3, 2] and proposal.tokens[1].tolist()[:2] == [8, 9]
    assert proposal.log_probs[0, 0] > proposal.log_probs[0, 1]


def test_only_the_latest_occurrences_vote() -> None:
    proposal = NgramDrafter(matches=1).propose([1, 2, 9, 1, 3, 8, 1], 1)
    assert proposal.tokens[0].tolist() == [3]


def test_the_longest_suffix_counts() -> None:
    assert NgramDrafter().propose([5, 1, 7, 1, 8, 5, 1], 1).tokens[0].tolist() == [7]


@pytest.mark.parametrize("context", [[1], [1, 2, 3]])
def test_nothing_is_proposed_without_an_earlier_occurrence(context: list[int]) -> None:
    assert NgramDrafter().propose(context, 3).depths == 0
