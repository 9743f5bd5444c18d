"""What can go wrong, in the words of the person who has to mend it.

::

    DriverError
    ├── ClaimError         it cannot be served as it is written or allocated; asking again is no use
    │   ├── UnknownDevice  it was allocated a device that this node does not have
    │   └── DeviceHeld     another claim holds its device; once that one is gone, it can be served
    ├── NodeError          this machine (NVML, driver files, disk) failed; asking again can help
    │   ├── Vanished       a MIG instance is not there any more
    │   ├── LostRecord     what was recorded of a prepared claim is gone or damaged
    │   ├── InUse          a process still uses what is to be given back
    │   ├── Taken          a partition was not cut: somebody else's instance is there
    │   ├── ProgramFailed  a program ended with an error
    │   ├── NotAsked       a program of the driver could not be run: nothing is known by that
    │   ├── TimedOut       an outside call or a wait did not end in time
    │   │   └── Wedged     an MPS server does not end a client
    │   └── AgentDown      nobody answers at the socket of the node's MPS agent
    ├── ClusterError       the API server refused or could not be reached; asking again can help
    │   ├── NotFound       404
    │   ├── Conflict       409: somebody else wrote first
    │   ├── Gone           410: the resource version is too old, list again
    │   ├── Forbidden      401 or 403: the rights are missing
    │   ├── Refused        400, 405 or 422: the API server will not take this
    │   └── Unreachable    no answer, 429 or 5xx
    └── SettingsError      a flag, a variable or a file given to us is wrong; stop and say so

Every message names the thing and what to change. Errors of foreign libraries become these at the
one door of that library, with the cause kept (``raise ... from``).
"""

from collections.abc import Iterable

MAX_PROBLEMS = 16  # that a claim is told of at once
_MAX_BYTES = 1024  # bytes; the kubelet cuts the messages of its events there
_MORE = "… and more"


class DriverError(Exception):
    """The root: everything this project raises on purpose.

    *public*: the same for a pod's events, which its tenant reads, without what is another tenant's;
    the node's log has all of it.
    """

    def __init__(self, message: str = "", public: str = "") -> None:
        super().__init__(message)
        self.public = public or message


class ClaimError(DriverError):
    """The claim cannot be served as it is written or allocated."""


class UnknownDevice(ClaimError):
    """The claim was allocated a device that this node does not have."""


class DeviceHeldByClaim(ClaimError):
    """The claim's device is held by another claim."""


class NodeError(DriverError):
    """This machine failed us: NVML, driver files, disk, a child process."""


class MigInstanceNotFound(NodeError):
    """A MIG instance is not there any more, or not yet; the GPU itself answers."""


class ClaimRecordLost(NodeError):
    """What was recorded of a prepared claim is gone, or damaged."""


class ClaimInUse(NodeError):
    """A claim is not given back, since a process of its pods still uses it; once that has ended, it
    can be."""


class PlacementTaken(NodeError):
    """A partition was not cut, since somebody else's MIG instance is in its place."""


class CommandFailed(NodeError):
    """A program ended with an error. *said*: its own last words, and nothing else."""

    def __init__(self, message: str, said: str = "") -> None:
        super().__init__(message)
        self.said = said


class MpsStateUnknown(NodeError):
    """A program of the driver could not be run, or a process not be looked at. That says nothing of
    whom it would have asked."""


class TimedOut(NodeError):
    """An outside call or a wait did not end in time."""


class MpsClientStuck(TimedOut):
    """An MPS server does not end a client, although it had all the time for it."""


class MpsAgentUnreachable(NodeError):
    """Nobody answers at the socket of the node's MPS agent."""


class ApiServerError(DriverError):
    """The API server refused or could not be reached."""


class NotFound(ApiServerError):
    """404."""


class Conflict(ApiServerError):
    """409: somebody else wrote first."""


class Gone(ApiServerError):
    """410: the resource version is too old, list again."""


class Forbidden(ApiServerError):
    """401 or 403: the rights are missing."""


class Refused(ApiServerError):
    """400, 405 or 422: the API server will not take this request as it is."""


class Unreachable(ApiServerError):
    """No answer, 429 or 5xx."""


class SettingsError(DriverError):
    """A flag, an environment variable or a file given to us is wrong."""


def join_problems(opening: str, problems: Iterable[str]) -> str:
    """*opening* and *problems*, each once: as many as anybody reads, for whoever writes a claim
    decides how many there are, and how long."""
    distinct = tuple(dict.fromkeys(problems))
    text = (opening + "; ".join(distinct[:MAX_PROBLEMS])).encode(errors="replace")
    if len(distinct) <= MAX_PROBLEMS and len(text) <= _MAX_BYTES:
        return text.decode()
    return text[: _MAX_BYTES - len(_MORE.encode())].decode(errors="ignore") + _MORE
