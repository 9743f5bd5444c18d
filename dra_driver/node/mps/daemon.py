"""One control daemon as a value: its name, token, directories and status."""

from collections.abc import Mapping
from dataclasses import field
from typing import Final

from dra_driver.base.errors import SettingsError
from dra_driver.base.frozen import frozen
from dra_driver.model.gpus import GpuUuid
from dra_driver.model.mps import (
    MpsClient,
    MpsLimits,
    MpsNamespaceName,
    MpsServerName,
    mps_server_name,
)

TOKEN_VARIABLE: Final = "DRA_DRIVER_MPS_TOKEN"  # in the environment of every process of a daemon
PIPE_DIRECTORY: Final = "CUDA_MPS_PIPE_DIRECTORY"
LOG_DIRECTORY: Final = "CUDA_MPS_LOG_DIRECTORY"
SERVER: Final = "gpu"  # what a daemon of protocol 3 calls the one server that it has

# A socket's path has 107 usable bytes, of which MPS wants some for what it puts below. A daemon
# with a longer one was seen to die without a word.
_LONGEST_PIPE_DIRECTORY: Final = 83

_ALL: Final = MpsLimits()


@frozen
class ControlDaemon:
    """One control daemon. *directory* is called the same by the host, by this process, and by the
    daemon."""

    name: MpsServerName
    gpus: tuple[GpuUuid, ...]
    protocol: int  # 2 or 3
    directory: str  # <mps-dir>/<name>
    token: str
    default_limits: MpsLimits = _ALL  # protocol 2: the server's defaults

    @property
    def pipe(self) -> str:
        return f"{self.directory}/pipe"

    @property
    def log(self) -> str:
        return f"{self.directory}/log"

    @property
    def shm(self) -> str:
        return f"{self.directory}/shm"

    @property
    def config(self) -> str:
        return f"{self.directory}/config.toml"


@frozen
class DaemonStatus:
    """What a daemon answered."""

    ready: bool
    state: str  # its own word, for messages ("Ready", "Fault", "no server")
    clients: tuple[MpsClient, ...] = ()  # with the namespace's name where the protocol tells
    # Protocol 3: the namespaces besides default.
    namespaces: Mapping[MpsNamespaceName, MpsLimits] = field(default_factory=dict)


def check_directory(mps_dir: str) -> None:
    """Refuse a directory for daemons in which the paths of sockets would be too long.

    SettingsError: it says how long it may be.
    """
    below = f"/{mps_server_name(())}/pipe/{SERVER}/c_{'0' * 24}"
    longest = _LONGEST_PIPE_DIRECTORY - len(below)
    if not mps_dir.startswith("/"):
        raise SettingsError(f"the directory for MPS (--mps-dir) is no absolute path: {mps_dir!r}")
    if len(mps_dir.rstrip("/").encode()) > longest:
        raise SettingsError(
            f"the directory for MPS (--mps-dir) is too long for sockets in it: {mps_dir} has "
            f"{len(mps_dir.encode())} characters, and at most {longest} are possible"
        )
