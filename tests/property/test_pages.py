"""Pages of the cache over a memory that is modelled: whatever is shared, copied, kept and evicted, a sequence reads what it wrote."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kdgen.errors import PagesError
from kdgen.plan.ir import PAGE_SLOTS
from kdgen.runtime.pages import Pages

SEQUENCES, POOL, MOST = 4, 9, 5  #: pages of the pool, and of a sequence: fewer than all sequences can fill
numbers = st.integers(0, SEQUENCES - 1)


class PagesMachine(RuleBasedStateMachine):
    """``memory`` holds a token a slot. Tokens are drawn from two, so that sequences often begin alike."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(POOL, MOST, SEQUENCES)
        self.memory = [[-1] * PAGE_SLOTS for _ in range(POOL)]
        self.tokens: list[list[int]] = [[] for _ in range(SEQUENCES)]

    def filled(self, sequence: int) -> int:
        """The first sequence from this one on that has tokens, or this one."""
        return next((each % SEQUENCES for each in range(sequence, sequence + SEQUENCES) if self.tokens[each % SEQUENCES]), sequence)

    def read(self, sequence: int) -> list[int]:
        pages = self.pages.tables[sequence]
        return [self.memory[pages[slot // PAGE_SLOTS]][slot % PAGE_SLOTS] for slot in range(len(self.tokens[sequence]))]

    @rule(sequence=numbers, kinds=st.lists(st.booleans(), max_size=2), tail=st.integers(0, 30), behind=st.integers(0, 63))
    def write(self, sequence: int, kinds: list[bool], tail: int, behind: int) -> None:
        """Commit pages of equal tokens, from the next page's start on, and a tail, and leave ``behind`` more slots of a draft tree."""
        length = len(self.tokens[sequence])
        new = [0] * (-length % PAGE_SLOTS) + [int(kind) for kind in kinds for _ in range(PAGE_SLOTS)] + [1] * tail
        new = new[: max(0, MOST * PAGE_SLOTS - length - behind)]
        end = length + len(new) + behind
        if not new:
            return
        before, wanted = list(self.pages.tables[sequence]), self.pages.wanted(sequence, length, end)
        if wanted > self.pages.available:
            with pytest.raises(PagesError, match=f"needs {wanted} more pages"):
                self.pages.extend(sequence, length, end)
            assert self.pages.tables[sequence] == before
            return
        for copy in self.pages.extend(sequence, length, end):
            self.memory[copy.target] = list(self.memory[copy.source])
        for slot, token in enumerate([*new, *[-2] * behind], length):
            self.memory[self.pages.tables[sequence][slot // PAGE_SLOTS]][slot % PAGE_SLOTS] = token
        self.tokens[sequence] += new

    @rule(kind=st.booleans(), pages=st.integers(1, 2), tail=st.integers(0, 30))
    def write_everywhere(self, kind: bool, pages: int, tail: int) -> None:
        for sequence in range(SEQUENCES):
            self.write(sequence, [kind] * pages, tail, 0)

    @rule(sequence=numbers, part=st.floats(0.5, 1))
    def cut(self, sequence: int, part: float) -> None:
        """Committed tokens are taken back, as behind a stop token that was noticed late."""
        self.tokens[sequence] = self.tokens[sequence][: round(part * len(self.tokens[sequence]))]

    @rule(sequence=numbers)
    def release(self, sequence: int) -> None:
        self.pages.release(sequence)
        self.tokens[sequence] = []

    @rule(sequence=numbers)
    def share(self, sequence: int) -> None:
        self.pages.share(sequence, self.tokens[sequence])

    @rule(source=numbers, to=numbers)
    def fork(self, source: int, to: int) -> None:
        source = self.filled(source)
        if source != to:
            self.release(to)
            self.pages.fork(source, to, len(self.tokens[source]))
            self.tokens[to] = list(self.tokens[source])

    @rule(source=numbers, to=numbers, part=st.floats(0, 1))
    def reuse(self, source: int, to: int, part: float) -> None:
        source = self.filled(source)
        wanted = self.tokens[source][: round(part * len(self.tokens[source]))]
        self.release(to)
        found = self.pages.reuse(to, wanted)
        assert found % PAGE_SLOTS == 0 and found < max(1, len(wanted))
        self.tokens[to] = wanted[:found]

    @rule(source=numbers, to=numbers)
    def what_was_shared_is_found_at_once(self, source: int, to: int) -> None:
        source = self.filled(source)
        if source != to:
            self.share(source)
            wanted = self.tokens[source]
            self.release(to)
            found = self.pages.reuse(to, wanted)
            assert found == max(0, len(wanted) - 1) // PAGE_SLOTS * PAGE_SLOTS
            self.tokens[to] = wanted[:found]

    @rule()
    def forget(self) -> None:
        self.pages.forget()
        assert self.pages.statistics.kept == 0

    @invariant()
    def every_sequence_reads_what_it_wrote(self) -> None:
        self.pages.check()
        for sequence, tokens in enumerate(self.tokens):
            assert self.read(sequence) == tokens, f"sequence {sequence}"

    def teardown(self) -> None:
        """No page leaks: once all sequences are gone, every page is free or kept."""
        for sequence in range(SEQUENCES):
            self.pages.release(sequence)
        statistics = self.pages.statistics
        assert statistics.used == 0 and self.pages.available == statistics.pages == POOL


TestPagesMachine = PagesMachine.TestCase
TestPagesMachine.settings = settings(max_examples=150, stateful_step_count=40)


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    pages = Pages(4, 4, 2)
    for token in (1, 2):
        tokens = [token] * (2 * PAGE_SLOTS)
        pages.extend(0, 0, len(tokens))
        pages.share(0, tokens)
        pages.release(0)
    assert pages.reuse(0, [1] * (2 * PAGE_SLOTS + 1)) == 2 * PAGE_SLOTS  # now the prefix of ones was used last
    pages.release(0)
    pages.extend(0, 0, PAGE_SLOTS)
    assert pages.statistics.evicted == 1
    assert pages.reuse(1, [2] * (2 * PAGE_SLOTS + 1)) == PAGE_SLOTS, "of the older prefix, its end goes first"
    pages.release(1)
    assert pages.reuse(1, [1] * (2 * PAGE_SLOTS + 1)) == 2 * PAGE_SLOTS
    assert pages.statistics.hit_tokens == 5 * PAGE_SLOTS


def test_a_page_that_is_written_again_is_not_found_by_what_it_held() -> None:
    pages, tokens = Pages(4, 4, 2), [1] * PAGE_SLOTS
    pages.extend(0, 0, PAGE_SLOTS)
    pages.share(0, tokens)
    pages.extend(0, PAGE_SLOTS // 2, PAGE_SLOTS)  # the sequence was cut in its middle and goes on otherwise
    assert pages.reuse(1, [*tokens, 1]) == 0


def test_only_full_pages_are_found() -> None:
    pages, tokens = Pages(4, 4, 2), [1] * (PAGE_SLOTS + 5)
    pages.extend(0, 0, len(tokens))
    pages.share(0, tokens)
    assert pages.reuse(1, [*tokens, 1]) == PAGE_SLOTS
