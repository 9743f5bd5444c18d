"""Many pods at once on eight GPUs: all of them run in the end."""

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

    def ended():
        return {
            p["metadata"]["name"]
            for p in kube.all("Pod")
            if p["status"].get("phase") == "Succeeded"
        }

    wait("all pods to have run", lambda: ended() >= set(names), 400, 0.5)

    record_property("seconds for 100 pods on 8 GPUs", round(time.monotonic() - begun))
    assert {line.split()[1] for line in kube.logs(names[0]).splitlines()} == {"0:"}
