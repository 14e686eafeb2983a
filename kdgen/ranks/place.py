"""The rank of this process and the address of rank 0, from environment variables of torchrun, mpirun, srun or kdgen itself."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from kdgen.errors import KdgenError

JOIN_SECONDS = 120.0  #: for which ranks wait for each other at the start, unless KDGEN_JOIN_SECONDS is set
DEFAULT_PORT = 29611


@dataclass(frozen=True)
class Place:
    """A process's rank, and how to reach rank 0: it listens on ``host`` and ``port``, and ``token`` identifies the job.

    ``parent`` is the process that started the ranks, which end when it ends; 0 if another launcher takes care of that. ``seconds`` is the
    time for which ranks wait for each other at the start.
    """

    rank: int
    ranks: int
    local_rank: int
    host: str
    port: int
    token: str = ""
    parent: int = 0
    seconds: float = JOIN_SECONDS


def place_in(environment: Mapping[str, str]) -> Place | None:
    """This process's place by the variables of torchrun, Open MPI, MPICH or Slurm; None if there is no other rank.

    Raises KdgenError when a variable is not a number, variables contradict each other or one is missing, or rank 0's host is unknown.
    """
    launcher = next((each for each in _LAUNCHERS if each.rank in environment and each.ranks in environment), None)
    if launcher is None:
        _need_no_half(environment)
        return None
    rank, ranks = _number(environment, launcher.rank), _number(environment, launcher.ranks)
    if ranks == 1:
        return None
    if not 0 <= rank < ranks:
        raise KdgenError(f"{launcher.rank} is {rank} and {launcher.ranks} is {ranks}: ranks count from 0")
    host = environment.get("MASTER_ADDR", "")
    if not host:
        if not _on_one_host(environment, launcher, ranks):
            raise KdgenError(f"{ranks} ranks on several hosts: set MASTER_ADDR to the host of rank 0")
        host = "127.0.0.1"
    job = environment.get("KDGEN_JOB", "")
    if "KDGEN_PORT" in environment:
        port = _number(environment, "KDGEN_PORT")
    elif "MASTER_PORT" in environment:
        port = _number(environment, "MASTER_PORT") + 1  # torchrun itself listens on MASTER_PORT
    else:
        job = job or ".".join(environment[name] for name in launcher.job if name in environment)
        port = DEFAULT_PORT + zlib.crc32(job.encode("utf-8", "surrogateescape")) % 3000  # offset 0 without a job; below the ephemeral ports
    if not 0 < port < 65536:
        raise KdgenError(f"port {port} for the ranks' connections does not exist: set KDGEN_PORT")
    parent = _number(environment, "KDGEN_PARENT") if "KDGEN_PARENT" in environment else 0
    seconds = _number(environment, "KDGEN_JOIN_SECONDS") if "KDGEN_JOIN_SECONDS" in environment else JOIN_SECONDS
    if seconds < 1:
        raise KdgenError("the environment variable KDGEN_JOIN_SECONDS is 0: ranks need at least a second to meet")
    return Place(rank, ranks, _local_rank(environment, launcher, rank), host, port, job, parent, seconds)


@dataclass(frozen=True)
class _Launcher:
    """Names of environment variables: a process's rank and the number of ranks, the same two on its host, and those that identify the job
    among others on the host. A name is empty if the launcher has no such variable."""

    rank: str
    ranks: str
    local_rank: str
    local_ranks: str = ""
    job: tuple[str, ...] = ()


_LAUNCHERS = (
    _Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Launcher(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE",)
    ),
    _Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", job=("SLURM_JOB_ID", "SLURM_STEP_ID")),
)


def _local_rank(environment: Mapping[str, str], launcher: _Launcher, rank: int) -> int:
    """The rank on its host, from ``launcher`` or from another launcher's variables if they have the same rank and number of ranks. That is
    so if Slurm uses PMI, or if a script sets RANK from Slurm's variables. ``rank`` if no variable has it."""
    place = (environment[launcher.rank], environment[launcher.ranks])
    same = [each for each in _LAUNCHERS if (environment.get(each.rank), environment.get(each.ranks)) == place]
    return next((_number(environment, each.local_rank) for each in (launcher, *same) if each.local_rank in environment), rank)


def _on_one_host(environment: Mapping[str, str], launcher: _Launcher, ranks: int) -> bool:
    """Whether all ranks are on this host: by ``launcher``'s number of ranks here, otherwise by Slurm's number of nodes."""
    if launcher.local_ranks in environment:
        return _number(environment, launcher.local_ranks) == ranks
    return environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES", "1")) == "1"


def _need_no_half(environment: Mapping[str, str]) -> None:
    """Raises KdgenError when there is a rank without the number of ranks, or the other way round. In a batch script, which is not a step
    of several tasks, Slurm sets only the rank."""
    for each in _LAUNCHERS:
        here, missing = (each.rank, each.ranks) if each.rank in environment else (each.ranks, each.rank)
        if here in environment and here != "SLURM_PROCID":
            raise KdgenError(
                f"the environment variable {here} is set and {missing} is not: ranks have both; set {missing}, or unset {here} for one rank"
            )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdecimal()) or len(text) > 12:
        raise KdgenError(f"the environment variable {name} is {text!r}, which is not a number")
    return int(text)
