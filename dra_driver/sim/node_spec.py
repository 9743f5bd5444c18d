"""What a node file says: driver, GPUs, where they sit and what is wrong with them.

::

    name: odd                     # default: the file's name; UUIDs and serial numbers follow
    driver_version: "580.95.05"
    cuda_version: "13.0"
    driver: ready                 # not-loaded, no-library
    nvidia_modprobe: works        # fails, missing
    mps: works                    # fails, dies, hangs (when it is started), missing, protocol-2
    memory_limits: dmem           # misc, off: what a driver since 615 limits cgroups with
    nvlink: nvswitch              # none, or a list of pairs of GPUs: [[0, 1], [2, 3]]
    gpus:
      - product: H100-80-SXM
        bus_id: "0000:1b:00.0"    # in quotes: YAML reads 10:20 as a number
        below: pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0
        numa_node: 0
        mig: true                 # mode at the start, and from each change of it on
        instances: [{profile: 1g.10gb, start: 0}]    # unmanaged
        processes: [{pid: 7, memory_bytes: 1024, gi: 1}]    # in that GPU instance
        virtualization: passthrough    # none, vgpu: as what the machine has the GPU
        persistence: true         # persistence mode
        mig_reset: impossible     # faults follow; each can come and go while the driver runs
        hangs: true
        fails: GPU_IS_LOST        # or by function: {nvmlDeviceGetName: TIMEOUT}
        events: [{xid: 79}]       # this and more of its health: see health/spec.py
    devices:                      # other PCI devices
      - {bus_id: "0000:19:00.0", below: ..., vendor: "0x15b3", device: "0x1021", class: "0x020700"}

``boards.yaml`` says what each product is, as NVML and the PCI bus say it.
"""

import contextlib
import difflib
import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pynvml
import yaml

from api.strict import field_path, problem_message, show_value
from dra_driver.base.errors import SettingsError
from dra_driver.base.frozen import frozen
from dra_driver.base.yaml_documents import load_document
from dra_driver.sim.documents import Document
from dra_driver.sim.health.spec import HealthFields
from dra_driver.sim.mig.geometry import BoardGeometry, board_geometry, compute_instances_fit


@frozen
class BoardSpec:
    """One product of NVIDIA. Numbers of NVML where NVML has numbers."""

    name: str
    pci_device: str  # "0x2330"
    pci_subsystem: str
    memory_bytes: int
    multiprocessors: int
    compute_capability: tuple[int, int]
    architecture: int
    brand: int
    addressing_mode: int
    nvlinks: int
    mig: bool


@cache
def board_specs() -> Mapping[str, BoardSpec]:
    """Every product that a node file can name."""
    text = resources.files(__package__).joinpath("boards.yaml").read_text()
    return {
        product: _board_spec(entry) for product, entry in yaml.load(text, yaml.CSafeLoader).items()
    }


def _board_spec(entry: Mapping[str, Any]) -> BoardSpec:
    return BoardSpec(
        name=entry["name"],
        pci_device=entry["pci_device"],
        pci_subsystem=entry["pci_subsystem"],
        memory_bytes=entry["memory_mib"] << 20,
        multiprocessors=entry["multiprocessors"],
        compute_capability=tuple(entry["compute_capability"]),
        architecture=getattr(pynvml, f"NVML_DEVICE_ARCH_{entry['architecture']}"),
        brand=getattr(pynvml, f"NVML_BRAND_{entry['brand']}"),
        addressing_mode=getattr(
            pynvml, f"NVML_DEVICE_ADDRESSING_MODE_{entry['addressing_mode'].upper()}"
        ),
        nvlinks=entry["nvlinks"],
        mig=entry["mig"],
    )


_ERRORS: Mapping[str, int] = {
    name.removeprefix("NVML_ERROR_"): getattr(pynvml, name)
    for name in dir(pynvml)
    if name.startswith("NVML_ERROR_")
}
KILLED = "KILLED"
KILLED_AFTER = "KILLED_AFTER"
_NAMESPACE = uuid.UUID("6f3b3c52-0c3e-5d0b-9d7f-6a1f5a0d9c11")  # any fixed one

