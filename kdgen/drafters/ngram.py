"""Prompt lookup: propose the tokens that followed an earlier occurrence of the last tokens (Saxena, "Prompt Lookup Decoding", 2023)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kdgen.drafters.base import Candidates, from_lists, nothing


class NgramDrafter:
    """Searches for the longest suffix of at most ``longest`` tokens that occurs earlier, and proposes the tokens that followed it there.

    If the suffix occurs several times, the last ``matches`` occurrences vote, and later ones have more weight.
    """

    name = "ngram"

    def __init__(self, longest: int = 4, matches: int = 8) -> None:
        self.longest, self.matches = longest, matches

    def propose(self, context: Sequence[int], depths: int) -> Candidates:
        tokens = list(context)
        for n in range(min(self.longest, len(tokens) - 1), 0, -1):
            suffix = tokens[-n:]
            found = [i + n for i in range(len(tokens) - n - 1, -1, -1) if tokens[i : i + n] == suffix][: self.matches]
            if found:
                return self._vote(tokens, found, depths)
        return nothing()

    def _vote(self, tokens: list[int], starts: list[int], depths: int) -> Candidates:
        rows = []
        for depth in range(depths):
            votes: Counter[int] = Counter()
            for age, start in enumerate(starts):
                if start + depth < len(tokens):
                    votes[tokens[start + depth]] += 1 / (1 + age)  # type: ignore[assignment]
            if not votes:
                break
            total = sum(votes.values())
            rows.append([(token, 0.9 * vote / total) for token, vote in votes.items()])
        return from_lists(rows)
