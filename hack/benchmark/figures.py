"""The figures, their aims, and how they are shown: pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, float]
Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing to know of the driver. *aim*: at most this, given what else was measured."""

    name: str
    says: str
    aim: Callable[[Values], float | None]
    is_least: bool = False  # the aim: at least this


@dataclass(frozen=True, slots=True)
class Measured:
    """A value, and where it comes from. Without a value, *where* says why there is none."""

    value: float | None
    where: str = ""
    samples: int = 0


Results = Mapping[str, Measured]


def at_most(limit: float) -> Callable[[Values], float | None]:
    """The same aim everywhere."""
    return lambda values: limit


def times(factor: float, *names: str) -> Callable[[Values], float | None]:
    """At most so many times another figure of this run, or several together."""
    return lambda values: (
        factor * sum(values[name] for name in names) if values.keys() >= set(names) else None
    )


def above(more: float, name: str) -> Callable[[Values], float | None]:
    """At most so much more than another figure of this run."""
    return lambda values: values[name] + more if name in values else None


def no_aim(values: Values) -> float | None:
    """Only there to compare others with."""
    return None


_RSS_MIB = 66e6 / 2**20  # 66 MB

FIGURES = (
    Figure("start_to_slices_ms", "process start to the first ResourceSlice, p50", at_most(600)),
    Figure("empty_call_p50_ms", "NodePrepareResources for no claim", no_aim),
    Figure("claim_get_p50_ms", "GET of a claim from the API server, by another process", no_aim),
    Figure(
        "new_file_p50_ms", "a new file in the plugin's directory; a prepare writes three", no_aim
    ),
    Figure(
        "prepare_p50_ms",
        "NodePrepareResources, one GPU, one by one, in turns with an empty call and a GET",
        times(1.5, "claim_get_p50_ms", "empty_call_p50_ms"),
    ),
    Figure("prepare_p95_ms", "the same, p95", at_most(8)),
    Figure(
        "share_prepare_p50_ms",
        "NodePrepareResources, a part of a GPU, one claim after another",
        times(1.5, "prepare_p50_ms"),
    ),
    Figure(
        "prepare_eight_at_once_p50_ms",
        "eight claims on eight GPUs at once, until all are answered",
        times(4, "prepare_p50_ms"),
    ),
    Figure(
        "prepare_eight_gpus_p50_ms",
        "one claim for eight GPUs, one claim after another",
        times(1.3, "prepare_p50_ms"),
    ),
    Figure(
        "prepare_none_held_p50_ms",
        "one GPU, before and after each round of the next figure",
        no_aim,
    ),
    Figure(
        "prepare_500_held_p50_ms",
        "one GPU, while 500 other claims are prepared",
        times(1.05, "prepare_none_held_p50_ms"),
    ),
    Figure(
        "containerd_cpu_ms_per_change_500_held",
        "CPU of containerd for each claim prepared or unprepared while 500 others are prepared",
        no_aim,
    ),
    Figure("mps_whole_prepare_p50_ms", "one GPU, in turns with another claim under MPS", no_aim),
    Figure(
        "mps_first_claim_ms", "the first claim under MPS on a GPU: its server starts", at_most(1000)
    ),
    Figure(
        "mps_next_claim_p50_ms",
        "another claim under MPS on that GPU",
        times(2, "mps_whole_prepare_p50_ms"),
    ),
    Figure("mps_agent_rss_mib", "resident memory of the MPS agent, idle", no_aim),
    Figure("mig_whole_prepare_p50_ms", "one GPU, in turns with a partition", no_aim),
    Figure(
        "mig_prepare_p50_ms",
        "a partition that is created for its claim, on a GPU with another one",
        times(3, "mig_whole_prepare_p50_ms"),
    ),
    Figure(
        "publish_16_mig_gpus_ms",
        "process start until all slices of sixteen MIG GPUs are there, p50",
        no_aim,
    ),
    Figure(
        "republish_16_mig_gpus_ms",
        "after a change of one of them, from the first slice written to the last, p50",
        no_aim,
    ),
    Figure("unprepare_p50_ms", "NodeUnprepareResources, one GPU", no_aim),
    Figure(
        "syscalls_per_pair",
        "system calls of the plugin to prepare and unprepare one GPU, all threads",
        at_most(120),
    ),
    Figure(
        "worst_configs_ms",
        "CPU to read and decode the costliest configurations that a claim can have",
        at_most(50),
    ),
    Figure("rss_mib", "resident memory, idle, after 40 claims", at_most(_RSS_MIB)),
    Figure("cpu_idle_percent", "of one core, slices published, kubelet connected", at_most(0.08)),
    Figure("pod_start_ms", "pod created to first instruction, no claim, p50", no_aim),
    Figure(
        "pod_start_with_claim_ms",
        "the same with one GPU, its claim made from a template",
        above(30, "pod_start_ms"),
    ),
    Figure(
        "pod_start_with_ready_claim_ms",
        "the same with a claim that exists before",
        above(30, "pod_start_ms"),
    ),
    Figure(
        "share_pod_start_ms",
        "the same with a part of a GPU, from a template, p50",
        above(30, "pod_start_ms"),
    ),
)

