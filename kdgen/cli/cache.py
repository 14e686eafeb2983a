"""``kdgen cache dir`` and ``kdgen cache clear``."""

from __future__ import annotations

import click

from kdgen.cli.output import size_text
from kdgen.codegen.cache import Cache


@click.group("cache")
def command() -> None:
    """Show or clear the cache of compiled kernels. The environment variable KDGEN_CACHE_DIR moves it to another folder."""


@command.command("dir")
def directory() -> None:
    """Print the cache's directory."""
    click.echo(Cache.default().path)


@command.command("clear")
def clear() -> None:
    """Remove everything that kdgen wrote to the cache."""
    cache = Cache.default()
    size = cache.size()
    click.echo(f"removed {cache.clear()} files, {size_text(size)}, from {cache.path}")
