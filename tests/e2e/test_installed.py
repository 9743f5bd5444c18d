"""The DaemonSets that ship, from the image that hack/image builds, on a simulated node."""

import contextlib
import json

import pytest
import yaml

from tests.e2e import device_plugin
from tests.e2e.conftest import PROFILE_LABELS
from tests.e2e.device_plugin import CHANGE_SECONDS, GPU, running, shown, wait_allocatable
from tests.e2e.kube import wait
from tests.e2e.manifests import GLIBC, fraction, on, pod, template
from tests.e2e.processes import main_process
from tests.e2e.release import AGENT, NAME, PLUGIN

VALUES = {"profiles": {"by-device-plugin": device_plugin.PROFILE}}


@pytest.mark.device_plugin
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("devices", "gpu-7 "),
        ("claims", "no claim is prepared on this node"),
        ("doctor", "0 failed, 0 warnings"),
    ],
)
def test_the_commands_answer_in_the_plugins_container(installed, command, words):
    def says_so():
        answer = installed.inside(PLUGIN, "dra-driver", command)
        assert answer.returncode == 0, answer.stderr
        return words in answer.stdout

    # The plugin may find the API that the tests before have chosen, and be about to change it.
    try:
        wait(f"{words!r} from {command}", says_so, CHANGE_SECONDS)
    except AssertionError as e:
        raise AssertionError(
            f"{e}: {installed.inside(PLUGIN, 'dra-driver', command).stdout}"
        ) from e


@contextlib.contextmanager
def driver_removed(installed):
    """As if somebody had unloaded NVIDIA's driver on the node, until the end."""
    text = installed.node_file.read_text()
    installed.serve(yaml.safe_dump({**yaml.safe_load(text), "driver": "not-loaded"}))
    try:
        yield
    finally:
        installed.serve(text)


def status(installed, component):
    """Whether its container is ready, and how often it was started anew."""
    [document] = installed.pods(component)
    [container] = document["status"]["containerStatuses"]
    return container["ready"], container["restartCount"]


def test_a_plugin_without_nvidias_driver_is_not_ready_but_lives(installed, kube):
    with driver_removed(installed):
        wait("the plugin to be not ready", lambda: not status(installed, PLUGIN)[0], 20)
        answer = installed.inside(PLUGIN, "dra-driver", "doctor")
        assert answer.returncode == 1
        assert "[FAIL] kernel module" in answer.stdout
        assert kube.devices() == []

    installed.wait_ready(PLUGIN)
    wait("its GPUs", lambda: len(kube.devices()) == 8, 20)
    assert status(installed, PLUGIN) == (True, 0)


def half(kube, name):
    """A pod under MPS with a half of the first GPU."""
    asked = fraction("20Gi", cel=on(kube.uuid("gpu-0")))
    asked["exactly"]["capacity"]["requests"]["cores"] = "50"
    kube.apply(template(name, asked))
    kube.apply(pod(name, template=name, image=GLIBC))
    kube.wait_pod(name, "Running")
    return main_process(kube, name)


def client(session_driver, call, pid):
    """What becomes of a process that uses MPS, or of its limits."""
    answer = session_driver.agent.client(call, pid, "-o", "json")
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def test_clients_compute_on_while_the_pods_of_agent_and_plugin_are_replaced(
    installed, kube, session_driver
):
    process = half(kube, "computes")
    client(session_driver, "attach", process)
    before = client(session_driver, "show", process)
    assert before["percent"] == 50

    installed.restart(AGENT)
    installed.restart(PLUGIN)

    assert client(session_driver, "show", process) == before
    second = half(kube, "second")
    client(session_driver, "attach", second)
    assert client(session_driver, "show", second)["server"] == before["server"]
    kube.clean_up()
    servers = "s" + "[0-9a-f]" * 12
    wait("their server to go", lambda: not list(installed.mps_dir.glob(servers)), 20)


@pytest.mark.device_plugin
@pytest.mark.point(151)
def test_pods_keep_gpus_that_they_have_by_name_while_the_plugin_is_rolled_out_and_not_removed(
    installed, kube, session_driver
):
    kube.label_node(installed.cluster.node_name, **{PROFILE_LABELS[0]: "by-device-plugin"})
    wait_allocatable(session_driver, {GPU: 8}, 40)
    kube.apply(device_plugin.pod("before", 2))
    running(kube, "before")

    installed.upgrade(**VALUES, log={"level": "debug"})
    installed.wait_ready(PLUGIN)

    wait_allocatable(session_driver, {GPU: 8})
    kube.apply(device_plugin.pod("after", 6))
    running(kube, "after")
    assert not shown(kube, "before") & shown(kube, "after")
    assert device_plugin.restarts(kube, "before") == 0
    doctor = installed.inside(PLUGIN, "dra-driver", "doctor")
    assert doctor.returncode == 0, doctor
    assert "DevicePlugin" in doctor.stdout

    refused = installed.try_helm("uninstall", NAME)
    installed.keep()
    assert refused.returncode != 0
    node = installed.cluster.node_name
    for name in ("after", "before"):
        assert f"default/{name}  on node {node}" in refused.stdout + refused.stderr
