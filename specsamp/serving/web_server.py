"""Runs an endpoint under uvicorn, which must be installed: binds early, ends slow connections, ends
texts on a signal.
"""

import collections
import socket

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from specsamp.serving.service import Service

BUSY = (
    b'{"error":{"message":"too many connections: try again later","type":"server_error",'
    b'"param":null,"code":null}}'
)
TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"retry-after: 1\r\ncontent-length: %d\r\n\r\n%s" % (len(BUSY), BUSY)
)
SPARE_CONNECTIONS = 64  # spare connections of an address, beyond the service's capacity
LAST_SECONDS = 5  # seconds for connections to end after their texts


def bind(host: str, port: int, timeout: float) -> socket.socket:
    """Returns a socket at an address, which does not listen yet.

    Args:
      port: 0 for any free port.
      timeout: seconds after which Linux gives up a connection whose other end reads nothing.

    Raises:
      ValueError: this machine does not have the address, or another process uses it.
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[
            0
        ]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * timeout))
            bound.bind(place)
        except OSError:
            bound.close()
            raise
        return bound
    except OSError as error:
        raise ValueError(
            f"--host={host} --port={port}: {error.strerror or error}; choose another address or "
            "port"
        ) from error


def address(bound: socket.socket) -> str:
    """Returns the URL of a socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class WebServer(uvicorn.Server):
    """Serves an application until it is interrupted, or has failed.

    Attributes:
      ended: how many texts the interrupt ended.
    """

    def __init__(self, app: ASGIApp, service: Service, timeout: float):
        """Makes a server.

        Args:
          service: of the application. An address may have a connection for each text of the
            service's capacity, and some more; all addresses together twice as many.
          timeout: seconds for a connection to send the headers of a request; after an answer twice
            as many, and up to three times as many for incomplete headers.
        """

        by_address: collections.Counter[str] = collections.Counter()
        most = service.capacity + SPARE_CONNECTIONS

        class Connection(H11Protocol):
            """Closes a connection without a complete request in time, also after earlier
            answers.
            """

            def connection_made(self, transport):
                super().connection_made(transport)
                self._address = (transport.get_extra_info("peername") or ("",))[0]
                by_address[self._address] += 1
                if by_address[self._address] > most or by_address.total() > 2 * most:
                    transport.write(TOO_MANY)
                    transport.close()
                # Number of answered requests at the last check.
                self._answered, self._looks = None, 0
                self.loop.call_later(timeout, self._look)

            def connection_lost(self, exc):
                super().connection_lost(exc)
                by_address[self._address] -= 1
                if not by_address[self._address]:
                    del by_address[self._address]

            def _look(self):
                if self.cycle is None or (self.cycle is self._answered and self._looks == 2):
                    self.transport.close()
                elif not self.transport.is_closing():
                    self._looks = self._looks + 1 if self.cycle is self._answered else 1
                    self._answered = self.cycle if self.cycle.response_complete else None
                    self.loop.call_later(timeout, self._look)

        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=2 * timeout,
                timeout_graceful_shutdown=LAST_SECONDS,
            )
        )
        self._service, self.ended = service, 0

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to end; uvicorn calls it ten times a second."""
        return await super().on_tick(counter) or self._service.failed is not None

    def handle_exit(self, sig, frame) -> None:
        """Ends all texts and thereby their connections; uvicorn calls it on a signal."""
        if not self.should_exit:
            self.ended = self._service.close("the server was stopped")
        super().handle_exit(sig, frame)
