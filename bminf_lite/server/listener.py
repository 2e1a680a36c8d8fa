"""The address of a server, and the sockets that listen there."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

from ..errors import UsageError
from .http_process import BACKLOG

SEND_BUFFER_BYTES = 128 << 10
"""What the kernel keeps for a client that does not read. It doubles the number; by itself it would keep megabytes."""


@dataclass(frozen=True)
class Address:
    """Where a server listens: ``port`` 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 8000


class Listener:
    """The bound sockets of an address, one for each HTTP process, so that the kernel spreads connections over them.

    The address is taken when this is made, and connections are accepted from :meth:`listen` on. Raises ``UsageError``
    for an address that cannot be bound.
    """

    def __init__(self, address: Address, count: int):
        try:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            raise UsageError(f"the host {address.host!r} is not an address of this machine: {error.strerror}") from None
        family, *_, place = found[0]
        self.sockets: list[socket.socket] = []
        try:
            if count > 1 and address.port:
                _bound(family, place, shared=False).close()  # finds a server that shares its port, as this one will
            for _ in range(count):
                self.sockets.append(_bound(family, place, shared=count > 1))
                place = self.sockets[0].getsockname()
        except OSError as error:
            self.close()
            hint = "choose another --port, or end what listens there" if error.errno == errno.EADDRINUSE else ""
            where = f"{address.host}, port {address.port}"
            raise UsageError(f"the server cannot listen at {where}: {error.strerror}; {hint}".rstrip("; ")) from None
        self.host, self.port = address.host, int(place[1])

    @property
    def url(self) -> str:
        """Where the server is reached."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def listen(self) -> None:
        """Accept connections."""
        for sock in self.sockets:
            sock.listen(BACKLOG)

    def close(self) -> None:
        """Stop listening, as far as this process is concerned."""
        for sock in self.sockets:
            sock.close()


def _bound(family: int, place: tuple[object, ...], shared: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(place)
    except OSError:
        sock.close()
        raise
    return sock
