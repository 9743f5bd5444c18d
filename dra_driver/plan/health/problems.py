"""The table of problems: of each what it does by default, what it means and what to do about it.

A profile changes what a problem does (``HealthRules``). The sources are named by title:

* *Xid Catalog*: docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html
* *NVML*: docs.nvidia.com/deploy/nvml-api
* *GPU Memory Error Management*: docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt
* *DCGM*: its health check, modules/health and its hardware limits, github.com/NVIDIA/DCGM
"""

from collections.abc import Mapping

from dra_driver.base.frozen import frozen
from dra_driver.model.health import Effect, HealthRules, Problem

KEY_PREFIX = "gpu.nvidia.com/"
MOST_REPLAYS_PER_MINUTE = 8
"""PCIe replays of a healthy GPU (DCGM)."""

_RESET = "reset the GPU (dra-driver health release) or reboot the node"
_REBOOT = "reboot the node; if it happens again, have the GPU examined"
_EXAMINE = "if it happens again, have the GPU examined"

NO_ACTION = "NONE"
"""The recovery action of a GPU that needs none (NVML_GPU_RECOVERY_ACTION_NONE)."""

RECOVERY_ACTIONS: Mapping[str, str] = {
    "GPU_RESET": _RESET,
    "NODE_REBOOT": "reboot the node",
    "DRAIN_P2P": "end the programs on GPUs that are connected with this one; the driver then says "
    "what else it needs",
    "DRAIN_AND_RESET": "end the programs on GPUs that are connected with this one, and reset the "
    "GPU (dra-driver health release)",
    "RECOVER_IMEX_DOMAIN": "ignore it on this node: another node of the IMEX domain is in trouble",
    "BUS_RESET": "reset the PCIe bus of the GPU, or reboot the node",
    "SYSTEM_REBOOT": "reboot the node",
}
"""What to do about each action that the driver asks for (NVML: nvmlDeviceGpuRecoveryAction_t; GPU
Memory Error Management, error recovery and response flags)."""


@frozen
class ProblemEntry:
    """A line of the table.

    *lasts*: it was told by an event, and no look says when it is over. A reset, a reboot or an
    administrator ends it. Every other problem ends when looks say so.
    """

    effect: Effect
    lasts: bool
    meaning: str
    action: str
    source: str


