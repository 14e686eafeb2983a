"""GPU architectures that kernels are generated for, and the limits a plan has to keep on each."""

from __future__ import annotations

from dataclasses import dataclass

from kdgen.errors import KdgenError
from kdgen.plan.ir import Family

_KIB = 1024


@dataclass(frozen=True)
class Target:
    """One value of NVRTC's ``-arch``. Sizes are bytes."""

    arch: str
    gpus: str  #: examples, for messages and reports
    smem_per_block: int  #: most shared memory a block may use, static and dynamic together
    has_wgmma: bool = False

    @property
    def family(self) -> Family:
        """Whose plan its kernels come from, where there is a choice."""
        return "sm_90a" if self.has_wgmma else "generic"

    @property
    def smem_static_max(self) -> int:
        """Most static shared memory; anything above has to be dynamic."""
        return 48 * _KIB


def targets() -> tuple[Target, ...]:
    """Every target, oldest first. bf16 mma.sync and cp.async set the lower end.

    Shared memory is the CUDA programming guide's table "Technical Specifications per Compute Capability".
    """
    return (
        Target("sm_80", "A100, A30", 163 * _KIB),
        Target("sm_86", "RTX 30xx, A10, A40", 99 * _KIB),
        Target("sm_87", "Jetson Orin", 163 * _KIB),
        Target("sm_89", "RTX 40xx, L4, L40S", 99 * _KIB),
        Target("sm_90", "H100, H200, GH200", 227 * _KIB),
        Target("sm_90a", "H100, H200, GH200", 227 * _KIB, has_wgmma=True),
        Target("sm_100", "B200, GB200", 227 * _KIB),
        Target("sm_100a", "B200, GB200", 227 * _KIB),
        Target("sm_103", "B300, GB300", 227 * _KIB),
        Target("sm_103a", "B300, GB300", 227 * _KIB),
        Target("sm_110", "Jetson Thor", 227 * _KIB),
        Target("sm_110a", "Jetson Thor", 227 * _KIB),
        Target("sm_120", "RTX 50xx, RTX PRO 6000", 99 * _KIB),
        Target("sm_120a", "RTX 50xx, RTX PRO 6000", 99 * _KIB),
        Target("sm_121", "DGX Spark", 99 * _KIB),
        Target("sm_121a", "DGX Spark", 99 * _KIB),
    )


def smem_limit(family: Family) -> int:
    """Bytes of shared memory that a block has on every target of ``family``: one plan serves all of them."""
    return min(target.smem_per_block for target in targets() if family in ("generic", target.family))


def target_for(arch: str) -> Target:
    """The target called ``arch``.

    Raises KdgenError, listing the known ones, when there is none.
    """
    for target in targets():
        if target.arch == arch:
            return target
    known = ", ".join(target.arch for target in targets())
    raise KdgenError(f"unknown architecture {arch!r}; kdgen knows {known}")


def arch_of_device(major: int, minor: int) -> str:
    """The arch to compile for on a device of this compute capability.

    Hopper and consumer Blackwell get their feature-specific variant, since some kernels have a version for it.
    """
    arch = f"sm_{major}{minor}"
    return arch + "a" if arch in ("sm_90", "sm_120") else arch
