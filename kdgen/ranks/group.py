"""Ranks: the processes that run one model together, how each finds its place, and how they hear of each other's end.

Every rank runs the same program with its part of the model, so that all come to the same tokens; what they exchange while they decode
goes through their backends. The connections here are for what comes before (who is where, handles) and for failures: a rank that
fails or dies is known to all others at once, and none outlives it by more than a few seconds.

No library does this for us. mpi4py needs an MPI installation, and whether a lost rank is noticed depends on that and its launcher. pyzmq
reports a lost peer in time, through its monitor socket and heartbeats, but would replace only our frames and heartbeats: the meeting, the
reason of a failure, and the end of a process that hangs in a driver would still be ours. NCCL has no ranks without GPUs, and its ranks must
have met before. The store of torch.distributed would do, and needs torch.
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

NOTICE_SECONDS = 5.0  #: after which they say what they wait for
EXCHANGE_SECONDS = 600.0  #: and later, where a rank may have gigabytes to load first
BEAT_SECONDS = 1.0  #: how often a rank tells the others that it is there
QUIET_SECONDS = 8.0  #: after which one that tells nothing counts as lost
GRACE_SECONDS = 3.0  #: how long a rank may take to end by itself once another one is lost


class Group:
    """The connections of one rank to the others. Use it as a context: leaving it by an exception tells the others why.

    Joining raises KdgenError when the others do not come, or run another kdgen or job.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.rank, self.ranks = place.rank, place.ranks
        self.lost = ""  #: why the job cannot go on; empty while it can
        self.left: set[int] = set()  #: ranks that have done their part; only rank 0 knows of all
        self._closed = False
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self._peers: dict[int, _Peer] = {}  # of rank 0 all others, of others rank 0
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
            while not self.lost and time.monotonic() < deadline:  # the reason comes on another connection, maybe later
                time.sleep(0.01)
            self.check()
            raise BackendError(f"rank {self.rank} lost its connection to the other ranks: {error}") from error

    def agreed(self, seconds: Mapping[int, float]) -> dict[int, float]:
        """Rank 0's ``seconds``."""
        found = json.loads(self.exchange(json.dumps(list(seconds.items())).encode())[0])
        return {int(key): float(value) for key, value in found}

    def need_same(self, given: Mapping[str, object]) -> None:
        """Raises BackendError, naming the keys, unless every rank gives the same: ranks that do other things wait for each other for
        ever, or add up what does not belong together. Values are compared as they print."""
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
        """Leave; with a ``problem``, which the others are told, the job ends for all."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for peer in self._peers.values():
            self._tell(peer, b"failed" if problem or self.lost else b"bye", problem or self.lost)
            for each in (peer.life, peer.talk):
                with contextlib.suppress(OSError):
                    each.close()

    # ---- meeting ----------------------------------------------------------------------------------------------------

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
                    raise KdgenError(f"{missing} of {self.ranks} did not come in {place.seconds:.0f} s; KDGEN_JOIN_SECONDS gives them more")
                server.settimeout(0.2)
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                connection.settimeout(5.0)
                try:
                    rank, kind = self._greeted(connection)
                except (OSError, ValueError):  # no rank of ours
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
                        hint = "MASTER_ADDR names its host, KDGEN_JOIN_SECONDS gives it more"
                        raise KdgenError(
                            f"rank {self.rank} could not reach rank 0 at {where} in {self.place.seconds:.0f} s: {why}; {hint}"
                        ) from None
                    time.sleep(0.05)
            if refusal:
                raise KdgenError(f"rank {self.rank} with kdgen {__version__} and {self.ranks} ranks does not fit: {refusal}")
            connection.settimeout(EXCHANGE_SECONDS)
            sockets.append(connection)
        self._peers[0] = _Peer(*sockets)

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Wait for news on the life lines; a failure is passed on, and ends this process if it does not end by itself."""
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._peers.items():
                with contextlib.suppress(OSError, ValueError):
                    selector.register(peer.life, selectors.EVENT_READ, rank)
            pulse = _Pulse(self._peers, time.monotonic())
            while (selector.get_map() or self.place.parent) and not self._closed and not self.lost:
                if self.place.parent and os.getppid() != self.place.parent:
                    self.lost = "the process that started the ranks is gone"
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
                    self.lost = f"rank {quiet[0]} has not been heard of for {QUIET_SECONDS:.0f} s: it is stopped, or out of reach"
        if not self.lost:
            return
        for peer in self._peers.values():
            self._tell(peer, b"failed", self.lost)
            with contextlib.suppress(OSError):
                peer.talk.shutdown(socket.SHUT_RDWR)  # whoever waits for it wakes up
        time.sleep(GRACE_SECONDS)
        if not self._closed:  # stuck where no exception comes: in a driver, say
            sys.stderr.write(f"kdgen: error: {self.lost}\n")
            sys.stderr.flush()
            os._exit(2)

    def _tell(self, peer: _Peer, kind: bytes, reason: str = "") -> None:
        """A frame on a life line, whole, whichever thread sends another one."""
        with self._telling, contextlib.suppress(OSError):
            send(peer.life, [kind, reason.encode()])

    def _news(self, rank: int) -> str | None:
        """What a life line says: None for a farewell, else why the job cannot go on; empty where it can."""
        try:
            kind, *reason = receive(self._peers[rank].life)
        except (OSError, ValueError):
            return f"rank {rank} is gone"
        if kind in (b"bye", b"here"):
            return None if kind == b"bye" else ""
        said = reason[0].decode(errors="replace") if reason else ""
        return said if said.startswith("rank ") else f"rank {rank} failed: {said}"


