"""Contexts of kernels that must give the same bits as other kernels, for example a fused kernel and those that it replaces."""

from __future__ import annotations

from abc import ABC, abstractmethod


class SameBits(ABC):
    """Base of a template's context whose kernel must give the bits of other kernels. ``kdgen verify`` compares them."""

    @property
    @abstractmethod
    def same_bits_as(self) -> tuple[str, ...]:
        """The names of those kernels; empty if there are none."""


class Twin(SameBits):
    """Base of the context of a kernel for many rows that must give the bits of the kernel ``decode`` for few rows."""

    decode: str

    @property
    def same_bits_as(self) -> tuple[str, ...]:
        return (self.decode,)
