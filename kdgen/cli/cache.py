"""``kdgen cache dir`` and ``kdgen cache clear``."""

from __future__ import annotations

import click

from kdgen.cli.output import size_text
from kdgen.codegen.cache import Cache


@click.group("cache")
def command() -> None:
    """Show or clear the cache of compiled kernels. KDGEN_CACHE_DIR, an environment variable, puts it elsewhere."""


@command.command("dir")
def directory() -> None:
    """Print the cache's directory."""
    click.echo(Cache.default().path)


@command.command("clear")
def clear() -> None:
    """Remove everything kdgen put into the cache."""
    cache = Cache.default()
    size = cache.size()
    click.echo(f"removed {cache.clear()} files, {size_text(size)}, from {cache.path}")
