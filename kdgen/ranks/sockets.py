"""Frames over TCP: how ranks send each other bytes."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Sequence

_MAX_FRAME = 1 << 24


def listener(host: str, port: int, backlog: int) -> socket.socket:
    """Listen only locally if ``host`` is a loopback address; otherwise on all addresses, IPv4 and IPv6, as other hosts may use either."""
    if host in ("127.0.0.1", "localhost"):
        return socket.create_server((host, port), backlog=backlog)
    if host == "::1" or not socket.has_dualstack_ipv6():
        return socket.create_server((host if host == "::1" else "", port), family=_family(host), backlog=backlog)
    return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def send(connection: socket.socket, parts: Sequence[bytes]) -> None:
    text = json.dumps([base64.b64encode(part).decode() for part in parts]).encode()
    connection.sendall(len(text).to_bytes(4, "little") + text)


def receive(connection: socket.socket) -> list[bytes]:
    """Read a frame. Raises OSError when the connection ends, ValueError when the bytes are not a frame."""
    length = int.from_bytes(_exactly(connection, 4), "little")
    if length > _MAX_FRAME:
        raise ValueError("no frame of a rank")
    parts = json.loads(_exactly(connection, length))
    if not isinstance(parts, list) or not parts or not all(isinstance(part, str) for part in parts):
        raise ValueError("no frame of a rank")
    return [base64.b64decode(part) for part in parts]


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise ConnectionError("the other end is closed")
        found += part
    return bytes(found)
