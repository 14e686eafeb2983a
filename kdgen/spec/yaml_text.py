"""YAML as kdgen reads and writes it: bounded in size and depth, without tags, anchors or a key twice."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from kdgen.errors import Finding, SpecError
from kdgen.files.inputs import read_input
from kdgen.spec.fields import (
    show,
    show_key,
)

_MAX_DEPTH = 32


def refuse(file: str, reason: str, key: str = "file", value: str = "") -> SpecError:
    return SpecError([Finding(file, key, value, reason)])


def read_text(path: Path, limit: int) -> str:
    file = str(path)
    if path.suffix in (".kdtr", ".safetensors"):
        raise refuse(file, "holds weights, and a description is wanted: a config.json or a spec; `kdgen inspect` shows what it holds")
    try:
        data = read_input(path, limit)
    except IsADirectoryError:
        raise refuse(file, "is a folder, not a file") from None
    except OSError as error:
        what = ", so it is no model description" if error.errno == errno.EFBIG else ""
        raise refuse(file, f"cannot be read: {error.strerror or error}{what}") from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise refuse(file, f"is not UTF-8 text (byte {error.start})") from None
    if not text.strip():
        raise refuse(file, "is empty")
    return text


class Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's scalars, so that 1e-5 is a number, and ``no`` and ``1:30`` are not."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own attribute, replaced so as not to add to its table


class Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own attribute, replaced so as not to add to its table


def dump_yaml(values: Mapping[str, Any]) -> str:
    """YAML text of plain data, keys in their order, that this module's loader reads back exactly."""
    return str(yaml.dump(dict(values), Dumper=Dumper, sort_keys=False, allow_unicode=True))


def parse_yaml(text: str, file: str) -> object:
    """One YAML document of plain mappings, sequences and scalars. Raises SpecError for tags, anchors, aliases, duplicate keys, depth."""
    try:
        depth = documents = 0
        for event in yaml.parse(text, Loader=Loader):
            where = f"line {event.start_mark.line + 1}" if event.start_mark else "file"
            if getattr(event, "anchor", None) is not None:  # the anchor of a node, or the one that an alias points to
                raise refuse(file, "anchors and aliases are not allowed: write the value out", where)
            if (tag := getattr(event, "tag", None)) is not None:
                raise refuse(file, "YAML tags are not allowed", where, show(tag))
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            documents += isinstance(event, yaml.DocumentStartEvent)
            if depth > _MAX_DEPTH:
                raise refuse(file, f"nested deeper than {_MAX_DEPTH} levels", where)
        if documents != 1:
            raise refuse(file, f"holds {documents} YAML documents instead of one" if documents else "is empty")
        node = yaml.compose(text, Loader=Loader)
        duplicates = [*_duplicate_keys(node, file)]
        if duplicates:
            raise SpecError(duplicates)
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise refuse(file, f"is not valid YAML: {' '.join(str(error).split())}") from None
    except ValueError as error:  # an impossible date, or an integer of more digits than Python converts
        raise refuse(file, f"holds a value that cannot be read: {error}") from None


def _duplicate_keys(node: object, file: str, path: str = "") -> Iterator[Finding]:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = f"{path}{key.value}" if isinstance(key, yaml.ScalarNode) else f"{path}?"
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                yield Finding(file, show_key(name), "", f"a key must be plain text (line {key.start_mark.line + 1})")
            elif key.value in seen:
                yield Finding(file, show_key(name), "", f"given twice (line {key.start_mark.line + 1})")
            seen.add(str(key.value))
            yield from _duplicate_keys(value, file, f"{name}.")
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield from _duplicate_keys(value, file, f"{path}{i}.")
