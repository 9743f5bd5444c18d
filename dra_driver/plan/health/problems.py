"""The table of problems: of each what it does by default, what it means and what to do about it.

A profile changes what a problem does (``HealthRules``). The sources are named by title: NVIDIA's
*Xid Catalog* is docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, *NVML* its reference
of functions, *GPU Memory Error Management* docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dra_driver.model.health import Effect, HealthRules, Problem

KEY_PREFIX = "gpu.nvidia.com/"
MOST_REPLAYS_PER_MINUTE = 8
"""PCIe replays of a healthy GPU, as DCGM's health check counts them."""

_RESET = "reset the GPU (dra-driver health release) or reboot the node"
_SUPPORT = "reboot the node; if it happens again, have the GPU examined"


@dataclass(frozen=True, slots=True)
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
        _SUPPORT,
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
        "nothing, as long as they are few",
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
        f"NVML: NVML_FI_DEV_PCIE_REPLAY_COUNTER; more than {MOST_REPLAYS_PER_MINUTE} in a minute, "
        "as in DCGM's health check",
    ),
    Problem.UNMONITORED: ProblemEntry(
        Effect.NONE,
        False,
        "NVML reports no events of the GPU",
        "nothing, where the GPU is too old for it; the log of the plugin says more",
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


@dataclass(frozen=True, slots=True)
class XidEntry:
    """What NVIDIA says of an Xid."""

    effect: Effect
    meaning: str
    action: str


def _harmless(meaning: str, action: str = "look at the program that caused it") -> XidEntry:
    return XidEntry(Effect.NONE, meaning, action)


def _fatal(meaning: str, action: str = _RESET) -> XidEntry:
    return XidEntry(Effect.NO_SCHEDULE, meaning, action)


XIDS: Mapping[int, XidEntry] = {
    13: _harmless("an exception of the graphics engine"),
    31: _harmless("a page fault of GPU memory"),
    43: _harmless("a program made the GPU stop processing"),
    45: _harmless("work of a program was removed after another error"),
    48: _fatal("an uncorrectable ECC error"),
    63: _harmless("a row of memory is remapped", _RESET),
    68: _harmless("an exception of the video decoder"),
    79: _fatal("the GPU has fallen off the bus", "reboot the node"),
    92: _harmless("many correctable ECC errors", "nothing, if it stays rare"),
    94: _harmless("a contained memory error"),
    95: _fatal("an uncontained memory error"),
    109: _harmless("a program did not switch in time"),
    154: _harmless("the recovery action of the GPU changed", "do what the driver asks for"),
}
OTHER_XID = XidEntry(Effect.NO_SCHEDULE, "an error of the GPU or of NVIDIA's driver", _RESET)


def xid_entry(number: str) -> XidEntry:
    """What an Xid means; one that is not in the table is fatal."""
    return XIDS.get(int(number), OTHER_XID) if number.isdecimal() else OTHER_XID


def needs_recovery(action: str | None) -> bool:
    """Whether the GPU needs what the driver asks for. To recover the IMEX domain is asked for when
    another node is in trouble."""
    return action not in (None, "", "NONE", "RECOVER_IMEX_DOMAIN")


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
