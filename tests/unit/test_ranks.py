"""Ranks: the places that launchers give, exchanges, and the end of a job in which one rank fails, dies or leaves."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import kdgen.backends.cpu as cpu_module
from kdgen.backends.cpu import CpuBackend
from kdgen.errors import BackendError, KdgenError
from kdgen.ranks.group import Group, _Pulse
from kdgen.ranks.place import Place, place_in
from kdgen.ranks.start import run_ranks

SECONDS = 10.0  #: in which a job must have ended once one of its ranks is lost


# ---- places -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # a batch script, not one of srun's tasks
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
            Place(5, 8, 1, "10.0.0.1", 29501),
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "KDGEN_PORT": "4000", "KDGEN_JOB": "x"},
            Place(1, 2, 1, "127.0.0.1", 4000, "x"),
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "KDGEN_JOIN_SECONDS": "7"},
            Place(0, 2, 0, "127.0.0.1", 29611, seconds=7),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
             "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            Place(3, 4, 3, "127.0.0.1", 29611),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}, Place(1, 2, 1, "127.0.0.1", 29611)),
        (  # srun --mpi=pmi2 gives no rank on the host by MPICH's name
            {"PMI_RANK": "5", "PMI_SIZE": "8", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "MASTER_ADDR": "n0"},
            Place(5, 8, 1, "n0", 29611),
        ),
        (  # a batch script's step of one task, and ranks that it starts by hand in it
            {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"},
            Place(1, 2, 1, "127.0.0.1", 29611),
        ),
        (  # both on one of the job's two nodes
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
             "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SLURM_NNODES": "2"},
            Place(1, 2, 1, "127.0.0.1", 29611),
        ),
        (
            {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1", "SLURM_NNODES": "2", "SLURM_STEP_NUM_NODES": "1"},
            Place(1, 2, 1, "127.0.0.1", 29611),
        ),
        (
            {"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1", "SLURM_NNODES": "2", "MASTER_ADDR": "n0",
             "SLURM_JOB_ID": "70001"},
            Place(9, 16, 1, "n0", 32254, "70001"),
        ),
    ],
)  # fmt: skip
def test_places(environment: dict[str, str], expected: Place | None) -> None:
    assert place_in(environment) == expected


@pytest.mark.parametrize(
    ("launcher", "one", "other"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, {"PMIX_NAMESPACE": "21@1"}, {"PMIX_NAMESPACE": "22@1"}),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7"},
            {"SLURM_STEP_ID": "0"},
            {"SLURM_STEP_ID": "1"},
        ),
    ],
)  # fmt: skip
def test_jobs_of_one_host_at_the_same_time_do_not_meet(launcher: dict[str, str], one: dict[str, str], other: dict[str, str]) -> None:
    first, second = place_in(launcher | one), place_in(launcher | other)
    assert first is not None and second is not None
    assert first.port != second.port and first.token != second.token
    chosen = [place_in(launcher | job | {"KDGEN_PORT": "4000"}) for job in (one, other)]
    assert chosen[0] == chosen[1]  # who chooses a port has told jobs apart, and heterogeneous jobs have several ids


def test_a_batch_script_of_slurm_is_one_rank() -> None:
    assert place_in({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}) is None


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x', which is not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE is 2"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NNODES": "2"}, "set MASTER_ADDR"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "set MASTER_ADDR"),
        ({"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, "set MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "set MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "KDGEN_PORT": "70000"}, "set KDGEN_PORT"),
        ({"RANK": "\uff11", "WORLD_SIZE": "2"}, "RANK is '\uff11', which is not a number"),
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not: ranks have both; set WORLD_SIZE, or unset RANK"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK is not"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "SLURM_PROCID": "0"}, "OMPI_COMM_WORLD_SIZE is set and OMPI_COMM_WORLD_RANK is not"),
        ({"PMI_RANK": "0"}, "PMI_RANK is set and PMI_SIZE is not"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS is set and SLURM_PROCID is not"),
    ],
)
def test_places_that_cannot_be(environment: dict[str, str], reason: str) -> None:
    with pytest.raises(KdgenError, match=reason):
        place_in(environment)


# ---- groups, in threads of this process ---------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def groups(ranks: int) -> list[Group]:
    port, found = free_port(), {}

    def join(rank: int) -> None:
        found[rank] = Group(Place(rank, ranks, rank, "127.0.0.1", port, "job", seconds=20))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(ranks)]


def test_every_rank_gets_what_all_gave() -> None:
    members = groups(3)
    results: dict[int, list[bytes]] = {}

    def exchange(group: Group) -> None:
        results[group.rank] = group.exchange(bytes([group.rank]) * (group.rank * 100_000))

    threads = [threading.Thread(target=exchange, args=(group,)) for group in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [b"", b"\1" * 100_000, b"\2" * 200_000]
    assert [results[rank] for rank in range(3)] == [expected] * 3
    assert all(group.one_host for group in members)
    for group in members:
        group.close()


def test_cpu_ranks_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its part of the weights on the same host: together they may take what there is, and no more."""
    monkeypatch.setattr(cpu_module, "_memory_available", lambda: 24 << 30)
    members = groups(2)
    backends = [CpuBackend("plain") for _ in members]
    for backend, group in zip(backends, members, strict=True):
        backend.join(group)
    monkeypatch.setattr(cpu_module, "_memory_available", lambda: 13 << 30)  # the other has begun to load
    assert [backend.memory_limit() for backend in backends] == [12 << 30] * 2
    assert CpuBackend("plain").memory_limit() == 13 << 30
    for group in members:
        group.close()


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(KdgenError, match="ranks 1, 2 of 3 did not connect"):
        Group(Place(0, 3, 0, "127.0.0.1", free_port(), seconds=0.3))


