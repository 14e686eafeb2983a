"""The cache where attention takes its keys in whole tiles (``Plan.key_tiles``): a sequence's slots by 64, of those the columns by 64.

A tile then lies in memory as tensor cores read it from shared memory, so that one copy brings many rows: each row of a tile is 8
pieces of 16 bytes, of which piece p stands at place p ^ (row mod 8).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.plan.attention import WGMMA_TILE

TILE = WGMMA_TILE  #: slots, and columns of a chunk
_PIECE = 8  # numbers of 2 bytes


def to_tiles(rows: NDArray[Any]) -> NDArray[Any]:
    """``rows`` [..., slots, columns], both multiples of 64, 2-byte numbers: the same shape, in the order of tiles."""
    *outer, slots, columns = rows.shape
    by_piece = rows.reshape(*outer, slots // TILE, TILE, columns // TILE, TILE // _PIECE, _PIECE)
    return _exchanged(np.moveaxis(by_piece, -3, -4)).reshape(rows.shape)


def from_tiles(tiles: NDArray[Any]) -> NDArray[Any]:
    """The inverse of ``to_tiles``."""
    *outer, slots, columns = tiles.shape
    by_chunk = tiles.reshape(*outer, slots // TILE, columns // TILE, TILE, TILE // _PIECE, _PIECE)
    return np.moveaxis(_exchanged(by_chunk), -4, -3).reshape(tiles.shape)


def _exchanged(pieces: NDArray[Any]) -> NDArray[Any]:
    """[..., row, piece, number] with the pieces of each row exchanged, which undoes itself."""
    places = np.arange(TILE // _PIECE)[None, :] ^ (np.arange(TILE)[:, None] % 8)
    return np.take_along_axis(pieces, np.broadcast_to(places[..., None], pieces.shape), axis=-2)