BusId = Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")]
Below = Annotated[
    str,
    pydantic.Field(
        pattern=r"^pci[0-9a-f]{4}:[0-9a-f]{2}(/[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])*$"
    ),
]
Hex4 = Annotated[str, pydantic.Field(pattern=r"^0x[0-9a-f]{4}$")]


class SimulatedProcess(Document):
    """A process that uses a GPU."""

    pid: int = pydantic.Field(gt=0, lt=2**22)  # Linux has no more
    memory_bytes: int | None = pydantic.Field(ge=0, lt=2**63)  # null: NVML does not tell
    kinds: tuple[Literal["compute", "graphics", "mps"], ...] = ("compute",)
    gi: int | None = pydantic.Field(default=None, ge=0, lt=2**31)  # the GPU instance that it is in


class UnmanagedInstance(Document):
    """An unmanaged GPU instance. It exists while MIG mode is on, once its place
    is free."""

    profile: str
    start: int = pydantic.Field(ge=0)
    compute: tuple[int, ...] | None = None  # slices of each compute instance; None: one fills it


class SimulatedGpu(HealthFields):
    """A GPU, where it sits, and what is wrong with it."""

    product: str
    bus_id: BusId
    below: Below = "pci0000:00"
    numa_node: int = pydantic.Field(default=-1, ge=-1, lt=2**31)  # -1: the kernel does not know
    minor: int | None = pydantic.Field(default=None, ge=0, lt=2**20)  # None: its place in the file
    uuid: str | None = None  # None: follows from node and bus id
    processes: tuple[SimulatedProcess, ...] = ()

    present: bool = True  # false: pulled out
    driver: Literal["nvidia", "vfio-pci", "nouveau", "none"] = "nvidia"
    device_nodes: bool = True  # false: nobody made /dev/nvidiaN yet
    mig: bool = False
    instances: tuple[UnmanagedInstance, ...] = ()
    virtualization: Literal["none", "passthrough", "vgpu"] = "none"
    persistence: bool = False
    mig_reset: Literal["works", "impossible"] = "works"
    hangs: bool = False  # calls for it return only when this is false again
    # Function, "compute-policy", or "*" for all -> NVML error. KILLED: whoever calls it dies before
    # anything was done, and KILLED_AFTER, where it changes partitions, when that was done.
    fails: Mapping[str, str] = {}

    @pydantic.field_validator("fails", mode="before")
    @classmethod
    def _fails_in_short(cls, fails: Any) -> Any:
        return {"*": fails} if isinstance(fails, str) else fails

    @pydantic.field_validator("fails")
    @classmethod
    def _known_errors(cls, fails: Mapping[str, str]) -> Mapping[str, str]:
        names = {*_ERRORS, KILLED, KILLED_AFTER}
        unknown = sorted({name for name in fails.values() if _error_key(name) not in names})
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: no NVML error; one is GPU_IS_LOST")
        return fails

    @pydantic.field_validator("product")
    @classmethod
    def _known_product(cls, product: str) -> str:
        if product not in board_specs():
            raise ValueError(
                f"no product {product!r}; there are {', '.join(sorted(board_specs()))}"
            )
        return product

    @pydantic.model_validator(mode="after")
    def _mig_where_there_is_mig(self) -> "SimulatedGpu":
        if self.mig and not self.board.mig:
            raise ValueError(f"mig: {self.product} has no MIG mode")
        for instance in self.instances:
            profile = self.geometry.named(instance.profile) if self.geometry else None
            if profile is None or instance.start not in [
                place.start for place in profile.placements
            ]:
                raise ValueError(
                    f"instances: {self.product} has no {instance.profile} at {instance.start}"
                )
            if instance.compute and not compute_instances_fit(profile.slices, instance.compute):
                raise ValueError(
                    f"instances: {list(instance.compute)} do not fit into {instance.profile}"
                )
        return self

    @property
    def geometry(self) -> BoardGeometry | None:
        """How it can be partitioned."""
        return board_geometry(self.product)

    @property
    def board(self) -> BoardSpec:
        return board_specs()[self.product]

    @property
    def listed(self) -> bool:
        """Whether NVML lists it, once it is started."""
        return self.present and self.driver == "nvidia"

    def error(self, function: str) -> int | None:
        """The NVML error with which *function* fails on it."""
        return _ERRORS.get(_error_key(self._fault(function)))

    def kills(self, function: str, when: str) -> bool:
        """Whether who calls *function* dies: *when* it is called, or has done its work."""
        return self._fault(function) == when

    def _fault(self, function: str) -> str:
        return self.fails.get(function) or self.fails.get("*") or ""


