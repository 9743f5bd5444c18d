"""The settings of each command: from flags, else the environment, else a default.

A field is a flag (``--node-name``) and an environment variable (``NODE_NAME``); its description is
the help text. Settings are read once, in ``__main__``; nothing below reads the environment. Each
command has a class with the fields that it uses: it refuses flags of other commands and ignores
their variables.
"""

import argparse
import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import pydantic
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from api.names import DRIVER
from dra_driver.base.errors import SettingsError
from dra_driver.k8s.quantity import rounded_up
from dra_driver.node.driver.config import NodeConfig
from dra_driver.settings.fields import (
    DNS_SUBDOMAIN,
    FORMS,
    AbsolutePath,
    DriverName,
    ExtendedResourceName,
    HttpAddress,
    Kubeconfig,
    KubeletDirectory,
    LogFormat,
    LogLevel,
    MigExtendedResourcePrefix,
    NamespaceName,
    NodeName,
    ObjectName,
    OptionalPath,
    PodUidFlag,
    ProfileName,
    Quantity,
    RevisionNamespace,
    SharedExtendedResourceName,
)

_MPS_DIR = "/run/dra-driver-gpu/mps"
_EMPTY_MEANS_NONE = (  # an empty variable counts, although the default is not empty
    "mps_socket",
    "extended_resource_name",
    "shared_extended_resource_name",
    "mig_extended_resource_prefix",
)


