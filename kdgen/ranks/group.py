"""The connections between ranks, the processes that run one model together, and how each learns that another has failed.

Every rank runs the same program with its part of the model, so all get the same tokens. Data of a decode go through the backends. The
connections here serve the exchange of addresses and options before that, and failures: if a rank fails or dies, all others learn it at
once, and end within a few seconds.

No library does this for us. mpi4py needs an MPI installation, and whether a lost rank is noticed depends on that and its launcher. pyzmq
reports a lost peer in time, through its monitor socket and heartbeats, but would replace only the frames and heartbeats here; connecting
the ranks, the reason of a failure, and the end of a process that hangs in a driver would remain. NCCL has no ranks without GPUs, and its
ranks must be able to exchange an id first. The store of torch.distributed would do, but needs torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kdgen import __version__
from kdgen.errors import BackendError, KdgenError
from kdgen.ranks.place import Place
from kdgen.ranks.sockets import listener, receive, send

NOTICE_SECONDS = 5.0  #: after which a starting rank says for whom it waits
EXCHANGE_SECONDS = 600.0  #: timeout of an exchange, before which a rank may load gigabytes
BEAT_SECONDS = 1.0  #: between a rank's heartbeats
QUIET_SECONDS = 8.0  #: without a heartbeat, after which a rank counts as lost
GRACE_SECONDS = 3.0  #: for a rank to end by itself after another one is lost


class Group:
    """The connections of one rank to the others. Use it as a context: if the block raises, the others get the reason.

    Creating it raises KdgenError when other ranks do not connect, or run another version of kdgen or another job.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.rank, self.ranks = place.rank, place.ranks
        self.lost = ""  #: why the job cannot go on; empty while it can
        self.left: set[int] = set()  #: ranks that have finished; complete only on rank 0
        self._closed = False
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self._peers: dict[int, _Peer] = {}  # rank 0 has all others, the others have rank 0
        if place.parent:
            _go_on_without_parent()
        wait = _Wait(place)
        if self.rank == 0:
            self._accept(wait)
        else:
            self._connect(wait)
        self._watcher = threading.Thread(target=self._watch, name="kdgen-ranks", daemon=True)
        self._watcher.start()
        hosts = self.exchange(socket.gethostname().encode())
        self.one_host = len(set(hosts)) == 1

    def exchange(self, data: bytes) -> list[bytes]:
        """Every rank's ``data``, by rank. All ranks call it, in the same order. Raises BackendError when one is lost."""
        try:
            if self.rank:
                peer = self._peers[0]
                send(peer.talk, [data])
                return receive(peer.talk)
            found = [data] + [receive(self._peers[rank].talk)[0] for rank in range(1, self.ranks)]
            for peer in self._peers.values():
                send(peer.talk, found)
            return found
        except (OSError, ValueError) as error:
            deadline = time.monotonic() + BEAT_SECONDS
            while not self.lost and time.monotonic() < deadline:  # the reason arrives on another connection, perhaps later
                time.sleep(0.01)
            self.check()
            raise BackendError(f"rank {self.rank} lost its connection to the other ranks: {error}") from error

    def agreed(self, seconds: Mapping[int, float]) -> dict[int, float]:
        """Rank 0's ``seconds``."""
        found = json.loads(self.exchange(json.dumps(list(seconds.items())).encode())[0])
        return {int(key): float(value) for key, value in found}

    def need_same(self, given: Mapping[str, object]) -> None:
        """Raises BackendError, with the keys, unless every rank gives the same values. Ranks with different options would wait for each
        other for ever, or add unrelated values. Values are compared by their repr."""
        mine = {key: repr(value) for key, value in given.items()}
        others = [json.loads(each) for each in self.exchange(json.dumps(mine).encode())]
        keys = [key for key in others[0] if any(each.get(key) != others[0][key] for each in others)]
        if keys:
            different = ", ".join(f"rank {rank}" for rank, each in enumerate(others) if each != others[0])
            raise BackendError(f"{different} and rank 0 differ in {', '.join(keys)}: start all ranks with the same model and options")

    def check(self) -> None:
        """Raises BackendError when a rank is lost."""
        if self.lost:
            raise BackendError(self.lost)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(_problem(self.rank, kind, error) if kind is not None and not self.lost else "")

    def close(self, problem: str = "") -> None:
        """Disconnect. A ``problem`` is sent to the other ranks, and ends the job for all."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for peer in self._peers.values():
            self._tell(peer, b"failed" if problem or self.lost else b"bye", problem or self.lost)
            for each in (peer.life, peer.talk):
                with contextlib.suppress(OSError):
                    each.close()

    # ---- connecting -------------------------------------------------------------------------------------------------

    def _accept(self, wait: _Wait) -> None:
        place = self.place
        try:
            server = listener(place.host, place.port, 2 * self.ranks)
        except OSError as error:
            # create_server puts the address into strerror
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
            raise KdgenError(f"rank 0 cannot listen on {place.host} port {place.port}: {why}; set KDGEN_PORT to a free one") from None
        waiting: dict[tuple[int, str], socket.socket] = {}
        with server:
            while len(waiting) < 2 * (self.ranks - 1):
                missing = named(sorted(set(range(1, self.ranks)) - {rank for rank, _ in waiting}))
                wait.say(f"{missing} at {place.host} port {place.port}")
                if wait.over:
                    raise KdgenError(
                        f"{missing} of {self.ranks} did not connect within {place.seconds:.0f} s; KDGEN_JOIN_SECONDS sets a longer time"
                    )
                server.settimeout(0.2)
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                connection.settimeout(5.0)
                try:
                    rank, kind = self._greeted(connection)
                except (OSError, ValueError):  # not a rank of this job
                    connection.close()
                    continue
                waiting[rank, kind] = connection
        for rank in range(1, self.ranks):
            self._peers[rank] = _Peer(waiting[rank, "talk"], waiting[rank, "life"])

    def _greeted(self, connection: socket.socket) -> tuple[int, str]:
        hello = json.loads(receive(connection)[0])
        if not isinstance(hello, dict) or hello.get("job") != self.place.token:
            raise ValueError("a stranger")
        if (hello.get("kdgen"), hello.get("ranks")) != (__version__, self.ranks):
            send(connection, [f"rank 0 runs kdgen {__version__} with {self.ranks} ranks".encode()])
            raise ValueError("another version, or other ranks")
        rank, kind = hello.get("rank"), hello.get("kind")
        if not isinstance(rank, int) or not 0 < rank < self.ranks or kind not in ("talk", "life"):
            raise ValueError("no such rank")
        send(connection, [b""])
        connection.settimeout(EXCHANGE_SECONDS)
        return rank, kind

    def _connect(self, wait: _Wait) -> None:
        sockets, where = [], f"{self.place.host} port {self.place.port}"
        for kind in ("talk", "life"):
            hello = {"job": self.place.token, "kdgen": __version__, "ranks": self.ranks, "rank": self.rank, "kind": kind}
            while True:
                try:
                    connection = socket.create_connection((self.place.host, self.place.port), timeout=5.0)
                    send(connection, [json.dumps(hello).encode()])
                    refusal = receive(connection)[0].decode()
                    break
                except (OSError, ValueError) as error:
                    wait.say(f"rank 0 at {where}")
                    if wait.over:
                        why = (error.strerror if isinstance(error, OSError) else None) or error
                        hint = "MASTER_ADDR names its host, KDGEN_JOIN_SECONDS sets a longer time"
                        raise KdgenError(
                            f"rank {self.rank} could not reach rank 0 at {where} within {self.place.seconds:.0f} s: {why}; {hint}"
                        ) from None
                    time.sleep(0.05)
            if refusal:
                raise KdgenError(f"rank {self.rank} with kdgen {__version__} and {self.ranks} ranks does not fit: {refusal}")
            connection.settimeout(EXCHANGE_SECONDS)
            sockets.append(connection)
        self._peers[0] = _Peer(*sockets)

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Read the life connections. Report a failure to all ranks, and end this process if it does not end by itself."""
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._peers.items():
                with contextlib.suppress(OSError, ValueError):
                    selector.register(peer.life, selectors.EVENT_READ, rank)
            pulse = _Pulse(self._peers, time.monotonic())
            while (selector.get_map() or self.place.parent) and not self._closed and not self.lost:
                if self.place.parent and os.getppid() != self.place.parent:
                    self.lost = "the process that started the ranks has ended"
                for key, _ in selector.select(BEAT_SECONDS / 2):
                    if self._closed:
                        return
                    problem = self._news(key.data)
                    pulse.heard(key.data, time.monotonic())
                    if problem is None:
                        self.left.add(key.data)
                        pulse.leave(key.data)
                        selector.unregister(key.fileobj)
                    elif problem and not self._closed:
                        self.lost = problem
                        break
                if pulse.beats(now := time.monotonic()):
                    for rank in pulse.ranks:
                        self._tell(self._peers[rank], b"here")
                if not self.lost and (quiet := pulse.quiet(now)):
                    self.lost = f"rank {quiet[0]} has sent nothing for {QUIET_SECONDS:.0f} s: it is stopped, or unreachable"
        if not self.lost:
            return
        for peer in self._peers.values():
            self._tell(peer, b"failed", self.lost)
            with contextlib.suppress(OSError):
                peer.talk.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
        time.sleep(GRACE_SECONDS)
        if not self._closed:  # it hangs where no exception reaches it, for example in a driver
            sys.stderr.write(f"kdgen: error: {self.lost}\n")
            sys.stderr.flush()
            os._exit(2)

    def _tell(self, peer: _Peer, kind: bytes, reason: str = "") -> None:
        """Send a frame on a life connection, as a whole even if another thread also sends one."""
        with self._telling, contextlib.suppress(OSError):
            send(peer.life, [kind, reason.encode()])

    def _news(self, rank: int) -> str | None:
        """Read a life connection: None if the rank has finished, otherwise why the job cannot go on, empty if it can."""
        try:
            kind, *reason = receive(self._peers[rank].life)
        except (OSError, ValueError):
            return f"rank {rank} has ended"
        if kind in (b"bye", b"here"):
            return None if kind == b"bye" else ""
        said = reason[0].decode(errors="replace") if reason else ""
        return said if said.startswith("rank ") else f"rank {rank} failed: {said}"


