"""How a row's keys are split: by absolute position, so that a split holds the same keys whatever the row and the length."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SplitRange:
    """From ``position`` on, whose split is number ``index``, splits hold ``keys`` keys."""

    position: int
    index: int
    keys: int


@dataclass(frozen=True)
class Splits:
    """Ranges by rising position; the first begins at position 0."""

    ranges: tuple[SplitRange, ...]

    @classmethod
    def growing(cls, *steps: tuple[int, int]) -> Splits:
        """From (position, keys) pairs; each position is a bound of the splits before it."""
        ranges: list[SplitRange] = []
        for position, keys in steps:
            last = ranges[-1] if ranges else SplitRange(0, 0, 1)
            ranges.append(SplitRange(position, last.index + (position - last.position) // last.keys, keys))
        return cls(tuple(ranges))

    @property
    def shortest(self) -> int:
        return min(each.keys for each in self.ranges)

    def of(self, position: int) -> int:
        """The split that holds ``position``."""
        found = next(each for each in reversed(self.ranges) if position >= each.position)
        return found.index + (position - found.position) // found.keys

    def begin(self, split: int) -> int:
        """The first position of ``split``."""
        found = next(each for each in reversed(self.ranges) if split >= each.index)
        return found.position + (split - found.index) * found.keys

    def count(self, keys: int) -> int:
        """Splits of the first ``keys`` positions."""
        return self.of(keys - 1) + 1
