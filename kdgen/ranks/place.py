"""Which rank this process is, and where the ranks meet: what torchrun, mpirun, srun or kdgen itself say in the environment."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from kdgen.errors import KdgenError

JOIN_SECONDS = 120.0  #: how long ranks wait for each other at the start, where KDGEN_JOIN_SECONDS does not say otherwise
DEFAULT_PORT = 29611


@dataclass(frozen=True)
class Place:
    """Where a process stands among the ranks. ``host`` and ``port`` are where rank 0 listens, ``token`` is the job's.

    ``parent`` is the process that has started the ranks and must not end before them; 0: whoever did sees to them itself. ``seconds``
    is how long ranks wait for each other at the start.
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
    """The place that a launcher gave this process: torchrun's variables, Open MPI's, MPICH's or Slurm's; None when there is no other rank.

    Raises KdgenError for variables that are no numbers, contradict each other or are half of a launcher's, or where rank 0 cannot be found.
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
        port = _number(environment, "MASTER_PORT") + 1  # torchrun listens on its own
    else:
        job = job or ".".join(environment[name] for name in launcher.job if name in environment)
        port = (
            DEFAULT_PORT + zlib.crc32(job.encode("utf-8", "surrogateescape")) % 3000
        )  # of nothing 0; below the ports that systems give out
    if not 0 < port < 65536:
        raise KdgenError(f"port {port} for the ranks' connections does not exist: set KDGEN_PORT")
    parent = _number(environment, "KDGEN_PARENT") if "KDGEN_PARENT" in environment else 0
    seconds = _number(environment, "KDGEN_JOIN_SECONDS") if "KDGEN_JOIN_SECONDS" in environment else JOIN_SECONDS
    if seconds < 1:
        raise KdgenError("the environment variable KDGEN_JOIN_SECONDS is 0: ranks need at least a second to meet")
    return Place(rank, ranks, _local_rank(environment, launcher, rank), host, port, job, parent, seconds)


@dataclass(frozen=True)
class _Launcher:
    """Names of environment variables: a process's rank and their number, the same two of those on its host, and what tells its job from
    others that the host may run at the same time. A launcher without one of the last has an empty name."""

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
    """The rank on its host by ``launcher``, or by another that has given this process the same place among as many, as Slurm has where it
    speaks PMI or a script has set RANK from its variables; ``rank`` where none says."""
    place = (environment[launcher.rank], environment[launcher.ranks])
    same = [each for each in _LAUNCHERS if (environment.get(each.rank), environment.get(each.ranks)) == place]
    return next((_number(environment, each.local_rank) for each in (launcher, *same) if each.local_rank in environment), rank)


def _on_one_host(environment: Mapping[str, str], launcher: _Launcher, ranks: int) -> bool:
    """By the number of ranks here, where ``launcher`` gives it; else by Slurm's nodes, a step's before its whole job's."""
    if launcher.local_ranks in environment:
        return _number(environment, launcher.local_ranks) == ranks
    return environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES", "1")) == "1"


def _need_no_half(environment: Mapping[str, str]) -> None:
    """Raises KdgenError when there is a rank without their number, or the other way round. Slurm gives a batch script, which is no step
    of several tasks, a rank alone."""
    for each in _LAUNCHERS:
        here, missing = (each.rank, each.ranks) if each.rank in environment else (each.ranks, each.rank)
        if here in environment and here != "SLURM_PROCID":
            raise KdgenError(
                f"the environment variable {here} is set and {missing} is not: ranks have both; set {missing}, or unset {here} for one rank"
            )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdecimal()) or len(text) > 12:
        raise KdgenError(f"the environment variable {name} is {text!r}, no number")
    return int(text)
