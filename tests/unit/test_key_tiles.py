"""The cache in tiles: where a number lies is what wgmma's swizzle makes of its slot and column, and the way back is the way there."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kdgen.plan.build import build_plan
from kdgen.plan.cache_layout import from_tiles, to_tiles
from kdgen.plan.ir import Limits
from kdgen.spec.model import load_spec


@pytest.mark.parametrize(("slots", "columns"), [(64, 64), (192, 64), (128, 192), (64, 576)])
def test_places(slots: int, columns: int) -> None:
    rows = np.arange(2 * slots * columns, dtype=np.uint32).reshape(2, slots, columns)
    tiles = to_tiles(rows)
    assert tiles.shape == rows.shape
    for slot, column in ((0, 0), (1, 0), (9, 8), (63, 63), (slots - 1, columns - 1), (slots - 5, columns - 20)):
        chunk = slot // 64 * (columns // 64) + column // 64
        piece = column % 64 // 8 ^ slot % 8
        assert tiles[1].reshape(-1)[chunk * 4096 + slot % 64 * 64 + piece * 8 + column % 8] == rows[1, slot, column]
    assert (from_tiles(tiles) == rows).all()


def test_of_bfloat16() -> None:
    rows = np.random.default_rng(0).standard_normal((3, 64, 128)).astype(ml_dtypes.bfloat16)
    assert from_tiles(to_tiles(rows)).tobytes() == rows.tobytes()


def test_plans_with_tiles_have_whole_ones() -> None:
    plan = build_plan(load_spec("k26"), limits=Limits(max_context=1000))
    assert not plan.key_tiles and plan.buffer("kv_cache").shape[1:3] == (17, 64)
    tiled = plan.on("sm_90a")
    assert tiled.key_tiles and tiled.buffer("kv_cache").shape[1:3] == (17, 64)
    counts = {
        launch.argument("sequence_pages").value for launch, _ in tiled.program("decode").launches() if launch.kernel == "mla_attention"
    }
    assert counts == {17}
