"""``kdgen spec``: a published model's config.json as kdgen's own YAML."""

from __future__ import annotations

from pathlib import Path

import click

from kdgen.errors import KdgenError
from kdgen.runtime.model import described
from kdgen.spec.model import shipped_specs

TAKES = "kdgen spec takes a published model's folder or its config.json"


@click.command("spec", short_help="Print the spec of a published model as YAML.")
@click.argument("model", type=click.Path(path_type=Path), metavar="DIR")
def command(model: Path) -> None:
    """Print the spec of a published model as YAML. DIR is the model's folder, or its config.json.

    The output is a spec file for commands that take SPEC: kdgen spec DIR > model.yaml, then kdgen plan model.yaml.

    The command reads config.json, and the headers of the safetensors files beside it for the dtype of the router. It refuses a config
    with keys or values that kdgen does not know or cannot compute, and names each of them.
    """
    if model.suffix in (".yaml", ".yml") if model.exists() else str(model) in shipped_specs():
        raise KdgenError(f"{model}: is already a spec: `kdgen plan {model}` and `kdgen build {model}` take it; {TAKES}")
    if not model.exists():
        raise KdgenError(f"{model}: there is no such file or folder; {TAKES}")
    click.echo(described(model).to_yaml(), nl=False)
