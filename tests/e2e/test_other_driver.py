"""From another driver of the same name to this one and back, with pods of both on the node."""

import time

import pytest
import yaml

from api.names import DRIVER
from dra_driver.k8s.claims import PreparedDevice
from dra_driver.kubeletplugin.serve.services import DraService
from tests.e2e.kube import wait
from tests.e2e.manifests import pod, template
from tests.fakes.claimdriver import Counted, Running

THEIRS = "00000000-0000-4000-8000-00000000000c"
SHOW = "echo driver=$GPU_OF; sleep 3600"


class OtherDriver:
    """Stands in for NVIDIA's DRA driver: it registers under the same name, publishes the same GPUs
    and names its CDI files and devices alike."""

    def __init__(self, cluster, kube):
        self.cluster, self.kube = cluster, kube
        self.plugin = Running(
            cluster.kubelet_dir, DraService(self, Counted()), THEIRS, driver=DRIVER
        )

    def prepare(self, ref):
        claim = self.kube.get("ResourceClaim", ref.name, ref.namespace)
        (result,) = claim["status"]["allocation"]["devices"]["results"]
        name = f"{ref.uid}-{result['device']}"
        spec = {
            "cdiVersion": "0.7.0",
            "kind": f"k8s.{DRIVER}/claim",
            "devices": [{"name": name, "containerEdits": {"env": ["GPU_OF=other"]}}],
        }
        self.file(ref.uid).write_text(yaml.safe_dump(spec))
        ids = (f"k8s.{DRIVER}/claim={name}",)
        return [PreparedDevice((result["request"],), result["pool"], result["device"], ids)]

    def unprepare(self, ref):
        self.file(ref.uid).unlink(missing_ok=True)

    def file(self, uid):
        return self.cluster.cdi_dir / f"k8s.{DRIVER}-claim_{uid}.yaml"

    def files(self):
        return list(self.cluster.cdi_dir.glob(f"k8s.{DRIVER}-claim_*.yaml"))

    def publish(self):
        """In place of the slices that are there, as drivers do, once the kubelet knows it."""
        wait("the kubelet to know it", lambda: self.plugin.plugin.registered)
        node = self.cluster.node_name
        for document in self.kube.slices():
            self.kube.delete("ResourceSlice", document["metadata"]["name"])
        attributes = {"type": {"string": "gpu"}}
        devices = [{"name": f"gpu-{minor}", "attributes": attributes} for minor in range(8)]
        spec = {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": devices,
        }
        metadata = {"name": f"other-{time.time_ns()}"}
        document = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice"}
        self.kube.apply({**document, "metadata": metadata, "spec": spec})


def device_of(kube, name):
    (status,) = kube.get("Pod", name)["status"]["resourceClaimStatuses"]
    claim = kube.get("ResourceClaim", status["resourceClaimName"])
    (result,) = claim["status"]["allocation"]["devices"]["results"]
    return result["device"]


def ends(kube, name):
    kube.delete("Pod", name)
    wait(f"{name} to end", lambda: kube.find("Pod", name) is None, 30)


@pytest.fixture
def other(cluster, kube):
    kube.apply(template("one"))
    return OtherDriver(cluster, kube)


def test_pods_of_another_driver_run_on_and_end_under_this_one(cluster, kube, driver, other):
    driver.stop()
    with other.plugin:
        other.publish()
        kube.apply(pod("of-other", SHOW, template="one"))
        kube.wait_pod("of-other", "Running")
        wait("what it was given", lambda: "driver=other" in kube.logs("of-other"))
        driver.start(ready=False)  # both serve the node for a moment
        wait("it to be said", lambda: "another driver of the name" in driver.ask("/readyz")[1])
    driver.wait_ready()

    kube.apply(pod("of-this", SHOW, template="one"))
    kube.wait_pod("of-this", "Running")
    assert kube.phase("of-other") == "Running"
    assert device_of(kube, "of-this") != device_of(kube, "of-other")
    ends(kube, "of-other")
    (leftover,) = other.files()
    assert leftover.name in driver.command("doctor", f"--cdi-dir={cluster.cdi_dir}").stdout
    leftover.unlink()


def test_pods_of_this_driver_run_on_and_end_under_another_one(kube, driver, other):
    kube.apply(pod("of-this", SHOW, template="one"))
    kube.wait_pod("of-this", "Running")
    with other.plugin:
        driver.stop()
        other.publish()
        kube.apply(pod("of-other", SHOW, template="one"))
        kube.wait_pod("of-other", "Running")
        assert kube.phase("of-this") == "Running"
        ends(kube, "of-this")
        ends(kube, "of-other")
        assert other.files() == []
    driver.start()  # it takes back what it still has on record, as the fixture sees
