"""An API server without counters: what exists is given out, and nothing is created for claims."""

import pytest

from tests.e2e.conftest import restarts_api_server
from tests.e2e.kube import wait
from tests.e2e.manifests import on, pod, request, template
from tests.e2e.mig import change_gpu, partitions, serving

WITHOUT = "--feature-gates=DRAPartitionableDevices=false"
WHY = "the API server keeps no counters"
THEIRS = "gpu-0-mig-3g40gb-9-0"


@pytest.fixture(scope="module", autouse=True)
def h100s(session_driver):
    """Two H100s whose profile offers partitions."""
    with serving(session_driver, "h100x2-mig"):
        yield


@pytest.fixture(autouse=True)
def versions(cluster):
    if int(cluster.version.split(".")[1]) < 35:
        pytest.skip("this API server keeps no counters, whatever its gates are (KEP-4815)")


@pytest.fixture
def api_server(cluster, kube, driver):
    """Has another API server be there, with more arguments, and a plugin that met no other. After
    the test the usual one is, and the board is as before."""
    node = driver.node_file.read_text()
    running_with = ()

    def serve(*arguments):
        nonlocal running_with
        if "" in driver.processes:
            driver.stop()
        cluster.stop("apiserver")
        cluster.start("apiserver", *arguments)
        for name in ("controller-manager", "scheduler"):  # they would come back a minute later
            cluster.restart(name)
        driver.start()
        running_with = arguments

    yield serve
    driver.replace_node(node)
    if running_with:  # for half a minute after a restart the kubelet would see no new pod
        serve()


@restarts_api_server
def test_without_counters_existing_partitions_are_offered_and_with_them_possible_ones(
    cluster, kube, driver, api_server
):
    change_gpu(driver, mig=True, instances=[{"profile": "3g.40gb", "start": 0}])
    is_published = lambda: "uuid" in kube.published().get(THEIRS, {}).get("attributes", {})  # noqa: E731
    wait(
        "theirs, and places beside it",
        lambda: is_published() and len(partitions(kube, "gpu-0")) > 1,
        20,
    )
    logged = len(driver.log)

    api_server(WITHOUT)
    wait("theirs, and the GPU that is whole", lambda: kube.devices() == ["gpu-1", THEIRS], 20)
    assert "ounters" not in str([slice_["spec"] for slice_ in kube.slices()])
    wait("the reason to be said", lambda: WHY in driver.log[logged:])
    doctor = driver.command(
        "doctor", f"--kubeconfig={cluster.kubeconfig}", f"--sim={driver.node_file}"
    )
    assert "no MIG partition is created" in doctor.stdout
    before = driver.instances()
    kube.apply(
        template("theirs", request(cel=on(kube.uuid(THEIRS)), deviceClassName="mig.gpu.nvidia.com"))
    )
    kube.apply(template("whole", request(cel=on(kube.uuid("gpu-1")))))
    for name in ("theirs", "whole"):
        kube.apply(pod(name, template=name))
        kube.wait_pod(name, "Running")
    assert driver.instances() == before

    api_server()
    for name in ("theirs", "whole"):
        assert kube.phase(name) == "Running"
        kube.delete("Pod", name)
        kube.wait_gone("Pod", name)
    wait("what can be created", lambda: len(partitions(kube, "gpu-1")) > 1, 20)
    wait("places beside theirs", lambda: len(partitions(kube, "gpu-0")) > 1, 20)
    assert "ounters" in str([slice_["spec"] for slice_ in kube.slices()])
    assert driver.instances() == before
