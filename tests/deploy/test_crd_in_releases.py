"""What becomes of the CRD of NodeProfiles when releases of the chart come and go."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.client import ApiClient
from hack.testbed.cluster import Cluster
from tests.deploy.chart import CRD_TEMPLATE, change, chart_in_group, helm
from tests.deploy.policies import is_there, remove
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]  # helm is built on first use

# Names of their own, so that a driver on the same cluster is not disturbed.
GROUP = "releases.test"
SPACE = "crd-releases"
FIRST, SECOND = "first", "second"
DEFINITION = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/nodeprofiles.{GROUP}"
PROFILES = f"/apis/{GROUP}/v1beta1/nodeprofiles"
OPTIONS = (
    *("--set", "nodeSelector.none=here,image.pullPolicy=Never"),
    *("--set", "mps.enabled=false,extendedResourceName=,sharedExtendedResourceName="),
    *("--set-json", "mig.profiles=[]"),
)


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    return chart_in_group(GROUP, tmp_path)


@pytest.fixture
def api(cluster: Cluster) -> Iterator[ApiClient]:
    client = ApiClient(load_kubeconfig(cluster.kubeconfig))
    client.create("/api/v1/namespaces", {"metadata": {"name": SPACE}})
    try:
        yield client
    finally:
        for release in (FIRST, SECOND):
            helm(
                *("uninstall", release, "--namespace", SPACE, "--no-hooks", "--ignore-not-found"),
                kubeconfig=str(cluster.kubeconfig),
            )
        remove(client, DEFINITION)
        client.delete(f"/api/v1/namespaces/{SPACE}")
        client.close()


@dataclass(frozen=True, slots=True)
class Releases:
    """Of *chart* on one cluster."""

    chart: Path
    kubeconfig: Path

    def helm(self, *command: str) -> str:
        answer = helm(*command, "--namespace", SPACE, kubeconfig=str(self.kubeconfig))
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    def deploy(self, release: str, verb: str = "install", *options: str) -> str:
        """The notes that helm prints."""
        driver = ("--set", f"driverName={release}.test")
        return self.helm(verb, release, str(self.chart), *OPTIONS, *driver, *options)

    def renders_crd(self, release: str) -> bool:
        return CRD_TEMPLATE in self.helm("get", "manifest", release)


def test_a_crd_belongs_to_one_release_follows_its_upgrades_and_outlives_it(
    api: ApiClient, chart: Path, cluster: Cluster
) -> None:
    releases = Releases(chart, cluster.kubeconfig)
    assert "belong to another release" not in releases.deploy(FIRST)
    eventually(lambda: is_there(api, PROFILES))
    head = {"apiVersion": f"{GROUP}/v1beta1", "kind": "NodeProfile"}
    api.create(PROFILES, {**head, "metadata": {"name": "kept"}, "spec": {"gpus": [{}]}})

    notes = releases.deploy(SECOND)
    assert f"--overwrite meta.helm.sh/release-name={SECOND}" in notes
    assert not releases.renders_crd(SECOND)
    assert releases.renders_crd(FIRST)

    change(chart / "templates" / CRD_TEMPLATE, "How the GPUs of some nodes", "Whether the GPUs")
    releases.deploy(FIRST, "upgrade")
    assert description(api) == "Whether the GPUs are offered. docs/profiles.md explains it."

    releases.deploy(FIRST, "upgrade", "--set", "controller.enabled=false")
    assert not releases.renders_crd(FIRST)
    assert is_there(api, f"{PROFILES}/kept")

    releases.helm("uninstall", FIRST, "--no-hooks")
    assert api.get(f"{PROFILES}/kept")["spec"]["gpus"] == [{}]
    assert "belong to another release" not in releases.deploy(FIRST)

    nobody: dict[str, Any] = dict.fromkeys(api.get(DEFINITION)["metadata"]["annotations"])
    api.patch(DEFINITION, {"metadata": {"annotations": nobody}})
    releases.deploy(SECOND, "upgrade", "--take-ownership", "--force-conflicts")
    assert releases.renders_crd(SECOND)


def description(api: ApiClient) -> Any:
    [version] = api.get(DEFINITION)["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]["description"]
