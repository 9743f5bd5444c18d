"""From a pod's creation to the first instruction of its container, with a claim and without."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from hack.benchmark.claims import NAMESPACE
from hack.benchmark.errors import BenchError
from hack.benchmark.figures import Measured, Results, median_of, percentile
from hack.benchmark.stage import Stage
from tests.e2e.kube import wait
from tests.e2e.manifests import GLIBC, claim, container, fraction, pod_of, template

Document: TypeAlias = dict[str, Any]

_NAME = "bench"
_CLAIM: Mapping[str, str] = {"resourceClaimName": _NAME}
_TEMPLATE: Mapping[str, str] = {"resourceClaimTemplateName": _NAME}
_SHARE: Mapping[str, str] = {"resourceClaimTemplateName": f"{_NAME}-share"}
_NONE: Mapping[str, str] = {}
_AS_USERS_HAVE_THEM: Mapping[str, bool] = {
    "hostNetwork": False,
    "automountServiceAccountToken": True,
}
KINDS = {
    "pod_start_ms": _NONE,
    "pod_start_with_claim_ms": _TEMPLATE,
    "pod_start_with_ready_claim_ms": _CLAIM,
    "share_pod_start_ms": _SHARE,
}


def measure(stage: Stage, number: int) -> Results:
    """*number* pods of each kind, in turns."""
    if stage.cluster.mode != "full":
        why = Measured(None, f"no containers here: {stage.cluster.why}")
        return dict.fromkeys(KINDS, why)
    samples: dict[str, list[float]] = {name: [] for name in KINDS}
    with stage.plugin():
        stage.kube.apply(template(_NAME), NAMESPACE)
        stage.kube.apply(template(f"{_NAME}-share", fraction("10Gi")), NAMESPACE)
        for source in KINDS.values():
            _start(stage, source)  # the first of a kind warms caches
        for turn in range(number):
            for name in in_turn(turn, list(KINDS)):
                samples[name].append(_start(stage, KINDS[name]))
        for name in (_NAME, f"{_NAME}-share"):
            stage.kube.delete("ResourceClaimTemplate", name, NAMESPACE)
    return {name: start_result(seconds) for name, seconds in samples.items()}


def start_result(seconds: Sequence[float]) -> Measured:
    low, high = (percentile(seconds, share) * 1000 for share in (0.25, 0.75))
    return median_of(seconds, f"half of them {low:.0f} to {high:.0f}")


def in_turn(turn: int, names: list[str]) -> list[str]:
    """Another one is first each time."""
    first = turn % len(names)
    return names[first:] + names[:first]


def _start(stage: Stage, source: Mapping[str, str]) -> float:
    """One pod, from before it to after it: the seconds to its first instruction."""
    if source is _CLAIM:
        stage.kube.apply(claim(_NAME), NAMESPACE)
    claims = [{"name": "gpu", **source}] if source else []
    uses = ({"name": "gpu"},) if source else ()
    seconds = start_of(stage, container("", uses=uses), claims)
    if source is _CLAIM:
        stage.kube.delete("ResourceClaim", _NAME, NAMESPACE)
    wait("the pod's claim to go", lambda: not stage.kube.all("ResourceClaim", NAMESPACE))
    return seconds


def start_of(stage: Stage, main: Document, claims: list[Document]) -> float:
    """The same for a pod with that container and *claims*."""
    # A builtin of the shell: its first instruction, with no process to start before it.
    main |= {"image": GLIBC, "command": ["bash", "-c", "echo $EPOCHREALTIME"]}
    created = time.time()
    stage.kube.apply(pod_of(_NAME, [main], claims, **_AS_USERS_HAVE_THEM), NAMESPACE)
    stage.kube.wait_pod(_NAME, "Succeeded", "Failed", namespace=NAMESPACE, seconds=120)
    output = stage.kube.logs(_NAME, namespace=NAMESPACE).strip()
    stage.kube.delete("Pod", _NAME, NAMESPACE)
    stage.kube.wait_gone("Pod", _NAME, NAMESPACE)
    try:
        return float(output) - created
    except ValueError as e:
        raise BenchError(f"the container did not say when it began: {output!r}") from e
