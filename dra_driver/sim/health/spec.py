"""What a node file says of the health of a GPU.

::

    gpus:
      - product: H100-80-SXM
        bus_id: "0000:1b:00.0"
        # What happened to it, in this order; what is added is reported to those who wait for it.
        # One of xid, ecc, recovery_action and unavailable; gi and ci: in that instance. The kernel
        # log has the process of an Xid.
        events:
          - {xid: 79}
          - {xid: 31, gi: 1, ci: 0, pid: 1234, name: python}
          - {ecc: uncorrectable}               # counted besides
          - {ecc: correctable, times: 1000}
          - {recovery_action: GPU_RESET}       # NVML_GPU_RECOVERY_ACTION_*
          - {unavailable: true}
        events_supported: false                # there are none to register for
        # What is so now, until the file says otherwise or the GPU is reset.
        remap: pending                         # failed
        recovery_action: GPU_RESET
        clocks: [thermal, power-brake]         # software-thermal; power-cap, which is no fault
        nvlinks_down: 2                        # the last ones
        fabric: degraded-bandwidth             # FabricFault
        pcie_replays: 100

GPUs that do not answer are said by ``fails`` (``node_spec``).
"""

from typing import Literal

import pydantic
import pynvml

from dra_driver.sim.documents import Document

RecoveryAction = Literal[
    "NONE",
    "GPU_RESET",
    "NODE_REBOOT",
    "DRAIN_P2P",
    "DRAIN_AND_RESET",
    "RECOVER_IMEX_DOMAIN",
    "BUS_RESET",
    "SYSTEM_REBOOT",
]
ClockReason = Literal["thermal", "software-thermal", "power-brake", "power-cap"]
FabricFault = Literal[
    "not-started",
    "in-progress",
    "failed",
    "degraded-bandwidth",
    "route-recovery",
    "unhealthy-route",
    "access-timeout-recovery",
    "no-partition",
]


class SimulatedEvent(Document):
    """Something that happened to a GPU, or several times the same."""

    xid: int | None = pydantic.Field(default=None, ge=1, lt=2**31)
    ecc: Literal["correctable", "uncorrectable"] | None = None
    recovery_action: RecoveryAction | None = None
    unavailable: Literal[True] | None = None
    gi: int | None = pydantic.Field(default=None, ge=0, lt=2**31)  # None: it is of the GPU
    ci: int | None = pydantic.Field(default=None, ge=0, lt=2**31)
    pid: int | None = pydantic.Field(default=None, gt=0, lt=2**22)
    name: str = pydantic.Field(default="python", pattern=r"^[A-Za-z0-9._-]{1,15}$")
    times: int = pydantic.Field(default=1, ge=1, le=100_000)

    @pydantic.model_validator(mode="after")
    def _one_thing(self) -> "SimulatedEvent":
        kinds = (self.xid, self.ecc, self.recovery_action, self.unavailable)
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError("an event is one of xid, ecc, recovery_action, unavailable")
        if self.ci is not None and self.gi is None:
            raise ValueError("ci: name its GPU instance besides (gi)")
        if self.pid is not None and self.xid is None:
            raise ValueError("pid: the driver tells it of an xid alone")
        return self


class HealthFields(Document):
    """The part of a GPU in a node file that is about its health."""

    events: tuple[SimulatedEvent, ...] = ()
    events_supported: bool = True
    remap: Literal["none", "pending", "failed"] = "none"
    recovery_action: RecoveryAction = "NONE"
    clocks: tuple[ClockReason, ...] = ()
    nvlinks_down: int = pydantic.Field(default=0, ge=0, le=64)
    fabric: Literal["completed"] | FabricFault = "completed"
    pcie_replays: int = pydantic.Field(default=0, ge=0, lt=2**31)


def events_after(
    before: tuple[SimulatedEvent, ...], now: tuple[SimulatedEvent, ...]
) -> tuple[SimulatedEvent, ...]:
    """What *now* has besides what both begin with."""
    return now[len(common_events(before, now)) :]


def common_events(
    before: tuple[SimulatedEvent, ...], now: tuple[SimulatedEvent, ...]
) -> tuple[SimulatedEvent, ...]:
    """What both lists begin with."""
    same = 0
    while same < min(len(before), len(now)) and before[same] == now[same]:
        same += 1
    return now[:same]


def recovery_action_number(action: RecoveryAction) -> int:
    """``NVML_GPU_RECOVERY_ACTION_*``."""
    return int(getattr(pynvml, f"NVML_GPU_RECOVERY_ACTION_{action}"))