def test_nobody_waits_once_who_started_it_is_gone() -> None:
    began = time.monotonic()
    for rank in (0, 1):
        with pytest.raises(KdgenError, match="the process that started the ranks has ended"):
            Group(Place(rank, 2, rank, "127.0.0.1", free_port(), parent=os.getpid(), seconds=60))
    assert time.monotonic() - began < 20


def test_who_waits_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Once, with what it waits for and how long."""
    monkeypatch.setattr("kdgen.ranks.group.NOTICE_SECONDS", 0.1)
    port = free_port()
    for rank, what in ((0, "rank 1"), (1, "rank 0")):
        with pytest.raises(KdgenError):
            Group(Place(rank, 2, rank, "127.0.0.1", port, seconds=1))
        waits = f"rank {rank} of 2 waits for {what} at 127.0.0.1 port {port}, for 1 s in all (KDGEN_JOIN_SECONDS)"
        assert capsys.readouterr().err.count(waits) == 1


def test_time_in_which_a_process_is_stopped_itself_counts_for_nobody() -> None:
    pulse = _Pulse([1, 2], 0.0)
    assert [pulse.beats(now) for now in (0.5, 1.0, 1.5, 2.0)] == [False, True, False, True]
    for now in range(1, 7):
        pulse.heard(2, float(now))
        assert pulse.quiet(float(now)) == []
    assert pulse.quiet(100.0) == []  # a gap of its own
    assert [pulse.quiet(100.0 + second) for second in range(1, 10)] == [[]] * 8 + [[1, 2]]
    pulse.leave(1)
    assert pulse.quiet(110.0) == [2] and pulse.ranks == [2]


def test_what_ranks_must_have_alike() -> None:
    members = groups(3)
    said: dict[int, str] = {}

    def need(group: Group) -> None:
        group.need_same({"--seed": 7, "--chunk": None})
        with pytest.raises(BackendError) as error:
            group.need_same({"--seed": 7, "--chunk": 4 if group.rank == 1 else None, "--draft": "ngram"})
        said[group.rank] = str(error.value)

    threads = [threading.Thread(target=need, args=(group,)) for group in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == dict.fromkeys(range(3), "rank 1 and rank 0 differ in --chunk: start all ranks with the same model and options")
    for group in members:
        group.close()


def test_nobody_to_join() -> None:
    with pytest.raises(KdgenError, match="rank 1 could not reach rank 0"):
        Group(Place(1, 2, 1, "127.0.0.1", free_port(), seconds=0.3))


def test_a_port_in_use_is_named_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(KdgenError) as found:
            Group(Place(0, 2, 0, "127.0.0.1", port))
    assert str(found.value) == f"rank 0 cannot listen on 127.0.0.1 port {port}: Address already in use; set KDGEN_PORT to a free one"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6")
@pytest.mark.parametrize("known_as", ["::1", "127.0.0.1"])
def test_rank_0_is_found_by_an_address_of_either_version(known_as: str) -> None:
    """MASTER_ADDR is a name, and it depends on the other host which address that is."""
    port, found = free_port(), {}

    def join(rank: int, host: str) -> None:
        found[rank] = Group(Place(rank, 2, rank, host, port, seconds=5))

    threads = [threading.Thread(target=join, args=each) for each in ((0, "a-name"), (1, known_as))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1]
    for group in found.values():
        group.close()


def test_strangers_and_other_jobs_are_ignored() -> None:
    port = free_port()
    outcome: list[object] = []

    def accept() -> None:
        try:
            Group(Place(0, 2, 0, "127.0.0.1", port, "ours", seconds=1.5))
        except KdgenError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=accept)
    thread.start()
    time.sleep(0.2)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(KdgenError, match="could not reach rank 0"):
        Group(Place(1, 2, 1, "127.0.0.1", port, "theirs", seconds=0.5))
    thread.join()
    assert outcome == ["rank 1 of 2 did not connect within 2 s; KDGEN_JOIN_SECONDS sets a longer time"]


def test_other_numbers_of_ranks_do_not_fit() -> None:
    port = free_port()

    def accept() -> None:
        with pytest.raises(KdgenError, match="did not connect"):
            Group(Place(0, 2, 0, "127.0.0.1", port, seconds=2))

    thread = threading.Thread(target=accept)
    thread.start()
    with pytest.raises(KdgenError, match=r"does not fit: rank 0 runs kdgen .* with 2 ranks"):
        Group(Place(1, 3, 1, "127.0.0.1", port, seconds=2))
    thread.join()


def test_a_farewell_is_no_failure_and_an_error_is_told() -> None:
    first, second, third = groups(3)
    third.close()
    time.sleep(0.2)
    assert first.left == {2} and not any(group.lost for group in (first, second))
    second.close("KdgenError: something was wrong")
    deadline = time.monotonic() + 5
    while not first.lost and time.monotonic() < deadline:
        time.sleep(0.05)
    assert first.lost == "rank 1 failed: KdgenError: something was wrong"
    with pytest.raises(BackendError, match="rank 1 failed"):
        first.check()
    first.close()


# ---- jobs, in processes -------------------------------------------------------------------------------------------------

_JOB = """
import os, sys, time
from kdgen.backends import open_backend
from kdgen.backends.base import AllGather, Pointer
from kdgen.errors import KdgenError
from kdgen.ranks.group import joined
from kdgen.ranks.place import place_in
import numpy as np

