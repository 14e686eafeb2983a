"""The GPUs of forecasts: figures of their data sheets, and assumptions about the rest."""

from __future__ import annotations

from dataclasses import dataclass

from kdgen.errors import KdgenError
from kdgen.plan.arch import Target, target_for


@dataclass(frozen=True)
class GpuModel:
    """One GPU. Bandwidths are bytes per second; ``link_bandwidth`` is the rate at which one GPU sends to the others of its host. ``arch``
    is the architecture that its kernels are compiled for."""

    name: str
    title: str
    arch: str
    memory_bytes: int
    bandwidth: float
    link: str
    link_bandwidth: float
    nvlink: bool

    @property
    def target(self) -> Target:
        return target_for(self.arch)

    @property
    def collective_seconds(self) -> float:
        """Assumed, not measured: what a small exchange among all ranks takes, whatever its size."""
        return NVLINK_COLLECTIVE if self.nvlink else PCIE_COLLECTIVE


#: What a kernel that only reads gets of the data sheet's bandwidth. An H200 gave 0.86 and 0.93 (docs/performance.md).
READ_FRACTION = 0.9
NVLINK_COLLECTIVE, PCIE_COLLECTIVE = 5e-6, 12e-6  #: seconds
#: Memory that the driver, its context, machine code and recorded graphs take of a GPU.
RESERVED_BYTES = 1536 * 2**20

_GB = 10**9


def gpu_models() -> tuple[GpuModel, ...]:
    """Every GPU known by name."""
    return (
        GpuModel("a100", "A100 80GB SXM", "sm_80", 80 * _GB, 2.039e12, "NVLink 3", 300e9, True),
        GpuModel("h100", "H100 SXM", "sm_90a", 80 * _GB, 3.35e12, "NVLink 4", 450e9, True),
        GpuModel("h200", "H200 SXM", "sm_90a", 141 * _GB, 4.8e12, "NVLink 4", 450e9, True),
        GpuModel("b200", "B200 SXM", "sm_100", 180 * _GB, 8.0e12, "NVLink 5", 900e9, True),
        GpuModel("b300", "B300 SXM", "sm_103", 288 * _GB, 8.0e12, "NVLink 5", 900e9, True),
        GpuModel("l40s", "L40S", "sm_89", 48 * _GB, 0.864e12, "PCIe 4 x16", 32e9, False),
        GpuModel("rtx-4090", "GeForce RTX 4090", "sm_89", 24 * _GB, 1.008e12, "PCIe 4 x16", 32e9, False),
        GpuModel("rtx-5090", "GeForce RTX 5090", "sm_120a", 32 * _GB, 1.792e12, "PCIe 5 x16", 64e9, False),
        GpuModel("rtx-pro-6000", "RTX PRO 6000 Blackwell", "sm_120a", 96 * _GB, 1.792e12, "PCIe 5 x16", 64e9, False),
    )


def gpu_model(name: str) -> GpuModel:
    """The GPU called ``name``. Raises KdgenError, listing the known ones, when there is none."""
    for each in gpu_models():
        if each.name == name.lower():
            return each
    raise KdgenError(f"unknown GPU {name!r}; kdgen knows {', '.join(each.name for each in gpu_models())}")
