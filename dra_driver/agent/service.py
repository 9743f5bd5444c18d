"""The agent's socket: one request a connection, a thread for each, and a limit of both.

Only root can connect (mode 0600). A lock beside the socket says whether an agent lives: while it is
held no other agent serves this directory, and a socket without it is stale.
"""

import logging
import os
import re
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, assert_never

from dra_driver.agent.supervisor import MpsSupervisor
from dra_driver.base.deadlines import Deadline
from dra_driver.base.errors import ClaimError, DriverError, NodeError, SettingsError, TimedOut
from dra_driver.base.files import disk_errors, lock_within
from dra_driver.model.gpus import is_mig_uuid
from dra_driver.model.mps import ALL_CORES, MpsLimits, MpsNamespace
from dra_driver.node.mps import agent_protocol
from dra_driver.node.mps.agent_protocol import (
    AgentAnswer,
    AgentError,
    AgentRequest,
    LetGoRequest,
    ReleaseRequest,
    RequestDone,
    ServeRequest,
    StatusRequest,
    TerminateRequest,
)

_NAME: Final = re.compile(r"[a-z0-9_]{1,64}")  # what MPS takes for a namespace
_GPU: Final = re.compile(r"[A-Za-z0-9-]{1,96}")
_MIB: Final = 1 << 20


def parse_request(line: bytes) -> AgentRequest:
    """NodeError: it is no request. ClaimError: its namespace is impossible."""
    request = agent_protocol.decode(agent_protocol.REQUESTS, line, "the request")
    if isinstance(request, ServeRequest):
        _check(request.namespace)
    return request


def _check(namespace: MpsNamespace) -> None:
    """These become arguments and paths of a program that runs as root."""
    wrong = []
    if not _NAME.fullmatch(namespace.name):
        wrong.append(f"its name {namespace.name!r} is not 1 to 64 of a-z, 0-9 and _")
    if not namespace.gpus or len(set(namespace.gpus)) != len(namespace.gpus):
        wrong.append(f"its GPUs are none, or one comes twice: {list(namespace.gpus)}")
    wrong += [f"{gpu!r} is no UUID of a GPU" for gpu in namespace.gpus if not _GPU.fullmatch(gpu)]
    if len(namespace.gpus) > 1 and any(map(is_mig_uuid, namespace.gpus)):
        wrong.append("a MIG instance has a server of its own")
    if namespace.memory_bytes and len(namespace.memory_bytes) != len(namespace.gpus):
        wrong.append(f"{len(namespace.memory_bytes)} memory limits for {len(namespace.gpus)} GPUs")
    own_limits = [MpsLimits(memory_bytes=size) for size in namespace.memory_bytes]
    for limits in (MpsLimits(namespace.percent), *own_limits, namespace.default_limits):
        wrong += _wrong(limits)
    if wrong:
        raise ClaimError(
            f"claim {namespace.claim} cannot have this MPS namespace: {'; '.join(wrong)}"
        )


def _wrong(limits: MpsLimits) -> list[str]:
    wrong = []
    if not 1 <= limits.percent <= ALL_CORES:
        wrong.append(f"{limits.percent} % of the multiprocessors is not 1 to {ALL_CORES}")
    size = limits.memory_bytes
    if size is not None and (size < _MIB or size % _MIB):
        wrong.append(f"a memory limit of {size} bytes is not 1 or more whole MiB")
    return wrong


log = logging.getLogger(__name__)

SOCKET: Final = "agent.sock"
REQUEST_THREAD: Final = "mps-request"
_HIDDEN: Final = re.compile(r"\.[0-9a-f]{8}")
_LOCK: Final = "agent.lock"
_LOCK_SECONDS: Final = 3.0  # an agent that is being ended needs a moment
_READ_SECONDS, _WRITE_SECONDS = 5.0, 5.0
_MOST_AT_ONCE: Final = 32  # more wait in the queue of the socket
_STOP_SECONDS: Final = 2.0  # for requests under way; the next agent finishes the others


def lock_directory(directory: Path, seconds: float = _LOCK_SECONDS) -> int:
    """Make *directory* and be its only agent, until the file that is returned is closed.

    SettingsError: another agent lives there.
    """
    with disk_errors(f"make the directory for MPS (--mps-dir) {directory}"):
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        try:
            return lock_within(directory / _LOCK, seconds, "the other MPS agent ends")
        except TimedOut as e:
            raise SettingsError(
                f"another MPS agent serves {directory}: end it, or give another --mps-dir"
            ) from e


