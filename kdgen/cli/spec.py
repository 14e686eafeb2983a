"""``kdgen spec``: a published model's config.json as kdgen's own YAML."""

from __future__ import annotations

from pathlib import Path

import click

from kdgen.errors import KdgenError
from kdgen.model import described
from kdgen.spec import shipped_specs


@click.command("spec", short_help="Print the spec of a published model as YAML.")
@click.argument("model", type=click.Path(path_type=Path), metavar="DIR")
def command(model: Path) -> None:
    """Print the spec of the published model in DIR (or of a config.json) as YAML, which other commands take as SPEC.

    Only the description is read, and of weights beside it in what type the router is stored, which no config says. Anything in it that
    kdgen does not know, or knows that its kernels do not compute, is refused.
    """
    if model.suffix in (".yaml", ".yml") or (str(model) in shipped_specs() and not model.exists()):
        raise KdgenError(f"{model}: is a spec already, which other commands take; wanted is a published model's folder or its config.json")
    click.echo(described(model).to_yaml(), nl=False)
