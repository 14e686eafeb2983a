"""Types of options that are numbers in ASCII digits. Python alone also takes other scripts' digits, and underscores between digits."""

from __future__ import annotations

from typing import Any

import click
from click.types import FloatParamType, IntParamType


def plain(text: str) -> bool:
    """Whether ``text`` is ASCII without underscores, as numbers have to be."""
    return text.isascii() and "_" not in text


class _Plain(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not plain(value):
            self.fail(f"{value!r} is not a number in ASCII digits.", param, ctx)
        return super().convert(value, param, ctx)


class Integer(_Plain, IntParamType):
    """Any integer."""


class IntRange(_Plain, click.IntRange):
    """An integer between bounds."""


class Float(_Plain, FloatParamType):
    """Any number."""


class FloatRange(_Plain, click.FloatRange):
    """A number between bounds, which NaN is not."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value} is not a number.", param, ctx)
        return number
