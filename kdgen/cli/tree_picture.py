"""A draft tree as text: a run of nodes without branches is one line, and accepted nodes are marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text
from rich.tree import Tree

from kdgen.cli.output import printable
from kdgen.runtime.engine import Engine
from kdgen.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Node:
    """A node of a draft tree. ``parent`` is an index, -1 for the root. ``accepted``: the target model chose this node and its ancestors."""

    token: int
    parent: int
    accepted: bool


def last_tree(engine: Engine) -> tuple[Node, ...]:
    """The tree that the engine verified last, for the step's first sequence."""
    size, accepted = int(engine.read("tree_size")[0]), int(engine.read("accepted_count")[0])
    tokens, parents = engine.read("tree_token")[0, :size], engine.read("tree_parent")[0, :size]
    chosen = {int(node) for node in engine.read("accepted_nodes")[0, :accepted]}
    return tuple(
        Node(int(token), int(parent) if place else -1, place in chosen)
        for place, (token, parent) in enumerate(zip(tokens, parents, strict=True))
    )


def accepted(nodes: Sequence[Node]) -> int:
    return sum(node.accepted for node in nodes)


def guessed(nodes: Sequence[Node]) -> int:
    """The number of accepted nodes on the path of first guesses, which a chain would hold. Siblings are in order of probability."""
    first: dict[int, int] = {}
    for place, node in enumerate(nodes):
        first.setdefault(node.parent, place)
    place, count = 0, 1
    while (child := first.get(place)) is not None and nodes[child].accepted:
        place, count = child, count + 1
    return count


def draw(nodes: Sequence[Node], tokenizer: Tokenizer) -> Tree:
    """The tree below the root."""
    children: dict[int, list[int]] = {}
    for place, node in enumerate(nodes):
        children.setdefault(node.parent, []).append(place)

    def run_from(place: int) -> list[int]:
        """The node and its descendants, down to the first that has siblings or another mark."""
        run = [place]
        while len(below := children.get(run[-1], [])) == 1 and nodes[below[0]].accepted == nodes[place].accepted:
            run.append(below[0])
        return run

    def add(branch: Tree, place: int) -> None:
        run = run_from(place)
        twig = branch.add(_label([nodes[each].token for each in run], nodes[place].accepted, tokenizer))
        for child in children.get(run[-1], []):
            add(twig, child)

    tree = Tree(_label([nodes[0].token], True, tokenizer), guide_style="dim")
    for child in children.get(0, []):
        add(tree, child)
    return tree


def readable(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """The tokens' text in quotes: control characters and bytes outside UTF-8 as escapes, special tokens as numbers."""
    pieces = [tokenizer.piece(token) or f"<{token}>".encode() for token in tokens]
    return f"'{printable(b''.join(pieces).decode('utf-8', 'backslashreplace'))}'"


def _label(tokens: Sequence[int], accepted: bool, tokenizer: Tokenizer) -> Text:
    text = readable(tokens, tokenizer)
    return Text(f"{text} ✓", style="bold green") if accepted else Text(text, style="dim")
