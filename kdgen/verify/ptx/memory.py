"""Memory that interpreted PTX reads and writes: named arrays at addresses far apart, so that a stray access is noticed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kdgen.errors import KdgenError
from kdgen.verify.ptx.alu import Bits

#: Where shared memory lies among generic addresses, and its first variable in it.
SHARED_WINDOW, FIRST_SHARED = 0x7F0000000000, 0x10000
_FIRST_GLOBAL, _APART = 0x300000000000, 0x000100000000


@dataclass(frozen=True)
class Region:
    """An array: ``data`` are its bytes, ``address`` its place among generic addresses."""

    name: str
    address: int
    data: npt.NDArray[np.uint8]

    @property
    def words(self) -> npt.NDArray[np.uint32]:
        return self.data.view(np.uint32)


class Memory:
    """Arrays, and ``names`` of values that are known by name: parameters and words of arrays."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.names: dict[int, str] = {}

    def add(self, name: str, data: npt.NDArray[np.generic], address: int | None = None) -> Region:
        """A global array with the bytes of ``data``, or one at ``address``. Addresses are multiples of 1024."""
        place = _FIRST_GLOBAL + _APART * len(self.regions) if address is None else address
        region = Region(name, place, np.ascontiguousarray(data).reshape(-1).view(np.uint8).copy())
        self.regions.append(region)
        return region

    def find(self, address: int) -> Region | None:
        return next((each for each in self.regions if each.address <= address < each.address + len(each.data)), None)

    def load(self, addresses: Bits, size: int) -> Bits:
        """``size`` bytes at each address, as integers. Raises KdgenError outside the arrays, and where an address is not aligned."""
        region, places = self._places(addresses, size)
        result = np.zeros(len(addresses), np.uint64)
        for byte in range(size):
            result |= region.data[places + byte].astype(np.uint64) << np.uint64(8 * byte)
        return result

    def store(self, addresses: Bits, size: int, values: Bits) -> None:
        region, places = self._places(addresses, size)
        for byte in range(size):
            region.data[places + byte] = (values >> np.uint64(8 * byte)).astype(np.uint8)

    def _places(self, addresses: Bits, size: int) -> tuple[Region, npt.NDArray[np.int64]]:
        region = self.find(int(addresses[0]))
        if region is None:
            raise KdgenError(f"address {int(addresses[0]):#x} lies in no array")
        places = addresses.astype(np.int64) - region.address
        if places.min() < 0 or places.max() + size > len(region.data):
            raise KdgenError(f"an access leaves array {region.name}")
        if (places % size).any():
            raise KdgenError(f"an access of {size} bytes to {region.name} is not aligned")
        return region, places