PROBLEMS: Mapping[Problem, ProblemEntry] = {
    Problem.LOST: ProblemEntry(
        Effect.NO_SCHEDULE,
        False,
        "the GPU does not answer",
        _REBOOT,
        "NVML: NVML_ERROR_GPU_IS_LOST; a GPU that was there and cannot be read",
    ),
    Problem.XID: ProblemEntry(
        Effect.NO_SCHEDULE,
        True,
        "NVIDIA's driver reported an error",
        _RESET,
        "NVML: nvmlEventTypeXidCriticalError; what each number means: Xid Catalog",
    ),
    Problem.UNCORRECTABLE_ECC: ProblemEntry(
        Effect.NO_SCHEDULE,
        True,
        "memory of the GPU had an error that ECC could not correct",
        _RESET,
        "NVML: nvmlEventTypeDoubleBitEccError, NVML_FI_DEV_ECC_DBE_VOL_TOTAL",
    ),
    Problem.CORRECTABLE_ECC: ProblemEntry(
        Effect.NONE,
        False,
        "ECC corrects errors of the GPU's memory",
        "ignore it, as long as they are few",
        "NVML: nvmlEventTypeSingleBitEccError, NVML_FI_DEV_ECC_SBE_VOL_TOTAL",
    ),
    Problem.REMAP_FAILED: ProblemEntry(
        Effect.NO_SCHEDULE,
        False,
        "the GPU could not replace a bad row of its memory",
        "have the GPU replaced",
        "NVML: nvmlDeviceGetRemappedRows; GPU Memory Error Management, row remapping",
    ),
    Problem.REMAP_PENDING: ProblemEntry(
        Effect.NONE,
        False,
        "a bad row of the GPU's memory is replaced at the next reset",
        f"when no claim needs it, {_RESET}",
        "NVML: nvmlDeviceGetRemappedRows; GPU Memory Error Management, row remapping",
    ),
    Problem.RECOVERY_ACTION: ProblemEntry(
        Effect.NO_SCHEDULE,
        False,
        "NVIDIA's driver asks for a recovery action",
        "do what it asks for",
        "NVML: NVML_FI_DEV_GET_GPU_RECOVERY_ACTION; Xid Catalog, Xid 154",
    ),
    Problem.THERMAL: ProblemEntry(
        Effect.NONE,
        False,
        "the GPU is slowed down because it is hot",
        "look at the cooling of the node",
        "NVML: nvmlDeviceGetCurrentClocksEventReasons, HwThermalSlowdown and SwThermalSlowdown",
    ),
    Problem.POWER_BRAKE: ProblemEntry(
        Effect.NONE,
        False,
        "the GPU is slowed down because the power supply of the node asks for it",
        "look at the power supply of the node",
        "NVML: nvmlDeviceGetCurrentClocksEventReasons, HwPowerBrakeSlowdown",
    ),
    Problem.NVLINK: ProblemEntry(
        Effect.NONE,
        False,
        "fewer NVLink connections are active than before",
        "look at nvidia-smi nvlink --status, and at the fabric manager",
        "NVML: nvmlDeviceGetNvLinkState",
    ),
    Problem.FABRIC: ProblemEntry(
        Effect.NONE,
        False,
        "the GPU has no healthy place in the NVLink fabric",
        "look at the fabric manager of the node",
        "NVML: nvmlDeviceGetGpuFabricInfoV",
    ),
    Problem.PCIE_REPLAYS: ProblemEntry(
        Effect.NONE,
        False,
        "data on the PCIe bus has to be sent again and again",
        "look at the seat of the GPU and its riser",
        "NVML: NVML_FI_DEV_PCIE_REPLAY_COUNTER; DCGM: so many replays in a minute",
    ),
    Problem.UNMONITORED: ProblemEntry(
        Effect.NONE,
        False,
        "NVML reports no events of the GPU",
        "ignore it, where the GPU is too old for events; the log of the plugin says more",
        "NVML: nvmlDeviceGetSupportedEventTypes, nvmlDeviceRegisterEvents",
    ),
    Problem.RELEASED: ProblemEntry(
        Effect.NO_SCHEDULE,
        False,
        "an administrator has the driver let go of the GPU",
        "wait, or end it with dra-driver health release --end",
        "the annotation gpu.nvidia.com/release of the Node, pause labels of the GPU operator",
    ),
}


@frozen
class XidEntry:
    """What NVIDIA says of an Xid."""

    effect: Effect
    meaning: str
    action: str


_OF_PROGRAMS: Mapping[tuple[int, ...], str] = {
    (8,): "the GPU stopped the work of a program",
    (11, 25, 32): "a program sent commands that are not valid",
    (13,): "an exception of the graphics engine",
    (31,): "a page fault in memory of the GPU",
    (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)): "an error of a copy engine",
    (43,): "a program made the GPU stop its work",
    (45,): "the work of a program was removed, mostly after another error",
    (60,): "an exception of the video processor",
    (68, 83, 84, 88, 89, 96, 97, 98): "an error of a video decoder",
    (69,): "a program used the graphics engine in a way that it has not",
    (80,): "commands reached the GPU damaged",
    (82, *range(99, 106)): "an error of a JPEG engine",
    (86, 139): "an error of an optical flow engine",
    (94,): "a memory error that was contained; only programs that used that memory end",
    (109,): "a program was not switched in time",
}
"""The immediate action of the Xid Catalog is to restart the application (RESTART_APP). So it is for
43, 45 and 109 in NVIDIA's device plugin, in spite of what the catalog says."""

_INFORMATIONAL: Mapping[tuple[int, ...], str] = {
    (14, 106, 107): "a test of the driver",
    (37, 38): "an error of the driver's firmware that is of no consequence",
    (44,): "an error of the graphics engine while it switched programs",
    (63,): "a bad row of memory is replaced at the next reset, or a page is retired",
    (66, 67): "an access of the driver that is not allowed",
    (92,): "many ECC errors that were corrected",
    (93,): "the InfoROM was written often",
    (108, 137): "an access over NVLink that is not allowed, mostly of a program",
    (121,): "an error of the link to the CPU that was corrected",
    (141,): "an error on a fast path of CUDA",
    (152, 153): "an error of a DLA",
    (154,): "the driver asks for another recovery action than before",
    (157,): "a part of the GPU could not be retired",
    (160, 161): "a channel of the memory is retired",
    (162, 163, 164, 165): "a change of power smoothing",
}
"""The immediate action of the Xid Catalog is to do nothing (IGNORE), or it names none. What 154
tells is a problem of its own (``Problem.RECOVERY_ACTION``)."""

