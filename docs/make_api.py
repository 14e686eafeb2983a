"""Writes docs/api.md from docstrings: ``python docs/make_api.py``.

With ``--check`` it writes nothing, and exits with 1 where the page is old.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

from kdgen.spec.sampling import GREEDY

PAGE = Path(__file__).with_name("api.md")
HEAD = """# Python API

Written by `python docs/make_api.py` from docstrings; do not edit. It lists what a program imports to build kernels and to decode, in the
order of use. [examples/](../examples) shows it at work, and [architecture.md](architecture.md) where everything else is. Names may move
between minor versions of 0.x; [CHANGELOG.md](../CHANGELOG.md) says which did.
"""
#: Module, and what of it is public.
PUBLIC = (
    ("kdgen.runtime.model", ("open_model", "with_drafter", "random_model", "Model")),
    ("kdgen.runtime.pipeline", ("open_engine", "Opened", "start_engine", "context_for")),
    ("kdgen.runtime.decode", ("decode_plain", "decode_tree", "Decoder", "Decoded", "same_rows")),
    ("kdgen.runtime.batch", ("Request", "Finished", "Batch", "decode_together")),
    ("kdgen.runtime.engine", ("Engine",)),
    ("kdgen.spec.sampling", ("Sampling",)),
    ("kdgen.text.tokenizer", ("load_tokenizer", "Tokenizer", "TextStream", "decode")),
    ("kdgen.drafters.base", ("Drafter", "Candidates", "DraftLogits", "from_lists", "nothing")),
    ("kdgen.drafters.ngram", ("NgramDrafter",)),
    ("kdgen.drafters.dflash", ("DFlashDrafter",)),
    ("kdgen.backends", ("open_backend", "backend_names")),
    ("kdgen.spec.model", ("load_spec", "shipped_specs", "Spec")),
    ("kdgen.spec.published", ("load_config",)),
    ("kdgen.plan.build", ("build_plan", "default_compute")),
    ("kdgen.plan.ir", ("Limits",)),
    ("kdgen.codegen.render", ("render", "Rendered")),
    ("kdgen.codegen.folders", ("build", "check")),
    ("kdgen.files.resources", ("demo_dir", "specs_dir", "templates_dir")),
    ("kdgen.errors", ("KdgenError", "SpecError", "WeightError", "BackendError", "CompileError", "LogitsError", "RanksError")),
)  # fmt: skip

#: Methods without an underscore that are for other rooms of kdgen alone, by class.
INTERNAL = {
    "Engine": ("begin_rounds", "cut", "fill", "fill_length", "read", "need_finite", "block_rows", "buffer", "work", "choosing"),
}


def page() -> str:
    """The whole page. Raises LookupError where something public is gone or has no docstring."""
    parts = [HEAD]
    for module_name, names in PUBLIC:
        module = importlib.import_module(module_name)
        parts.append(f"## {module_name}\n\n{_text(module, module_name, first_paragraph=True)}\n")
        for name in names:
            if not hasattr(module, name):
                raise LookupError(f"{module_name} has no {name}: correct PUBLIC in docs/make_api.py")
            parts += _entry(getattr(module, name), name)
    return "\n".join(parts)


def _entry(thing: object, name: str) -> Iterator[str]:
    if isinstance(thing, FunctionType):
        yield f"### `{name}`\n\n```python\n{_signature(thing, name)}\n```\n\n{_text(thing, name)}\n"
        return
    assert isinstance(thing, type), name
    bases = ", ".join(base.__name__ for base in thing.__bases__ if issubclass(base, Exception))
    yield f"### class `{name}{f'({bases})' if bases else ''}`\n\n{_text(thing, name)}\n"
    if dataclasses.is_dataclass(thing):
        shown = [f"{field.name}: {field.type}{_default(field)}" for field in dataclasses.fields(thing) if not field.name.startswith("_")]
        yield "```python\n" + "\n".join(shown) + "\n```\n"
    elif isinstance(made := vars(thing).get("__init__"), FunctionType) and not getattr(thing, "_is_protocol", False):
        yield f"```python\n{_signature(made, name).removesuffix(' -> None')}\n```\n"
    for attribute, value in vars(thing).items():
        method = value.fget if isinstance(value, property) else value.__func__ if isinstance(value, classmethod | staticmethod) else value
        hidden = attribute.startswith("_") or attribute in INTERNAL.get(name, ())
        if hidden or not isinstance(method, FunctionType) or not method.__doc__:
            continue
        kind = f"{attribute}: {method.__annotations__.get('return', '')}" if isinstance(value, property) else _signature(method, attribute)
        yield f"```python\n{kind}\n```\n\n{_text(method, attribute)}\n"


def _signature(function: FunctionType, name: str) -> str:
    signature = inspect.signature(function)
    own = [parameter for parameter in signature.parameters.values() if parameter.name not in ("self", "cls")]
    line = f"{name}{_unquoted(signature.replace(parameters=own))}"
    if len(line) <= 110:
        return line
    result = "" if signature.return_annotation is signature.empty else f" -> {signature.return_annotation}"
    return f"{name}(\n" + "".join(f"    {_unquoted(parameter)},\n" for parameter in own) + f"){result}"


def _unquoted(shown: object) -> str:
    """Annotations are text, shown without quotation marks; a function or ``GREEDY`` as a default is shown by its name."""
    without = re.sub(r"""(: |-> )(['"])(.*?)\2""", r"\1\3", str(shown)).replace(repr(GREEDY), "GREEDY")
    return re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", without)


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        return " = GREEDY" if field.default is GREEDY else f" = {field.default!r}"
    return "" if field.default_factory is dataclasses.MISSING else " = …"


def _text(thing: object, name: str, first_paragraph: bool = False) -> str:
    text = inspect.getdoc(thing)
    if not text:
        raise LookupError(f"{name} is public and has no docstring")
    text = text.replace("``", "`")
    return text.partition("\n\n")[0] if first_paragraph else text


def main(arguments: list[str]) -> int:
    text = page()
    if "--check" in arguments:
        current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        if not current:
            print("docs/api.md is old: run python docs/make_api.py", file=sys.stderr)
        return 0 if current else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