def named(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 1, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class _Wait:
    """How long the start may take; who waits says so once, after a while."""

    def __init__(self, place: Place) -> None:
        self._place, self._began, self._said = place, time.monotonic(), False

    @property
    def over(self) -> bool:
        """Raises KdgenError once the process that started the ranks is gone: nobody would end them."""
        if self._place.parent and os.getppid() != self._place.parent:
            raise KdgenError("the process that started the ranks is gone")
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
    """When each of some ranks was last heard of, and when to tell them that this one is here."""

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
        """Whether it is time to be heard again."""
        if now - self._beat < BEAT_SECONDS:
            return False
        self._beat = now
        return True

    def quiet(self, now: float) -> list[int]:
        """Ranks that were silent for too long. Call it often: time in which this process did not run itself counts for nobody."""
        stopped = now - self._looked > 2 * BEAT_SECONDS
        self._looked = now
        if stopped:
            self._heard = dict.fromkeys(self._heard, now)
        return [rank for rank, at in self._heard.items() if now - at > QUIET_SECONDS]


def _problem(rank: int, kind: type[BaseException], error: BaseException | None) -> str:
    """What other ranks are told of the exception that ends this one."""
    if issubclass(kind, KeyboardInterrupt):
        return f"rank {rank} was interrupted"
    if isinstance(error, SystemExit) and (name := signal_of(error.code)):
        return f"rank {rank} was ended by {name}"
    return f"{kind.__name__}: {error}"


def signal_of(code: object) -> str:
    """The name of the signal by which a process with this exit code has ended, whether it was killed or ended in order; else empty."""
    number = 0 if not isinstance(code, int) else -code if code < 0 else code - 128
    return next((each.name for each in signal.Signals if each == number), "")


@dataclass(frozen=True)
class _Peer:
    """Two connections to another rank: one for exchanges, one that only says how it ends."""

    talk: socket.socket
    life: socket.socket


def _go_on_without_parent() -> None:
    """Have the system send SIGCONT once the process that started this one is gone: a stopped rank would not notice, and be left."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGCONT))


@contextlib.contextmanager
def joined(place: Place | None) -> Iterator[Group | None]:
    """The group at ``place`` while the block runs; None, and nothing done, for a process by itself."""
    if place is None:
        yield None
        return
    with Group(place) as group:
        yield group