def job(group, gather):
{body}

try:
    with joined(place_in(os.environ)) as group:
        backend = open_backend("cpu")
        backend.join(group)
        source, target = backend.empty((1000,), "i32"), backend.empty((group.ranks, 1000), "i32")
        def gather(value, count=1000):
            backend.write(source, np.full(1000, value, np.int32))
            backend.gather(AllGather("gather_test", Pointer(source), Pointer(target), 4 * count))
            return backend.to_host(target).reshape(-1)[: group.ranks * count].reshape(group.ranks, count)
        job(group, gather)
except KdgenError as error:
    sys.stderr.write(f"kdgen: error: {{error}}\\n")
    sys.exit(2)
"""


def run(tmp_path: Path, ranks: int, body: str) -> tuple[int, str, str, float]:
    """Exit code, rank 0's output, what was said, seconds. Each rank writes its process id first."""
    script, pids = tmp_path / "job.py", tmp_path / "pids"
    pids.mkdir()
    body = f"open({str(pids)!r} + f'/{{os.getpid()}}', 'w').close()\n{body}"
    script.write_text(_JOB.format(body="\n".join("    " + line for line in body.splitlines())))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    began = time.monotonic()
    with (tmp_path / "out").open("w+b") as output, (tmp_path / "err").open("w+b") as errors:
        code = run_ranks([sys.executable, str(script)], ranks, environment, output=output, errors=errors)
    seconds = time.monotonic() - began
    assert len(list(pids.iterdir())) == ranks and not any(alive(int(path.name)) for path in pids.iterdir())
    return code, (tmp_path / "out").read_text(), (tmp_path / "err").read_text(), seconds