class _Settings(BaseModel):
    # Built when it is read: a process reads one of them.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        """One flag per field, with its variable and its default in the help. One that is not given
        leaves what was given before an action: ``health --kubeconfig FILE list``."""
        for name, field in cls.model_fields.items():
            default = (
                ""
                if field.default in (None, "", PydanticUndefined)
                else f", default {_written(field.default)}"
            )
            parser.add_argument(
                f"--{name.replace('_', '-')}",
                dest=name,
                default=argparse.SUPPRESS,
                metavar=_metavar(name, field),
                help=f"{field.description} (${name.upper()}{default})",
            )

    @classmethod
    def read(
        cls, arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ
    ) -> Self:
        """The settings, or a SettingsError that names every flag that is wrong."""
        values = {name: _given(name, arguments, environment) for name in cls.model_fields}
        try:
            return cls.model_validate(
                {name: value for name, value in values.items() if value is not None}
            )
        except pydantic.ValidationError as e:
            raise SettingsError("; ".join(_problem(error) for error in e.errors())) from e


class HostSettings(_Settings):
    """What every command needs: the host, its driver, and how to say what happens."""

    driver_root: OptionalPath = Field(
        "",
        description="where NVIDIA's driver is installed, as a path of the host; "
        "empty: the first complete one of /run/nvidia/driver, /, /home/kubernetes/bin/nvidia, "
        "/usr/local/nvidia",
    )
    host_root: AbsolutePath = Field(Path("/"), description="where this process sees the host's /")
    sim: str = Field(
        "",
        description="simulate GPUs: the name of a bundled node (h100x8, …), or a file that "
        "describes one",
    )
    log_format: LogFormat = "text"

    @property
    def node_config(self) -> NodeConfig:
        """Where the GPUs are looked for."""
        return NodeConfig(self.driver_root or None, self.host_root)


class StartupProbeSettings(_Settings):
    """`dra-driver startup-probe`: which plugin it asks about."""

    driver_name: DriverName = DRIVER
    kubelet_dir: KubeletDirectory = Path("/var/lib/kubelet")
    pod_uid: PodUidFlag

    @property
    def instances_dir(self) -> Path:
        return self.kubelet_dir / "plugins" / self.driver_name / "instances"


class UninstallSettings(_Settings):
    """`dra-driver uninstall-check`: which claims and pods it looks for, and where."""

    driver_name: DriverName = DRIVER
    kubeconfig: Kubeconfig = None
    plugin_selector: str = Field(
        "",
        description="the labels of the plugin's pods, as kubectl's --selector has them: pods "
        "without claims count only on nodes where such a pod is; empty: on all nodes",
    )


def _own_kubeconfig() -> Path | None:
    """Where kubectl finds the kubeconfig of who asks, if there is one."""
    with contextlib.suppress(RuntimeError):  # no home
        if (path := Path("~/.kube/config").expanduser()).is_file():
            return path
    return None


class ProfileSettings(_Settings):
    """`dra-driver profile`: where the API server is, for a person."""

    kubeconfig: Path | None = Field(
        default_factory=_own_kubeconfig,
        description="how to reach the API server; default: ~/.kube/config, or else the pod's "
        "service account",
    )
    revision_namespace: str = Field(
        "",
        description="the namespace in which the revisions of NodeProfiles are kept; empty: they "
        "are looked for in all namespaces",
    )


class HealthSettings(_Settings):
    """`dra-driver health`: whose devices, and on which node."""

    driver_name: DriverName = DRIVER
    kubeconfig: Path | None = Field(
        default_factory=_own_kubeconfig,
        description="how to reach the API server; default: ~/.kube/config, or else the pod's "
        "service account",
    )
    node_name: str = Field(
        "",
        max_length=253,
        pattern=rf"^$|{DNS_SUBDOMAIN}",
        description="the node; default: every node for `health list`, else the name of this "
        "machine",
    )

    @property
    def node(self) -> str:
        """The one that is meant where one has to be."""
        return self.node_name or os.uname().nodename.lower()


class ControllerSettings(_Settings):
    """The controller: which profiles it rolls out, and how its replicas agree on one."""

    kubeconfig: Kubeconfig = None
    revision_namespace: NamespaceName = Field(
        description="the namespace in which the revisions of NodeProfiles are kept, and the lease"
    )
    lease_name: ObjectName = Field(
        "dra-driver-gpu-controller",
        description="the Lease by which replicas agree on the one that works",
    )
    identity: str = Field(
        default_factory=lambda: f"{os.uname().nodename}_{os.urandom(4).hex()}",
        min_length=1,
        max_length=253,
        description="what this replica is called in the lease; default: the name of this machine "
        "with a random ending",
    )
    lease_seconds: int = Field(
        15,
        ge=3,
        le=600,
        description="for how long a replica leads without renewing its lease: after that another "
        "one takes over; a replica stops writing after two thirds of it",
    )
    http_address: HttpAddress = ""
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"


class AgentSettings(HostSettings):
    """The MPS agent."""

    mps_dir: AbsolutePath = Field(
        Path(_MPS_DIR),
        description="the directory of the MPS servers; the host, the agent and the containers use "
        "the same path; at most 33 characters, because it holds sockets",
    )
    mps_shared_memory: Quantity = Field(
        "4Gi",
        description="what all clients of an MPS server may keep in /dev/shm together, with drivers "
        "before 615; never more than half of the memory of the machine",
    )
    health_interval: float = Field(
        5.0, ge=0.1, le=3600, description="seconds between two checks of the MPS servers"
    )
    http_address: HttpAddress = ""
    log_level: LogLevel = "info"

    @property
    def shared_memory_bytes(self) -> int:
        return rounded_up(self.mps_shared_memory)


class ClaimsSettings(HostSettings):
    """`dra-driver claims`: where the plugin of this node writes down what it did and knows."""

    driver_name: DriverName = DRIVER
    kubelet_dir: KubeletDirectory = Path("/var/lib/kubelet")
    state_dir: AbsolutePath | None = Field(
        None,
        description="the directory for state that outlives a restart; default: "
        "KUBELET_DIR/plugins/DRIVER_NAME/state",
    )
    mps_socket: OptionalPath = Field(
        f"{_MPS_DIR}/agent.sock",
        description="the socket of this node's MPS agent; empty: this node offers no MPS",
    )

    @property
    def plugin_dir(self) -> Path:
        """Our own directory below the kubelet's: sockets, locks, state."""
        return self.kubelet_dir / "plugins" / self.driver_name

    @property
    def state(self) -> Path:
        return self.state_dir or self.plugin_dir / "state"

    @property
    def ledger_dir(self) -> Path:
        return self.state / "claims"

    @property
    def last_profile(self) -> Path:
        """The profile in force."""
        return self.state / "profile.json"

    @property
    def mig_state(self) -> Path:
        """What layouts made of GPUs."""
        return self.state / "mig.json"

    @property
    def served_api(self) -> Path:
        """By which API GPUs are given out."""
        return self.state / "api.json"

    @property
    def health_state(self) -> Path:
        """What is known of the health of GPUs."""
        return self.state / "health.json"

    @property
    def known_gpus(self) -> Path:
        """The GPUs as they were when they last answered."""
        return self.state / "gpus.json"


class DevicesSettings(ClaimsSettings):
    """`dra-driver devices`: besides, as what the GPUs are offered, and whose slices it prints."""

    node_name: str = Field(
        default_factory=lambda: os.uname().nodename,
        description="the node for which to print ResourceSlices; default: the name of this machine",
    )
    profiles: Path | None = Field(
        None,
        description="a file with one profile, named after it; or a directory of such files, "
        "such as a mounted ConfigMap",
    )
    profile: ProfileName = Field(
        "",
        description="the profile of a node for which neither a label nor a NodeProfile object "
        "chooses one (`devices` looks at neither); empty: the one called default",
    )
    extended_resource_name: ExtendedResourceName = "nvidia.com/gpu"
    shared_extended_resource_name: SharedExtendedResourceName = Field(
        "nvidia.com/gpu.shared", validate_default=True
    )
    mig_extended_resource_prefix: MigExtendedResourcePrefix = "nvidia.com/mig-"

    @field_validator("shared_extended_resource_name")
    @classmethod
    def _tells_replicas_from_gpus(cls, name: str, others: ValidationInfo) -> str:
        if name and name == others.data.get("extended_resource_name"):
            raise ValueError("--extended-resource-name is the same; give it another name")
        return name