def named(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 1, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class _Wait:
    """The time limit of the start, and the message that a rank prints once while it waits."""

    def __init__(self, place: Place) -> None:
        self._place, self._began, self._said = place, time.monotonic(), False

    @property
    def over(self) -> bool:
        """Raises KdgenError when the process that started the ranks has ended, because nothing would end the ranks."""
        if self._place.parent and os.getppid() != self._place.parent:
            raise KdgenError("the process that started the ranks has ended")
        return time.monotonic() - self._began > self._place.seconds

    def say(self, what: str) -> None:
        if self._said or time.monotonic() - self._began < NOTICE_SECONDS:
            return
        self._said = True
        place = self._place
        sys.stderr.write(
            f"kdgen: rank {place.rank} of {place.ranks} waits for {what}, for {place.seconds:.0f} s in all (KDGEN_JOIN_SECONDS)\n"
        )
        sys.stderr.flush()


class _Pulse:
    """When each rank's last heartbeat arrived, and when to send the next one."""

    def __init__(self, ranks: Iterable[int], now: float) -> None:
        self._heard = dict.fromkeys(ranks, now)
        self._beat = self._looked = now

    @property
    def ranks(self) -> list[int]:
        return list(self._heard)

    def heard(self, rank: int, now: float) -> None:
        self._heard[rank] = now

    def leave(self, rank: int) -> None:
        del self._heard[rank]

    def beats(self, now: float) -> bool:
        """Whether it is time for the next heartbeat."""
        if now - self._beat < BEAT_SECONDS:
            return False
        self._beat = now
        return True

    def quiet(self, now: float) -> list[int]:
        """Ranks that were silent for too long. Call it often: time during which this process itself was stopped does not count."""
        stopped = now - self._looked > 2 * BEAT_SECONDS
        self._looked = now
        if stopped:
            self._heard = dict.fromkeys(self._heard, now)
        return [rank for rank, at in self._heard.items() if now - at > QUIET_SECONDS]


def _problem(rank: int, kind: type[BaseException], error: BaseException | None) -> str:
    """The reason that other ranks get for the exception that ends this rank."""
    if issubclass(kind, KeyboardInterrupt):
        return f"rank {rank} was interrupted"
    if isinstance(error, SystemExit) and (name := signal_of(error.code)):
        return f"rank {rank} was ended by {name}"
    return f"{kind.__name__}: {error}"


def signal_of(code: object) -> str:
    """The name of the signal that ended a process with this exit code, by killing it or by an orderly end; empty if none did."""
    number = 0 if not isinstance(code, int) else -code if code < 0 else code - 128
    return next((each.name for each in signal.Signals if each == number), "")


@dataclass(frozen=True)
class _Peer:
    """Two connections to another rank: ``talk`` for exchanges, ``life`` for heartbeats and the reason of its end."""

    talk: socket.socket
    life: socket.socket


def _go_on_without_parent() -> None:
    """Let the system send SIGCONT when the process that started this one ends, because a stopped rank would otherwise remain."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGCONT))


@contextlib.contextmanager
def joined(place: Place | None) -> Iterator[Group | None]:
    """The group at ``place`` while the block runs; None without other ranks."""
    if place is None:
        yield None
        return
    with Group(place) as group:
        yield group