def test_gathers_of_all_sizes(tmp_path: Path) -> None:
    body = """
for turn in range(200):
    count = [1, 7, 1000, 64][turn % 4]
    found = gather(10 * turn + group.rank, count)
    assert (found == 10 * turn + np.arange(group.ranks)[:, None]).all(), (turn, found)
print("done")
"""
    for ranks in (2, 3):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        assert run(folder, ranks, body)[:3] == (0, "done\n", "")


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_is_killed_ends_the_job(tmp_path: Path, victim: int) -> None:
    body = f"""
gather(1)
if group.rank == {victim}:
    os.kill(os.getpid(), 9)
while True:
    gather(2)
"""
    code, _, said, seconds = run(tmp_path, 3, body)
    assert code == 2 and seconds < SECONDS and f"rank {victim} of 3 was ended by SIGKILL" in said


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_asked_to_end_ends_the_job(tmp_path: Path, victim: int) -> None:
    """It ends in order, with an exit code of its own, and the job says why: the launcher, or rank 0 where that ends first."""
    body = f"""
import signal
def end(number, frame):
    raise SystemExit(128 + number)
signal.signal(signal.SIGTERM, end)
gather(1)
if group.rank == {victim}:
    os.kill(os.getpid(), signal.SIGTERM)
while True:
    gather(2)
"""
    code, _, said, seconds = run(tmp_path, 2, body)
    assert code in (2, 143) and seconds < SECONDS and re.search(f"rank {victim} (of 2 )?was ended by SIGTERM", said), said


@pytest.mark.parametrize("code", [130, 141])
def test_nothing_is_added_where_a_rank_was_interrupted_or_its_reader_had_enough(tmp_path: Path, code: int) -> None:
    with (tmp_path / "err").open("w+b") as errors:
        assert run_ranks([sys.executable, "-c", f"raise SystemExit({code})"], 1, errors=errors) == code
    assert not (tmp_path / "err").read_bytes()


@pytest.mark.parametrize(
    ("error", "said"), [(KeyboardInterrupt(), "rank 1 was interrupted"), (SystemExit(143), "rank 1 was ended by SIGTERM")]
)
def test_others_hear_how_a_rank_was_ended(error: BaseException, said: str) -> None:
    first, second = groups(2)
    second.__exit__(type(error), error, None)
    with pytest.raises(BackendError, match=said):
        first.exchange(b"")
    first.close()