class DoctorSettings(DevicesSettings):
    """`dra-driver doctor`: besides, whom the plugin works with."""

    node_name: NodeName = Field(
        default_factory=lambda: os.uname().nodename.lower(),
        description="which Node to check; default: the name of this machine",
    )
    pod_uid: PodUidFlag = ""
    kubeconfig: Kubeconfig = None
    revision_namespace: RevisionNamespace = ""
    cdi_dir: AbsolutePath = Field(
        Path("/var/run/cdi"),
        description="the directory from which the container runtime reads CDI specs",
    )
    nvidia_cdi_hook: OptionalPath = Field(
        "", description="the path of nvidia-cdi-hook on the host; empty: no hooks"
    )
    runtime_dir: OptionalPath = Field(
        "",
        description="the state directory of containerd on the host; empty: the usual places "
        "(/run/containerd, and those of k3s, RKE2, k0s and MicroK8s)",
    )
    device_plugin_dir: AbsolutePath = Field(
        Path("/var/lib/kubelet/device-plugins"),
        description="where the kubelet has the sockets of device plugins; it is there whatever "
        "the kubelet's root directory is",
    )


class PluginSettings(DoctorSettings):
    """The kubelet plugin: besides, how often it looks, and where it answers."""

    node_name: NodeName = Field(description="the name of the Node on which this process runs")
    look_interval: float = Field(
        10.0, ge=0.1, le=3600, description="seconds between two reads of the GPUs"
    )
    reconcile_interval: float = Field(
        60.0, ge=0.1, le=86400, description="seconds between two checks of the prepared claims"
    )
    guard_interval: float = Field(
        2.0, ge=0.1, le=60, description="seconds between two checks of the memory guard"
    )
    http_address: HttpAddress = ""
    metrics_claim_names: bool = Field(
        True,
        description="whether metrics tell the names of claims and namespaces; false: sums for each "
        "GPU",
    )
    device_status: bool = Field(
        True,
        description="whether the status of prepared claims says what they were given and whether "
        "it is healthy (`status.devices`)",
    )
    kubelet_cdi: Literal["auto", "true", "false"] = Field(
        "auto",
        description="whether the kubelet hands the CDI names that device plugins give it on to "
        "the container runtime; auto: from Kubernetes 1.29 on",
    )
    log_level: LogLevel = "info"

    @property
    def node_config(self) -> NodeConfig:
        """Where the GPUs are looked for, and who else has a part in what claims get of them."""
        return replace(
            super().node_config, runtime_dir=self.runtime_dir, mps_socket=self.mps_socket
        )

    @property
    def registry(self) -> Path:
        """Where the kubelet looks for plugins."""
        return self.kubelet_dir / "plugins_registry"

    @property
    def directories(self) -> tuple[Path, ...]:
        """What we share with the kubelet and container runtimes, and where our own state is. That
        of device plugins is one of them only while the node is served by their API."""
        return (self.cdi_dir, self.plugin_dir, self.registry, self.state)


def _written(default: Any) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


def _metavar(name: str, field: FieldInfo) -> str:
    forms = {
        "sim": "NAME|FILE",
        "http_address": "HOST:PORT",
        "metrics_claim_names": "true|false",
        "device_status": "true|false",
        "kubelet_cdi": "auto|true|false",
        "extended_resource_name": "DOMAIN/NAME",
        "shared_extended_resource_name": "DOMAIN/NAME",
        "mig_extended_resource_prefix": "DOMAIN/PREFIX",
        "log_level": "LEVEL",
        "mps_shared_memory": "SIZE",
        "profile": "NAME",
        "profiles": "FILE|DIR",
    }
    word = name.rpartition("_")[2].upper() if field.annotation is not float else "SECONDS"
    return forms.get(name, word)


def _given(name: str, arguments: argparse.Namespace, environment: Mapping[str, str]) -> Any:
    flag = getattr(arguments, name, None)
    if flag is not None:
        return flag
    variable = environment.get(name.upper())
    return variable if variable or name in _EMPTY_MEANS_NONE else None


def _problem(error: Any) -> str:
    name = str(error["loc"][0])
    flag = f"--{name.replace('_', '-')} (${name.upper()})"
    if error["type"] == "missing":
        return f"{flag} is missing"
    message = error["msg"].removeprefix("Input ").removeprefix("Value error, ")
    if error["type"] == "string_pattern_mismatch":
        dns = "write lower-case letters, digits, dashes and dots, as in a DNS name"
        message = FORMS.get(name, dns)
    return f"{flag}: {error['input']!r}: {message}"
