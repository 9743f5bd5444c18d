"""Many pods at once on eight GPUs: all of them run in the end."""

import re
import time

import pytest

from tests.e2e.kube import wait
from tests.e2e.manifests import pod, template


@pytest.mark.point(110)
@pytest.mark.timeout(600)
def test_a_hundred_pods_created_at_once_on_eight_gpus_all_run(kube, driver, record_property):
    kube.apply(template("one"))
    names = [f"burst-{n:03}" for n in range(100)]
    begun = time.monotonic()
    for name in names:
        kube.apply(pod(name, "nvidia-smi -L", template="one"))

    unfinished = lambda: kube.all("Pod", fieldSelector="status.phase!=Succeeded")  # noqa: E731
    wait("all pods to have run", lambda: not unfinished(), 400, 0.5)
    assert {p["metadata"]["name"] for p in kube.all("Pod")} == set(names)
    _, metrics = driver.ask("/metrics")
    served, within = prepares(metrics, "+Inf"), prepares(metrics, "32.0")
    assert within == served >= len(names), "a prepare took more than 32 s of the kubelet's 45"

    record_property("seconds for 100 pods on 8 GPUs", round(time.monotonic() - begun))
    assert {line.split()[1] for line in kube.logs(names[0]).splitlines()} == {"0:"}


def prepares(metrics: str, bound: str) -> float:
    """How many claims were prepared within *bound* seconds."""
    buckets = re.findall(r'_bucket\{le="([^"]+)",operation="prepare",outcome="ok"\} (\S+)', metrics)
    return float(dict(buckets)[bound])