@pytest.mark.parametrize("when", ["waiting", "no room"])
def test_no_shared_memory_is_left(tmp_path: Path, when: str) -> None:
    """When rank 0 is killed while it waits for the other to take its memory, and when there is too little."""
    ends = {"waiting": "threading.Timer(1, os.kill, (os.getpid(), 9)).start()", "no room": "os.posix_fallocate = full"}[when]
    body = f"""
import threading
def full(*_):
    raise OSError(28, "No space left on device")
if group.rank:
    time.sleep(3)
else:
    {ends}
gather(1)
"""
    before = set(Path("/dev/shm").iterdir())
    code, _, said, _ = run(tmp_path, 2, body)
    memory = "bytes for 2 ranks to share cannot be allocated: No space left on device"
    assert code == 2 and ("SIGKILL" if when == "waiting" else memory) in said
    assert not [file for file in set(Path("/dev/shm").iterdir()) - before if file.name.startswith("kdgen-")]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_stopped_counts_as_lost(tmp_path: Path, victim: int) -> None:
    """By SIGSTOP, say, or in a debugger: its connections stay open, and nothing comes. The others notice; then it is ended, too."""
    body = f"""
gather(1)
if group.rank == {victim}:
    os.kill(os.getpid(), 19)
began = time.monotonic()
try:
    while True:
        gather(2)
except KdgenError:
    assert time.monotonic() - began < {SECONDS}, time.monotonic() - began
    raise
"""
    code, _, said, _ = run(tmp_path, 2, body)
    assert code == 2 and f"rank {victim} has sent nothing for 8 s: it is stopped, or unreachable" in said


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_ends_the_job_with_its_error(tmp_path: Path, failing: int) -> None:
    body = f"""
gather(1)
if group.rank == {failing}:
    raise KdgenError("the tokens ran out")
while True:
    gather(2)
"""
    code, _, said, seconds = run(tmp_path, 2, body)
    assert code == 2 and seconds < SECONDS and said.count("the tokens ran out") == 1


def test_what_all_ranks_find_is_said_once(tmp_path: Path) -> None:
    for turn in range(3):  # whichever is first
        folder = tmp_path / str(turn)
        folder.mkdir()
        code, _, said, _ = run(folder, 3, 'gather(1)\nraise KdgenError("the tokens ran out")')
        assert code == 2 and said.count("the tokens ran out") == 1


def test_a_bug_of_another_rank_is_shown_whole(tmp_path: Path) -> None:
    body = """
gather(1)
if group.rank == 1:
    import traceback
    try:
        [][1]
    except IndexError as error:
        traceback.print_exc()
        raise KdgenError("a bug") from error
while True:
    gather(2)
"""
    code, _, said, _ = run(tmp_path, 2, body)
    assert code == 2 and "Traceback" in said and "[][1]" in said


def test_a_rank_that_leaves_early_is_not_waited_for(tmp_path: Path) -> None:
    body = """
gather(1)
if group.rank == 1:
    return
gather(2)
"""
    code, _, said, seconds = run(tmp_path, 2, body)
    assert code == 2 and seconds < SECONDS and "gather_test: rank 1 has ended, and rank 0 waits for it" in said


def test_a_rank_that_hangs_outside_is_ended_too(tmp_path: Path) -> None:
    body = """
gather(1)
if group.rank == 1:
    os.kill(os.getpid(), 9)
time.sleep(60)
"""
    code, _, _, seconds = run(tmp_path, 2, body)
    assert code == 2 and seconds < SECONDS


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_launcher_that_is_ended_takes_its_ranks_along(tmp_path: Path, number: int, code: int, stopped: bool) -> None:
    """Asked to, as by the command line on SIGTERM, or killed: nothing is left, not even a rank that is stopped."""
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import os, time\nfrom pathlib import Path\nfrom kdgen.ranks.group import joined\nfrom kdgen.ranks.place import place_in\n"
        "with joined(place_in(os.environ)) as group:\n"
        "    Path(__file__).with_name(f'pid{group.rank}').write_text(str(os.getpid()))\n"
        "    time.sleep(60)\n"
    )
    launcher_script = tmp_path / "launcher.py"
    launcher_script.write_text(
        "import signal, sys\nfrom kdgen.ranks.start import run_ranks\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        f"run_ranks([sys.executable, {str(rank)!r}], 2)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    files = [tmp_path / f"pid{each}" for each in (0, 1)]
    with subprocess.Popen([sys.executable, str(launcher_script)], env=environment) as launcher:
        deadline = time.monotonic() + 20
        while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < deadline:
            time.sleep(0.05)
        if stopped:
            os.kill(int(files[1].read_text()), signal.SIGSTOP)
        launcher.send_signal(number)
        assert launcher.wait(SECONDS) == code
    deadline = time.monotonic() + SECONDS
    left = [int(file.read_text()) for file in files]
    while any(map(alive, left)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, left))


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has asked about does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(KdgenError, match="rank 0 cannot be started: no-such-command"):
        run_ranks(["no-such-command"], 2)