class PciDevice(Document):
    """Something else on the PCI bus: a network card, a disk."""

    bus_id: BusId
    below: Below = "pci0000:00"
    numa_node: int = pydantic.Field(default=-1, ge=-1, lt=2**31)
    vendor: Hex4
    device: Hex4
    kind: str = pydantic.Field(alias="class", pattern=r"^0x[0-9a-f]{6}$")


class SimulatedNode(Document):
    """A node with its GPUs, at one moment."""

    name: str = pydantic.Field(pattern=r"^[A-Za-z0-9._-]+$")
    driver_version: str = pydantic.Field(
        default="580.95.05", pattern=r"^[0-9]{1,4}\.[0-9]{1,4}(\.[0-9]{1,4})?$"
    )
    cuda_version: str = pydantic.Field(default="13.0", pattern=r"^[0-9]{1,4}\.[0-9]$")
    driver: Literal["ready", "not-loaded", "no-library"] = "ready"
    nvidia_modprobe: Literal["works", "fails", "missing"] = "works"
    mps: Literal["works", "fails", "dies", "hangs", "missing", "protocol-2"] = "works"
    memory_limits: Literal["dmem", "misc", "off"] = "dmem"  # before 615: off
    nvlink: Literal["nvswitch", "none"] | tuple[tuple[int, int], ...] = "none"
    gpus: tuple[SimulatedGpu, ...] = ()
    devices: tuple[PciDevice, ...] = ()
    _file: str = pydantic.PrivateAttr(default="")

    @pydantic.field_validator("gpus")
    @classmethod
    def _complete(cls, gpus: tuple[SimulatedGpu, ...], info: pydantic.ValidationInfo) -> Any:
        """With minor numbers and UUIDs, so that they stay what they are wherever a GPU is passed
        on.
        """
        name = info.data.get("name", "")
        return tuple(
            gpu.model_copy(
                update={
                    "minor": place if gpu.minor is None else gpu.minor,
                    "uuid": gpu.uuid or f"GPU-{uuid.uuid5(_NAMESPACE, f'{name}/{gpu.bus_id}')}",
                }
            )
            for place, gpu in enumerate(gpus)
        )

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> "SimulatedNode":
        ids = [gpu.bus_id for gpu in self.gpus] + [device.bus_id for device in self.devices]
        if twice := sorted({id_ for id_ in ids if ids.count(id_) > 1}):
            raise ValueError(f"bus_id: {', '.join(twice)} is there more than once")
        for pair in self.nvlink if isinstance(self.nvlink, tuple) else ():
            if not all(0 <= place < len(self.gpus) for place in pair) or pair[0] == pair[1]:
                raise ValueError(f"nvlink: {list(pair)} are not two of the {len(self.gpus)} GPUs")
        return self

    @property
    def file(self) -> str:
        """The node file."""
        return self._file

    @property
    def limits_memory(self) -> bool:
        """Whether the driver limits memory by cgroup: from 615 on, and not switched off."""
        return self.major_version >= 615 and self.memory_limits != "off"

    @property
    def major_version(self) -> int:
        return int(self.driver_version.split(".")[0])

    def on_bus(self, bus_id: str) -> SimulatedGpu | None:
        """The GPU at *bus_id*, if one is there now."""
        return next((gpu for gpu in self.gpus if gpu.bus_id == bus_id and gpu.present), None)

    def nvlink_peers(self, bus_id: str) -> tuple[str, ...]:
        """The GPUs to which the one at *bus_id* is bridged and that are there now."""
        pairs = self.nvlink if isinstance(self.nvlink, tuple) else ()
        ids = [(self.gpus[a].bus_id, self.gpus[b].bus_id) for a, b in pairs]
        peers = {b for a, b in ids if a == bus_id} | {a for a, b in ids if b == bus_id}
        return tuple(sorted(peer for peer in peers if self.on_bus(peer)))