_FATAL: Mapping[int, tuple[str, str]] = {
    46: ("the GPU stopped its work", _RESET),
    48: ("an ECC error that could not be corrected", _RESET),
    54: ("a power cable of the GPU is not connected", "look at the power cables of the GPU"),
    62: ("a micro-controller of the GPU halted", _RESET),
    64: ("a bad row of memory could not be replaced", f"{_RESET}; {_EXAMINE}"),
    74: ("an error of NVLink", f"{_RESET}; {_EXAMINE}"),
    78: ("a vGPU could not be started", "update NVIDIA's software on the host"),
    79: ("the GPU has fallen off the bus", _REBOOT),
    95: ("a memory error that was not contained", _RESET),
    110: ("a security fault", f"{_RESET}; {_EXAMINE}"),
    119: ("the GPU's firmware (GSP) does not answer", _RESET),
    120: ("an error of the GPU's firmware (GSP)", _RESET),
    136: ("an NVLink connection could not be trained", f"{_RESET}; {_EXAMINE}"),
    140: ("an ECC error that could not be recovered", _RESET),
    142: ("an error of a video encoder", _REBOOT),
    143: ("the GPU could not be initialized", _RESET),
    **{number: ("an error of NVLink", f"{_RESET}; {_EXAMINE}") for number in range(144, 151)},
    151: ("keys could not be changed (confidential computing)", "restart the virtual machine"),
    155: ("an error of NVLink", _RESET),
    156: ("a part of the GPU is retired at the next reset", _RESET),
    158: ("the GPU did not answer in time", _RESET),
    167: ("the PCIe bus did not answer in time", _REBOOT),
    168: ("the GPU has less memory than before, because of errors", _RESET),
    169: ("a micro-controller of the GPU halted", _RESET),
    171: ("an ECC error of DRAM that could not be corrected", _RESET),
    172: ("an ECC error of SRAM that could not be corrected", _RESET),
}
"""The Xid Catalog wants more than that. A number that is nowhere here is fatal, too."""

XIDS: Mapping[int, XidEntry] = {
    **{
        number: XidEntry(Effect.NONE, meaning, "look at the program that caused it")
        for numbers, meaning in _OF_PROGRAMS.items()
        for number in numbers
    },
    **{
        number: XidEntry(Effect.NONE, meaning, "ignore it, unless it happens often")
        for numbers, meaning in _INFORMATIONAL.items()
        for number in numbers
    },
    **{number: XidEntry(Effect.NO_SCHEDULE, *words) for number, words in _FATAL.items()},
}
OTHER_XID = XidEntry(Effect.NO_SCHEDULE, "an error of the GPU or of NVIDIA's driver", _RESET)


def xid_entry(number: str) -> XidEntry:
    """What an Xid means; one that is not in the table is fatal."""
    return XIDS.get(int(number), OTHER_XID) if number.isdecimal() else OTHER_XID


def needs_recovery(action: str | None) -> bool:
    """Whether the GPU needs what the driver asks for. To recover the IMEX domain is asked for when
    another node is in trouble."""
    return action not in (None, "", NO_ACTION, "RECOVER_IMEX_DOMAIN")


def effect_of(problem: Problem, value: str, rules: HealthRules) -> Effect:
    """What follows from *problem* by *rules*.

    What they say of Xids holds for those that are fatal; of another one they have to name the
    number.
    """
    default = PROBLEMS[problem].effect
    if problem is Problem.XID:
        for number, effect in rules.xids:
            if value == str(number):
                return effect
        default = xid_entry(value).effect
    elif problem is Problem.RECOVERY_ACTION and not needs_recovery(value):
        default = Effect.NONE
    if default is Effect.NONE and problem in (Problem.XID, Problem.RECOVERY_ACTION):
        return default
    return dict(rules.effects).get(problem, default)


def taint_key(problem: Problem) -> str:
    return KEY_PREFIX + problem


def problem_of(key: str) -> Problem | None:
    """The problem that a taint of *key* is about; None: it is not one of ours."""
    word = key.removeprefix(KEY_PREFIX)
    return Problem(word) if key.startswith(KEY_PREFIX) and word in set(Problem) else None
