"""Reading a published JSON config: its keys, what is wrong with them, and from which key of the file a field was read."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kdgen.errors import Finding, SpecError
from kdgen.spec.fields import show, show_key

#: A longer key is no mistyped key of ours.
_LONGEST_KEY = 64


class Origins:
    """The key of a file from which each field of a spec was read, so that a message about a field names the file's own key, in full.

    A field without a note has its own name in the mapping at ``path``. A field inside a noted field lies inside the noted key.
    """

    def __init__(self, path: str = "") -> None:
        self._path = path
        self._keys = {"memory": "memory"}  # a finding about all keys together names no key

    def note(self, field: str, key: str) -> None:
        self._keys[field] = key

    def key(self, field: str) -> str:
        parts = field.split(".")
        for count in range(len(parts), 0, -1):
            if (found := self._keys.get(".".join(parts[:count]))) is not None:
                return ".".join([found, *parts[count:]])
        return self._path + field

    def refusal(self, config: Reader, error: SpecError) -> SpecError:
        """All that is wrong with ``config``: what reading found, and what ``error`` says about the spec made from it, unless that
        lies in a key that was refused already."""
        refused = {finding.key for finding in config.findings}
        named = [replace(finding, key=self.key(finding.key)) for finding in error.findings]
        return SpecError(config.findings + [f for f in named if not any(f"{f.key}.".startswith(f"{key}.") for key in refused)])


class Reader:
    """One mapping of a config file, collecting what is wrong with it."""

    def __init__(self, file: str, values: Mapping[str, Any], path: str = "", findings: list[Finding] | None = None) -> None:
        self.file, self.values, self.path = file, values, path
        self.findings: list[Finding] = [] if findings is None else findings

    def full(self, key: str) -> str:
        """The path of ``key`` in the file."""
        return self.path + show_key(key)

    def bad(self, key: str, reason: str) -> None:
        value = show(self.values[key]) if key in self.values else ""
        self.findings.append(Finding(self.file, self.full(key), value, reason))

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def inside(self, key: str) -> Reader:
        """The mapping under ``key``; an empty one, and a finding, when there is none."""
        value = self.values.get(key)
        if not isinstance(value, dict):
            self.bad(key, "must be a mapping")
            value = {}
        return Reader(self.file, value, f"{self.path}{key}.", self.findings)

    def only(self, known: frozenset[str], what: str) -> None:
        for key in self.values:
            if key not in known:
                close = difflib.get_close_matches(key, known, 1, 0.8) if len(key) <= _LONGEST_KEY else []
                hint = f"; did you mean {close[0]}?" if close else ""
                self.bad(key, f"unknown {what} key: it may change what the model computes{hint}")

    def must(self, key: str, *allowed: Any, reason: str) -> None:
        """Refuse any value of ``key`` but the allowed ones (a missing key is None). Types count: 1 is not true."""
        value = self.get(key)
        if not any(type(value) is type(one) and value == one for one in allowed):
            self.bad(key, reason if key in self.values else f"missing; {reason}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"key {show(key)} is given twice")
        out[key] = value
    return out


def _constant(text: str) -> float:
    raise ValueError(f"{text} is no number JSON knows")


def read_json(text: str, file: str) -> Reader:
    """The mapping that a JSON file holds. Raises SpecError when it holds none, or one that is not plain."""
    try:
        values = json.loads(text, object_pairs_hook=_unique, parse_constant=_constant)
    except RecursionError:
        raise SpecError([Finding(file, "file", "", "is nested too deeply")]) from None
    except ValueError as error:
        raise SpecError([Finding(file, "file", "", f"is not valid JSON: {error}")]) from None
    if not isinstance(values, dict):
        raise SpecError([Finding(file, "file", show(values), "must be a mapping of keys to values")])
    return Reader(file, values)
