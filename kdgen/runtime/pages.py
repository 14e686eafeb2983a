"""The pages of the caches: which ones each sequence has, which ones sequences share, and what finished prefixes left behind.

A page holds ``PAGE_SLOTS`` slots of one sequence, at the same place in every layer and in the drafter's cache. A full page's bits follow
from the tokens up to its end alone (the exactness contract), so that a page whose tokens were seen before is used again instead of being
computed: a chain of hashes over the token ids finds it. Pages that nobody uses stay findable until their room is wanted, the least
recently used first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kdgen.errors import PagesError
from kdgen.plan.ir import PAGE_SLOTS


@dataclass(frozen=True)
class PageStatistics:
    """Pages in all, those that sequences have now (and several of them at once), those kept for later, and what has happened so far:
    pages evicted, tokens that were found again, and tokens that were looked for."""

    pages: int
    used: int
    shared: int
    kept: int
    evicted: int
    hit_tokens: int
    asked_tokens: int


@dataclass(frozen=True)
class PageCopy:
    """A page to copy, in every layer, before the sequence's next step."""

    source: int
    target: int


def chain(tokens: Sequence[int], salt: bytes = b"") -> Iterator[bytes]:
    """The name of each full page of ``tokens``: a hash of its tokens and of the name before it."""
    name = salt
    for start in range(0, len(tokens) - PAGE_SLOTS + 1, PAGE_SLOTS):
        page = np.asarray(tokens[start : start + PAGE_SLOTS], np.int32)
        name = hashlib.sha256(name + page.tobytes()).digest()
        yield name


class Pages:
    """A pool of ``pages`` pages for ``sequences`` sequences of at most ``sequence_pages`` pages each.

    Every page is in exactly one state: free; used by one or more sequences; or kept, findable by its name and used by nobody.
    A used page is findable, too, once it has a name.
    """

    def __init__(self, pages: int, sequence_pages: int, sequences: int) -> None:
        self._count = pages
        self.tables: list[list[int]] = [[] for _ in range(sequences)]
        self._sequence_pages = sequence_pages
        self._free = list(range(pages - 1, -1, -1))
        self._users = [0] * pages
        self._named: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._evicted = self._hit_tokens = self._asked_tokens = 0

    @property
    def available(self) -> int:
        """Pages that a sequence could be given now."""
        return len(self._free) + len(self._kept)

    @property
    def statistics(self) -> PageStatistics:
        used, shared = sum(users > 0 for users in self._users), sum(users > 1 for users in self._users)
        return PageStatistics(self._count, used, shared, len(self._kept), self._evicted, self._hit_tokens, self._asked_tokens)

    def wanted(self, sequence: int, first_slot: int, end_slot: int) -> int:
        """Pages that ``extend`` would take from the pool."""
        table = self.tables[sequence]
        shared = sum(self._users[page] > 1 for page in table[first_slot // PAGE_SLOTS : -(-end_slot // PAGE_SLOTS)])
        return shared + max(0, -(-end_slot // PAGE_SLOTS) - len(table))

    def extend(self, sequence: int, first_slot: int, end_slot: int) -> list[PageCopy]:
        """Make the pages of slots from ``first_slot`` to before ``end_slot`` the sequence's own, so that it may write there.

        Pages that others use, too, are replaced; the copies returned bring what they hold. Raises PagesError, and changes nothing, when
        the pool has too few pages.
        """
        wanted = self.wanted(sequence, first_slot, end_slot)
        if wanted > self.available:
            raise PagesError(f"sequence {sequence} needs {wanted} more pages of the cache, and {self.available} of {self._count} are free")
        table, copies = self.tables[sequence], []
        for place in range(first_slot // PAGE_SLOTS, min(-(-end_slot // PAGE_SLOTS), len(table))):
            page = table[place]
            if self._users[page] > 1:
                table[place] = self._take()
                self._users[page] -= 1
                copies.append(PageCopy(page, table[place]))
            else:
                self._forget_name(page)
        while len(table) * PAGE_SLOTS < end_slot:
            table.append(self._take())
        return copies

    def release(self, sequence: int) -> None:
        """Give back all pages of ``sequence``: those with a name are kept, the last ones to be evicted first."""
        for page in reversed(self.tables[sequence]):
            self._users[page] -= 1
            if not self._users[page]:
                if page in self._names:
                    self._kept[page] = None
                else:
                    self._free.append(page)
        self.tables[sequence] = []

    def reuse(self, sequence: int, tokens: Sequence[int], salt: bytes = b"") -> int:
        """Give a sequence without pages those that hold the longest known prefix of ``tokens``; returns the tokens that they hold.

        The last token is never among them, for its logits are wanted.
        """
        assert not self.tables[sequence], "a sequence that has pages must release them first"
        self._asked_tokens += len(tokens)
        for name in chain(tokens[:-1], salt):
            page = self._named.get(name)
            if page is None:
                break
            self._kept.pop(page, None)
            self._users[page] += 1
            self.tables[sequence].append(page)
        found = len(self.tables[sequence]) * PAGE_SLOTS
        self._hit_tokens += found
        return found

    def share(self, sequence: int, tokens: Sequence[int], salt: bytes = b"") -> None:
        """Make the full pages of ``sequence`` findable, which has committed ``tokens``. A name that another page has stays that page's."""
        for page, name in zip(self.tables[sequence], chain(tokens, salt), strict=False):
            if name not in self._named and page not in self._names:
                self._named[name] = page
                self._names[page] = name

    def fork(self, source: int, target: int, slots: int) -> None:
        """Let ``target``, which has no pages, use those of the first ``slots`` slots of ``source``."""
        assert not self.tables[target], "a sequence that has pages must release them first"
        self.tables[target] = self.tables[source][: -(-slots // PAGE_SLOTS)]
        for page in self.tables[target]:
            self._users[page] += 1

    def forget(self) -> None:
        """Make no page findable any more."""
        for page in list(self._names):
            self._forget_name(page)
        self._free += self._kept
        self._kept.clear()

    def check(self) -> None:
        """Raises AssertionError when a page is lost, or in two states at once."""
        users = [0] * self._count
        for table in self.tables:
            assert len(table) <= self._sequence_pages, "a sequence has more pages than it may"
            assert len(set(table)) == len(table), "a sequence has a page twice"
            for page in table:
                users[page] += 1
        assert users == self._users, "the users of pages are miscounted"
        states = sorted([*self._free, *self._kept, *(page for page in range(self._count) if users[page])])
        assert states == list(range(self._count)), "a page is lost, or in two states"
        assert {page: name for name, page in self._named.items()} == self._names, "names and pages differ"
        assert all(page in self._names for page in self._kept), "a kept page has no name"

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._kept.popitem(last=False)
            self._forget_name(page)
            self._evicted += 1
        self._users[page] = 1
        return page

    def _forget_name(self, page: int) -> None:
        if name := self._names.pop(page, None):
            del self._named[name]