# Allocate has its aim of the p95 of a prepare: all pods of the node wait for it. A pod may wait for
# both calls at their aims, and as long as a prepare for the runtime to read what it is given.
DEVICE_PLUGIN_FIGURES = (
    Figure("allocate_p50_ms", "Allocate, one GPU that nobody had", at_most(8)),
    Figure(
        "prestart_p50_ms",
        "PreStartContainer, the first of a pod: reads the kubelet's checkpoint, lists the pods",
        at_most(30),
    ),
    Figure("pod_start_ms", "pod created to first instruction, no GPU, p50", no_aim),
    Figure("pod_start_with_gpu_ms", "the same with nvidia.com/gpu: 1", above(46, "pod_start_ms")),
)

FLEET_FIGURES = (
    Figure("fleet_plain_pods_per_second", "one exclusive device a GPU", no_aim),
    Figure(
        "fleet_pods_per_second",
        "pods with a whole GPU each on 200 nodes of eight, the scheduler as it comes, p50",
        times(0.95, "fleet_plain_pods_per_second"),
        is_least=True,
    ),
    Figure("fleet_unthrottled_plain_pods_per_second", "one exclusive device a GPU", no_aim),
    Figure(
        "fleet_unthrottled_pods_per_second",
        "the same without limits on requests",
        times(0.75, "fleet_unthrottled_plain_pods_per_second"),
        is_least=True,
    ),
    Figure(
        "fleet_mig_plain_pods_per_second",
        "as many pods, each with a whole GPU, and one exclusive device a GPU",
        no_aim,
    ),
    Figure(
        "fleet_mig_nvidia_shape_pods_per_second",
        "the pods of the next figure, as NVIDIA's driver publishes the fleet",
        no_aim,
    ),
    Figure(
        "fleet_mig_pods_per_second",
        "a quarter of the pods with partitions, which 20 of the nodes offer, without limits",
        times(2, "fleet_mig_nvidia_shape_pods_per_second"),
        is_least=True,
    ),
)

CONTROLLER_FIGURES = (
    Figure("controller_rss_mb", "resident memory of the controller", at_most(300)),
    Figure(
        "controller_lag_p95_ms",
        "from a change until the controller has written what follows, the slower kind of change",
        at_most(5000),
    ),
    Figure("controller_nodes", "nodes of 10 KB that it followed meanwhile", no_aim),
)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of *values* that at least *share* (0 to 1) of them do not exceed.

    >>> percentile([4, 1, 3, 2], 0.5), percentile([4, 1, 3, 2], 0.95)
    (2, 4)
    """
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def median_of(seconds: Sequence[float], where: str = "") -> Measured:
    """The median in milliseconds."""
    return Measured(percentile(seconds, 0.5) * 1000, where, len(seconds))


def table(results: Results, figures: Sequence[Figure] = FIGURES) -> str:
    """Figure, ours, aim, where the time goes. An aim that was missed has a ``!``."""
    rows = [("figure", "ours", "aim", "where it goes")]
    known = _known(results)
    for figure in figures:
        measured = results.get(figure.name, Measured(None, "not measured"))
        rows.append(
            (
                figure.name,
                _number(measured.value) + ("  !" if _missed(figure, known) else ""),
                _number(figure.aim(known)),
                "; ".join(part for part in (figure.says, measured.where) if part),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    )


def document(
    results: Results, facts: Mapping[str, Any], figures: Sequence[Figure] = FIGURES
) -> Document:
    """One JSON object: every figure by its name (null: not measured), then *facts*."""
    known = _known(results)
    values: Document = {
        figure.name: None if figure.name not in known else round(known[figure.name], 4)
        for figure in figures
    }
    aims = {figure.name: figure.aim(known) for figure in figures}
    return {
        **values,
        "aims": {name: round(aim, 4) for name, aim in aims.items() if aim is not None},
        "missed": [figure.name for figure in figures if _missed(figure, known)],
        "samples": {name: measured.samples for name, measured in results.items()},
        "where": {name: measured.where for name, measured in results.items() if measured.where},
        **facts,
    }


def _known(results: Results) -> dict[str, float]:
    return {name: result.value for name, result in results.items() if result.value is not None}


def _missed(figure: Figure, known: Values) -> bool:
    aim, value = figure.aim(known), known.get(figure.name)
    if aim is None or value is None:
        return False
    return value < aim if figure.is_least else value > aim


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