def serial(gpu: SimulatedGpu) -> str:
    """Thirteen digits, as on real boards, and always the same for one UUID."""
    return f"16{int(hashlib.sha256(str(gpu.uuid).encode()).hexdigest(), 16) % 10**11:011}"


def bundled_nodes() -> tuple[str, ...]:
    """The names that ``--sim NAME`` knows."""
    files = resources.files(__package__).joinpath("nodes").iterdir()
    return tuple(sorted(Path(file.name).stem for file in files if file.name.endswith(".yaml")))


def node_file(name: str) -> Path:
    """The file of ``--sim NAME|FILE``. SettingsError: neither a known name nor a file."""
    if name in bundled_nodes():
        return Path(str(resources.files(__package__).joinpath("nodes", f"{name}.yaml")))
    path = Path(name)
    with contextlib.suppress(OSError):  # a name too long for a file is none
        if path.is_file():
            return path
    if "/" in name:
        problem = "is no file" if os.path.exists(name) else "does not exist"
        raise SettingsError(f"node file {name} {problem}")
    near = difflib.get_close_matches(path.stem, bundled_nodes(), n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise SettingsError(
        f"no simulated node {name!r}{hint}: name a file, or one of {', '.join(bundled_nodes())}"
    )


def read_node(path: Path) -> SimulatedNode:
    """The node in *path*. SettingsError: every problem with it, each with its path in the file."""
    try:
        document = load_document(path.read_bytes()) or {}
    except (OSError, ValueError) as error:
        raise SettingsError(f"node file {path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise SettingsError(f"node file {path}: expected fields such as driver_version and gpus")
    try:
        # As JSON, because there a list can be strict and still become a tuple.
        text = json.dumps({"name": path.stem, **document}, default=str)
    except (ValueError, TypeError, RecursionError) as error:
        raise SettingsError(f"node file {path} cannot be read: {error}") from error
    try:
        node = SimulatedNode.model_validate_json(text)
        node._file = str(path.absolute())
        return node
    except pydantic.ValidationError as error:
        problems = sorted({_problem(problem) for problem in error.errors()})
        raise SettingsError(f"node file {path}: {'; '.join(problems)}") from error


def _problem(error: Any) -> str:
    place, field = field_path("", *error["loc"]), error["loc"][-1] if error["loc"] else ""
    if error["type"] == "value_error":
        message = str(error["ctx"]["error"])
        return f"{place}: {message}" if place else message
    if place.startswith("nvlink."):
        return "nvlink: write nvswitch, none, or a list of pairs of GPUs: [[0, 1], [2, 3]]"
    if error["type"] == "string_pattern_mismatch":
        form = _FORMS.get(field, "letters, digits, dashes and dots")
        return f"{place}: {show_value(error['input'])} is not of this form: {form}"
    return problem_message(error, SimulatedNode)


_FORMS = {
    "bus_id": '"0000:1b:00.0"',
    "below": "pci0000:00/0000:00:01.0",
    "driver_version": '"580.95.05"',
    "cuda_version": '"13.0"',
    **dict.fromkeys(("vendor", "device"), '"0x15b3"'),
    "class": '"0x020700"',
}


def _error_key(name: str) -> str:
    return name.removeprefix("NVML_ERROR_")
