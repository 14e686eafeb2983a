"""What model descriptions are made of: field types, RoPE scaling, groups of checkpoint tensors, and values shown in messages."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import ErrorDetails

from kdgen.errors import Finding

#: Kernels index a dimension with a 32-bit integer.
MAX_DIM = 2**31 - 1
#: Host and device code count bytes in signed 64-bit integers.
MAX_BYTES = 2**63 - 1
Size = Annotated[int, Field(gt=0, le=MAX_DIM)]
#: Layers are planned, launched and loaded one by one; no published model has a tenth of these.
MAX_LAYERS = 4096
Layers = Annotated[int, Field(gt=0, le=MAX_LAYERS)]


def _fits_float32(value: float) -> float:
    with np.errstate(over="ignore", under="ignore"):
        single = np.float32(value)
    if not np.isfinite(single) or (single == 0 and value != 0):
        raise ValueError("does not fit in float32")
    return value


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), AfterValidator(_fits_float32)]


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention magnitude: 0.1·mscale·ln(factor) + 1, and 1 where nothing is stretched (``yarn_get_mscale``)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def keys(*names: str) -> frozenset[str]:
    """The words of all ``names``."""
    return frozenset(key for line in names for key in line.split())


class Frozen(BaseModel):
    """A mapping of a model description. Its fields cannot change, and it takes no unknown keys.

    A field that is added to a description must not change the hash of a model that does without it. ``essential`` therefore leaves out
    every field that has its default. ``always_written`` names the exceptions: the fields with a default that hashes held before this
    rule. Do not add names to it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())
    always_written: ClassVar[Set[str]] = frozenset()

    def essential(self, exclude: Set[str] = frozenset()) -> dict[str, Any]:
        """What hashes and published configs hold, as JSON has it: the fields that are required, differ from their default, or are in
        ``always_written``, without those of ``exclude``. Nested mappings follow the same rule."""
        found = self.model_dump(mode="json", exclude={*exclude, *self._left_at_default()})
        nested = {name: getattr(self, name) for name in found}
        return found | {name: value.essential() for name, value in nested.items() if isinstance(value, Frozen)}

    def _left_at_default(self) -> Iterator[str]:
        for name, field in type(self).model_fields.items():
            optional = not field.is_required() and name not in self.always_written
            if optional and getattr(self, name) == field.get_default(call_default_factory=True):
                yield name


class RopeScaling(Frozen):
    """YaRN. ``mscale`` and ``mscale_all_dim`` of 0 mean "not given", as the modelling code treats them."""

    always_written: ClassVar[Set[str]] = keys("type beta_fast beta_slow mscale mscale_all_dim attention_factor")

    type: Literal["yarn"] = "yarn"
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False), AfterValidator(_fits_float32)]
    original_max_position_embeddings: Size
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0  # its square scales attention, in float32
    mscale_all_dim: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    attention_factor: Positive | None = None

    @model_validator(mode="after")
    def _ordered(self) -> RopeScaling:
        if self.beta_fast <= self.beta_slow:
            raise ValueError("beta_fast must exceed beta_slow")
        return self

    def given(self) -> dict[str, Any]:
        """The keys of a published ``rope_parameters``: a key without a value is left out."""
        return {key: value for key, value in self.essential().items() if value is not None}

    @property
    def cos_sin_factor(self) -> float:
        """What cos and sin are multiplied by: 1 for every published DeepSeek and Kimi config, whose two mscales are equal."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)


@dataclass(frozen=True)
class TensorGroup:
    """Checkpoint tensors of one shape. ``key`` holds ``{e}`` where there is one for each of ``count`` experts.

    ``kind`` is ``matrix`` (stored as ``Spec.dtype``; or as bf16 where that is float32, which loses nothing), ``small`` (norms, biases and
    the router: bf16 or float32), or which part of a quantized matrix the tensors are. The key of such a part is the matrix's key, an
    underscore and the kind; ``matrix`` is the matrix's shape, and ``stored`` has the element types that the part may be stored in, as
    safetensors names them.
    """

    key: str
    shape: tuple[int, ...]
    kind: str = "matrix"
    count: int = 1
    matrix: tuple[int, int] | None = None
    stored: tuple[str, ...] = ()

    def names(self) -> Iterator[str]:
        """The key of each tensor of the group."""
        return (self.key.replace("{e}", str(e)) for e in range(self.count))


def show(value: object) -> str:
    """A value for a message: printable, one line, at most 60 characters, however large it is."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    try:
        text = ascii(value[:100] if isinstance(value, (str, bytes, list)) else value)
    except ValueError:  # Python writes out no number of more than 4,300 digits
        return "something with a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def show_at(values: Mapping[str, object], key: str) -> str:
    """The value under ``key`` for a message. Dots in ``key`` lead into nested mappings. Without a value: an empty text."""
    found: object = values
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return ""
        found = found[part]
    return show(found)


def show_key(key: object) -> str:
    """A key for a message: as it is, unless it would do something to a terminal."""
    return key if isinstance(key, str) and len(key) <= 200 and key.isprintable() else show(key)


def findings(details: Sequence[ErrorDetails], file: str, top: type[Frozen], nested: Mapping[str, type[Frozen]]) -> list[Finding]:
    """What pydantic found wrong with single fields of ``top``. ``nested`` has, by name, the fields that are mappings themselves."""
    found: list[Finding] = []
    for detail in details:
        key = ".".join(show_key(part) for part in detail["loc"])
        if not detail["loc"]:
            continue
        if detail["type"] == "missing":
            found.append(Finding(file, key, "", "missing"))
        elif detail["type"] == "contradictions":  # between the fields of a nested mapping
            found += [Finding(file, f"{key}.{inner}", show(detail["input"].get(inner)), reason) for inner, reason in detail["ctx"]["pairs"]]
        elif detail["type"] == "extra_forbidden":
            model = nested.get(str(detail["loc"][-2]), top) if len(detail["loc"]) > 1 else top
            close = difflib.get_close_matches(str(detail["loc"][-1]), model.model_fields, 1)
            reason = "unknown key" + (f"; did you mean {close[0]}?" if close else "")
            found.append(Finding(file, key, show(detail["input"]), reason))
        else:
            reason = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
            found.append(Finding(file, key, show(detail["input"]), reason))
    return found
