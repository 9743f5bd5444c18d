"""A TCP proxy whose connections can die in silence, as they do where a firewall forgets them.

::

    with SilentProxy("127.0.0.1", 6443) as proxy:
        ...  # connect to 127.0.0.1, proxy.port
        proxy.silence()  # what is open now carries nothing any more, and is not closed
        proxy.new_are_silent = True  # and neither does what is opened from now on
"""

import contextlib
import socket
import threading

_CONNECT_SECONDS = 5.0


class _Pair:
    """One connection: from who connected, to where it leads."""

    def __init__(self, client: socket.socket, server: socket.socket, silent: bool) -> None:
        self.ends = (client, server)
        self.silent = silent
        self.swallowed = False  # whether something was sent that never arrived

    def close(self) -> None:
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class SilentProxy:
    """See the module. All methods may be called by any thread."""

    def __init__(self, host: str, port: int) -> None:
        """*host* and *port*: where the connections lead."""
        self.new_are_silent = False
        self._to = (host, port)
        self._pairs: list[_Pair] = []
        self._lock = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]

    def __enter__(self) -> "SilentProxy":
        threading.Thread(target=self._accept, name="silent proxy", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._lock:
            for pair in self._pairs:
                pair.close()

    @property
    def opened(self) -> int:
        """How many connections there have been."""
        with self._lock:
            return len(self._pairs)

    @property
    def swallowed(self) -> int:
        """On how many connections something was sent that never arrived."""
        with self._lock:
            return sum(pair.swallowed for pair in self._pairs)

    def silence(self) -> None:
        """From now on nothing passes on the connections there are; nobody is told."""
        with self._lock:
            for pair in self._pairs:
                pair.silent = True

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listening socket was closed
            while True:
                client, _ = self._listening.accept()
                try:
                    server = socket.create_connection(self._to, _CONNECT_SECONDS)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                self._carry(_Pair(client, server, self.new_are_silent))

    def _carry(self, pair: _Pair) -> None:
        with self._lock:
            self._pairs.append(pair)
        for ends in (pair.ends, pair.ends[::-1]):
            threading.Thread(target=_pass, args=(pair, *ends), daemon=True).start()


def _pass(pair: _Pair, source: socket.socket, to: socket.socket) -> None:
    """Until either side ends; who is silent says nothing of that either."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            if not pair.silent:
                to.sendall(data)
            elif source is pair.ends[0]:
                pair.swallowed = True
    if not pair.silent or source is pair.ends[0]:
        pair.close()
