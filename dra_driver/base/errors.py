"""All errors of the project, named and worded for the person who has to act on them.

Every message names the thing and what to change. Errors of foreign libraries become these at the
one door of that library, with the cause kept (``raise ... from``).
"""

from collections.abc import Iterable

MAX_PROBLEMS = 16  # in one message
_MAX_BYTES = 1024  # bytes; the kubelet cuts the messages of its events there
_MORE = "… and more"


class DriverError(Exception):
    """The root of all errors that this project raises on purpose.

    *public*: the message for a pod's events, which its tenant reads; it says nothing of other
    tenants. The node's log has the whole message.
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


class DeviceUnhealthy(NodeError):
    """The claim's device is sick, and the claim does not tolerate that."""


class DriverUnusable(NodeError):
    """NVIDIA's driver as a whole is missing, incomplete or does not answer."""


class MigInstanceNotFound(NodeError):
    """A MIG instance does not exist, or not yet; the GPU itself answers."""


class ClaimRecordLost(NodeError):
    """The record of a prepared claim is gone or damaged."""


class ClaimInUse(NodeError):
    """A claim cannot be unprepared yet: a process of its pods still uses it."""


class PlacementTaken(NodeError):
    """A partition was not created: a MIG instance of another owner is in its place."""


class CommandFailed(NodeError):
    """A program ended with an error. *output*: the end of what it wrote."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class MpsStateUnknown(NodeError):
    """A program of the driver could not be run, or a process not be inspected; that says nothing
    about the MPS server."""


class TimedOut(NodeError):
    """An outside call or a wait did not end in time."""


class MpsClientStuck(TimedOut):
    """An MPS server does not end a client, although it had all the time for it."""


class MpsAgentUnreachable(NodeError):
    """Nothing answers at the socket of the node's MPS agent."""


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


class NotServed(Refused):
    """The API server serves no version of a group of resources that this driver knows."""


class Unreachable(ApiServerError):
    """No answer, 429 or 5xx."""


class SettingsError(DriverError):
    """A flag, an environment variable or a file given to us is wrong."""


class AddressInUse(SettingsError):
    """Another socket listens at the address that was given to us."""


def join_problems(opening: str, problems: Iterable[str]) -> str:
    """*opening* and *problems*, each once: as many as anybody reads, for whoever writes a claim
    decides how many there are, and how long."""
    distinct = tuple(dict.fromkeys(problems))
    text = (opening + "; ".join(distinct[:MAX_PROBLEMS])).encode(errors="replace")
    if len(distinct) <= MAX_PROBLEMS and len(text) <= _MAX_BYTES:
        return text.decode()
    return text[: _MAX_BYTES - len(_MORE.encode())].decode(errors="ignore") + _MORE
