"""What preparing and unpreparing takes, over the real socket."""

import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.claims import ClaimRef
from dra_driver.k8s.client import ApiClient
from hack.benchmark.calls import Calls
from hack.benchmark.figures import Measured, Results, median_of, percentile
from hack.benchmark.sizes import Sizes
from hack.benchmark.stage import Stage
from hack.benchmark.usage import rss_mib

GPUS = 8
_FOR_MEMORY = 40  # claims served before memory is looked at
_WARM = 8
_SETTLE_SECONDS = 2.0
_SHARE = "10Gi"


@dataclass(slots=True)
class _Times:
    """Seconds, as they are measured."""

    prepare: list[float] = field(default_factory=list)
    share: list[float] = field(default_factory=list)
    eight_gpus: list[float] = field(default_factory=list)
    unprepare: list[float] = field(default_factory=list)
    eight: list[float] = field(default_factory=list)
    empty: list[float] = field(default_factory=list)
    eight_empty: list[float] = field(default_factory=list)
    get: list[float] = field(default_factory=list)
    new_file: list[float] = field(default_factory=list)


def measure(stage: Stage, sizes: Sizes) -> Results:
    """One claim after another and eight at once, in turns; memory on the way."""
    times = _Times()
    with stage.plugin() as calls, closing(_as_plugin(stage)) as api:
        warm = _Times()
        _one_by_one(calls, stage.claims.on(_devices(_FOR_MEMORY)), warm)
        time.sleep(_SETTLE_SECONDS)
        memory = rss_mib(stage.pid)
        own: list[float] = []
        for _ in range(sizes.rounds):
            refs = stage.claims.on(_devices(sizes.singles))
            shares = stage.claims.on(_devices(sizes.singles), memory=_SHARE)
            eight_gpus = stage.claims.on_several([_devices(GPUS)] * sizes.singles)
            eights = stage.claims.on(_devices(GPUS * sizes.bursts))
            before = stage.served("prepare")
            for ref in refs:
                _one_by_one(calls, [ref], times)
                _ways(api, stage.claims.path(ref), calls, times)
            own.append(_mean_ms(before, stage.served("prepare")))
            for share, eight in zip(shares, eight_gpus, strict=True):
                times.share.append(calls.prepare(share))
                calls.unprepare(share)
                times.eight_gpus.append(calls.prepare(eight))
                calls.unprepare(eight)
            _eight_at_once(calls, eights, times)
        times.new_file += _new_files(stage.driver.plugin_dir, sizes.singles)
    stage.claims.delete()
    return _results(times, percentile(own, 0.5), memory)


def measure_held(stage: Stage, sizes: Sizes, cdi_dir: Path) -> Results:
    """The same claims with none held and with many, in turns.

    In a CDI directory of its own: for every change there the node's containerd reads all of the
    specs again, which takes a core for a while and is measured apart (``containerd``).
    """
    none, many = _Times(), _Times()
    # Nor is anything written to the status of claims: that goes on for a while after each change.
    with stage.plugin(cdi_dir=str(cdi_dir), device_status="false") as calls:
        _one_by_one(calls, stage.claims.on(_devices(_WARM)), _Times())
        for _ in range(sizes.held_rounds):
            held_claims = stage.claims.on(_devices(sizes.held), admin=True)
            before, meanwhile, after = (stage.claims.on(_devices(sizes.singles)) for _ in range(3))
            _settled(calls, before, none)
            for ref in held_claims:
                calls.prepare(ref)
            _settled(calls, meanwhile, many)
            for ref in held_claims:
                calls.unprepare(ref)
            _settled(calls, after, none)
            stage.claims.delete()
    return {
        "prepare_none_held_p50_ms": median_of(none.prepare),
        f"prepare_{sizes.held}_held_p50_ms": median_of(many.prepare),
    }


def _as_plugin(stage: Stage) -> ApiClient:
    """With the plugin's rights, which are written down when it starts."""
    return ApiClient(load_kubeconfig(stage.driver.kubeconfig))


def _mean_ms(before: tuple[float, float], after: tuple[float, float]) -> float:
    return (after[0] - before[0]) / (after[1] - before[1]) * 1000


def _devices(number: int) -> list[str]:
    return [f"gpu-{index % GPUS}" for index in range(number)]


def _one_by_one(calls: Calls, refs: Sequence[ClaimRef], times: _Times) -> None:
    for ref in refs:
        times.prepare.append(calls.prepare(ref))
        times.unprepare.append(calls.unprepare(ref))


def _settled(calls: Calls, refs: Sequence[ClaimRef], times: _Times) -> None:
    """One by one, on a machine that had time to end what came before."""
    time.sleep(_SETTLE_SECONDS)
    _one_by_one(calls, refs, times)


def _eight_at_once(calls: Calls, refs: Sequence[ClaimRef], times: _Times) -> None:
    for first in range(0, len(refs), GPUS):
        eight = refs[first : first + GPUS]
        times.eight_empty.append(calls.empty(GPUS))
        times.eight.append(calls.prepare(*eight))
        calls.unprepare(*eight)


def _ways(api: ApiClient, claim_path: str, calls: Calls, times: _Times) -> None:
    """What the ways alone take: an empty call, and the claim's GET."""
    times.empty.append(calls.empty())
    begun = time.perf_counter()
    api.get(claim_path)
    times.get.append(time.perf_counter() - begun)


def _new_files(directory: Path, number: int) -> list[float]:
    """The seconds that each of so many new files takes.

    On some disks that is longer than the rest of a prepare: ext4 without a journal looks at each
    file that was removed in the last minutes, and each claim of a benchmark leaves three of those.
    """
    seconds = []
    with tempfile.TemporaryDirectory(dir=directory) as place:
        for index in range(number):
            begun = time.perf_counter()
            Path(place, str(index)).touch()
            seconds.append(time.perf_counter() - begun)
    return seconds


def _results(times: _Times, own_ms: float, memory: dict[str, float]) -> Results:
    where = f"mean inside the plugin {own_ms:.2g} with the GET"
    parts = ", ".join(f"{name} {mib:.1f}" for name, mib in memory.items() if name != "all")
    return {
        "empty_call_p50_ms": median_of(times.empty),
        "claim_get_p50_ms": median_of(times.get),
        "new_file_p50_ms": median_of(times.new_file),
        "prepare_p50_ms": median_of(times.prepare, where),
        "prepare_p95_ms": Measured(
            percentile(times.prepare, 0.95) * 1000,
            f"largest {max(times.prepare) * 1000:.3g}",
            len(times.prepare),
        ),
        "share_prepare_p50_ms": median_of(
            times.share, f"p95 {percentile(times.share, 0.95) * 1000:.3g}"
        ),
        "prepare_eight_at_once_p50_ms": median_of(
            times.eight,
            f"p95 {percentile(times.eight, 0.95) * 1000:.3g}; "
            f"eight empty calls {percentile(times.eight_empty, 0.5) * 1000:.2g}",
        ),
        "prepare_eight_gpus_p50_ms": median_of(
            times.eight_gpus, f"p95 {percentile(times.eight_gpus, 0.95) * 1000:.3g}"
        ),
        "unprepare_p50_ms": median_of(
            times.unprepare, f"p95 {percentile(times.unprepare, 0.95) * 1000:.3g}"
        ),
        "rss_mib": Measured(memory["all"], parts, 1),
    }