class AgentService:
    """Serves *supervisor* at ``<directory>/agent.sock``, from ``start`` to ``stop``."""

    def __init__(self, supervisor: MpsSupervisor, directory: Path) -> None:
        """Only whoever has the lock of *directory* makes one."""
        self._supervisor = supervisor
        self.path = directory / SOCKET
        self._listener = socket.socket(socket.AF_UNIX)
        self._places = threading.Semaphore(_MOST_AT_ONCE)
        self._busy = 0
        self._idle = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="mps-socket", daemon=True)

    def start(self) -> None:
        """The socket appears once it is listened to, with its mode, and replaces an older one."""
        hidden = self.path.with_name(f".{secrets.token_hex(4)}")
        with disk_errors(f"serve at {self.path}"):
            self._remove_hidden()
            self._listener.bind(os.fspath(hidden))
            hidden.chmod(0o600)
            self._listener.listen(128)
            os.replace(hidden, self.path)
        self._thread.start()

    def stop(self) -> None:
        """Take no more requests, and give those under way a moment."""
        self._stopping = True
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()
        with self._idle:
            self._idle.wait_for(lambda: not self._busy, _STOP_SECONDS)

    def _remove_hidden(self) -> None:
        """An agent that was killed in ``start`` may have left a socket that was not renamed."""
        for path in self.path.parent.glob(".*"):
            if _HIDDEN.fullmatch(path.name) and path.is_socket():
                path.unlink(missing_ok=True)

    def problem(self) -> str | None:
        """Why it does not serve; None: it does."""
        if not self._thread.is_alive():
            return f"{self.path} is not served"
        return None if self.path.is_socket() else f"{self.path} was removed"

    def _run(self) -> None:
        while not self._stopping:
            self._places.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError as e:
                self._places.release()
                if not self._stopping:
                    log.warning("a connection cannot be accepted", extra={"error": str(e)})
                    time.sleep(0.1)  # until a file descriptor is free
                continue
            with self._idle:
                self._busy += 1
            self._hand_over(connection)

    def _hand_over(self, connection: socket.socket) -> None:
        """Serve it in a thread of its own."""
        thread = threading.Thread(
            target=self._serve, args=(connection,), name=REQUEST_THREAD, daemon=True
        )
        try:
            thread.start()
        except RuntimeError as e:  # the node has no thread left
            log.warning("a thread cannot be started", extra={"error": str(e)})
            connection.close()
            with self._idle:
                self._busy -= 1
            self._places.release()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                line = agent_protocol.read_line(
                    connection,
                    Deadline(_READ_SECONDS),
                    agent_protocol.MAX_REQUEST_BYTES,
                    "a request",
                )
                if line:
                    answer = self._answer(line)
                    connection.settimeout(_WRITE_SECONDS)
                    connection.sendall(answer)
        except (OSError, NodeError) as e:
            log.info("a client of the socket went away", extra={"error": str(e)})
        finally:
            with self._idle:
                self._busy -= 1
                self._idle.notify_all()
        try:
            if not self._stopping:
                self._supervisor.make_spares()
        except Exception:  # no request waits for it
            log.exception("no spare MPS namespace could be created")
        finally:
            self._places.release()

    def _answer(self, line: bytes) -> bytes:
        answer: AgentAnswer
        try:
            answer = self._done(parse_request(line))
        except DriverError as e:
            log.warning("a request was refused", extra={"error": str(e)})
            answer = AgentError.of(e)
        except Exception as e:  # the caller gets an answer in any case
            log.exception("a request failed")
            answer = AgentError.of(NodeError(f"the MPS agent failed: {e}; see its log"))
        return agent_protocol.ANSWERS.encode(answer) + b"\n"

    def _done(self, request: AgentRequest) -> AgentAnswer:
        match request:
            case ServeRequest(namespace=namespace):
                return self._supervisor.serve(namespace)
            case StatusRequest():
                return self._supervisor.status()
            case ReleaseRequest(name=name):
                self._supervisor.release(name)
            case TerminateRequest(name=name, pids=pids):
                self._supervisor.terminate(name, pids)
            case LetGoRequest(gpus=gpus, until=until):
                self._supervisor.let_go(gpus, until)
            case _:
                assert_never(request)
        return RequestDone()
