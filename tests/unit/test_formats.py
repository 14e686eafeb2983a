"""What plans and the host say about a format of weights agrees, for every format: sizes, layouts, values, damage."""

from __future__ import annotations

import numpy as np
import pytest

from kdgen.plan.formats import Format, Int4Groups, Plain, format_of
from kdgen.plan.ir import ITEM_BYTES, Weight
from kdgen.plan.weights import sized
from kdgen.weights.formats import first_bad_value, numpy_dtype, on_host
from kdgen.weights.pools import Pools

FORMATS: list[Format] = [Plain("bf16"), Plain("f32"), *(Int4Groups("u8", group) for group in (32, 64, 128))]
ROWS, COLS, COUNT = 32, 256, 3
CASES = [
    pytest.param(form, tensor_cores, id=f"{form.name}-{form.dtype}-{form.group_size}-{'tiles' if tensor_cores else 'inputs'}")
    for form in FORMATS
    for tensor_cores in (True, False)
    if not (tensor_cores and form.dtype == "f32")  # tensor cores read no float32
]


def device_tensor(form: Format, tensor_cores: bool) -> Weight:
    """Three experts' matrices in ``form``."""
    layout, logical = form.layout(tensor_cores), (COUNT, ROWS, COLS)
    return sized(Weight("w", form.dtype, logical, "experts", layout, ("w",), 0, group_size=form.group_size))


@pytest.mark.parametrize(("form", "tensor_cores"), CASES)
def test_plans_and_packing_agree_on_sizes(form: Format, tensor_cores: bool) -> None:
    weight = device_tensor(form, tensor_cores)
    assert format_of(weight) == form
    parts = on_host(form).example(np.random.default_rng(0), ROWS, COLS)
    packed = on_host(form).pack(weight.layout, parts)
    assert packed.dtype == numpy_dtype(form.dtype) and packed.ndim == 1
    assert packed.nbytes * COUNT == weight.stored_bytes == ROWS * COLS * form.bits / 8 * COUNT + padding(form, tensor_cores)
    assert first_bad_value(weight, 0, packed) is None


def padding(form: Format, tensor_cores: bool) -> float:
    """Bytes that row tiles have beyond the weights' bits: a tile's step has scales for groups of 32 whatever the group is."""
    if not tensor_cores or not form.group_size:
        return 0
    return COUNT * ROWS * COLS * (16 / 32 - 16 / form.group_size) / 8


@pytest.mark.parametrize(("form", "tensor_cores"), CASES)
def test_damage_of_any_matrix_is_found(form: Format, tensor_cores: bool) -> None:
    host, weight = on_host(form), device_tensor(form, tensor_cores)
    parts = host.example(np.random.default_rng(1), ROWS, COLS)
    checked = host.suffixes.index(host.checked)
    parts[checked][ROWS - 1, -1] = np.inf
    damaged = host.pack(weight.layout, parts)
    found = first_bad_value(weight, 0, damaged)
    assert found is not None and 0 <= found < len(damaged)


@pytest.mark.parametrize(("form", "tensor_cores"), CASES)
def test_made_up_weights_fill_a_matrix(form: Format, tensor_cores: bool) -> None:
    weight, pools = device_tensor(form, tensor_cores), Pools(3)
    pieces = list(on_host(form).made_up(weight, pools, 0.5, 12345))
    assert all(piece.dtype == numpy_dtype(form.dtype) and piece.ndim == 1 for piece in pieces)
    assert sum(len(piece) for piece in pieces) * ITEM_BYTES[form.dtype] * COUNT == weight.stored_bytes
    assert all(first_bad_value(weight, 0, piece) is None for piece in pieces if weight.layout == form.row_tiles)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_steps_hold_whole_inputs(form: Format) -> None:
    assert form.steps(form.step_inputs) == 1 and form.steps(form.step_inputs + 1) == 2
    assert form.tile_bytes(17, form.step_inputs) == 2 * form.step_bytes
