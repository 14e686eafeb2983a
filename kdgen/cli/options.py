"""Types of options that are numbers, in plain digits: Python also takes other scripts' digits, and underscores between them."""

from __future__ import annotations

from typing import Any

import click
from click.types import FloatParamType, IntParamType


def plain(text: str) -> bool:
    """Whether a number may be written so."""
    return text.isascii() and "_" not in text


class _Plain(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks alone
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not plain(value):
            self.fail(f"{value!r} is not a number in plain digits.", param, ctx)
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
            self.fail(f"{value} is no number.", param, ctx)
        return number
