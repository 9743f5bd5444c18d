"""What becomes of the CRD of NodeProfiles when releases of the chart come and go."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.names import CONFIG_GROUP
from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.client import ApiClient
from hack.testbed.cluster import Cluster
from tests.deploy.chart import CHART, helm
from tests.deploy.policies import is_there, remove
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]  # helm is built on first use

# Names of their own, so that a driver on the same cluster is not disturbed.
GROUP = "releases.test"
SPACE = "crd-releases"
FIRST, SECOND = "first", "second"
DEFINITION = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/nodeprofiles.{GROUP}"
PROFILES = f"/apis/{GROUP}/v1beta1/nodeprofiles"
TEMPLATE = "nodeprofiles-customresourcedefinition.yaml"
OPTIONS = (
    *("--set", "nodeSelector.none=here,image.pullPolicy=Never"),
    *("--set", "mps.enabled=false,extendedResourceName=,sharedExtendedResourceName="),
    *("--set-json", "mig.profiles=[]"),
)


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    """The chart, with a CRD in another group."""
    copy = Path(shutil.copytree(CHART, tmp_path / "chart"))
    for name in (TEMPLATE, "_names.tpl"):
        change(copy / "templates" / name, CONFIG_GROUP, GROUP)
    return copy


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


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_crd_belongs_to_one_release_follows_its_upgrades_and_outlives_it(
    api: ApiClient, chart: Path, cluster: Cluster
) -> None:
    def run(*command: str) -> str:
        answer = helm(*command, "--namespace", SPACE, kubeconfig=str(cluster.kubeconfig))
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    def deploy(release: str, verb: str = "install", *options: str) -> str:
        driver = ("--set", f"driverName={release}.test")
        return run(verb, release, str(chart), *OPTIONS, *driver, *options)

    assert "belong to another release" not in deploy(FIRST)
    eventually(lambda: is_there(api, PROFILES))
    head = {"apiVersion": f"{GROUP}/v1beta1", "kind": "NodeProfile"}
    api.create(PROFILES, {**head, "metadata": {"name": "kept"}, "spec": {"gpus": [{}]}})

    notes = deploy(SECOND)
    assert f"--overwrite meta.helm.sh/release-name={SECOND}" in notes
    assert TEMPLATE not in run("get", "manifest", SECOND)
    assert TEMPLATE in run("get", "manifest", FIRST)

    change(chart / "templates" / TEMPLATE, "How the GPUs of some nodes", "Whether the GPUs")
    deploy(FIRST, "upgrade")
    assert description(api) == "Whether the GPUs are offered. docs/profiles.md explains it."

    deploy(FIRST, "upgrade", "--set", "controller.enabled=false")
    assert TEMPLATE not in run("get", "manifest", FIRST)
    assert is_there(api, f"{PROFILES}/kept")

    run("uninstall", FIRST, "--no-hooks")
    assert api.get(f"{PROFILES}/kept")["spec"]["gpus"] == [{}]
    assert "belong to another release" not in deploy(FIRST)


def description(api: ApiClient) -> Any:
    [version] = api.get(DEFINITION)["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]["description"]
