"""The DaemonSets that ship, from the image that hack/image builds, on a simulated node."""

import pytest

from tests.e2e.manifests import GLIBC, pod, template
from tests.e2e.release import PLUGIN


def test_a_pod_gets_a_gpu(installed, kube):
    kube.apply(template("one"))
    kube.apply(pod("with-gpu", "nvidia-smi -L", template="one", image=GLIBC))
    kube.wait_pods(["with-gpu"], "Succeeded")
    assert kube.logs("with-gpu").count("GPU-") == 1


@pytest.mark.parametrize("command", ["devices", "claims", "doctor"])
def test_commands_work(installed, command):
    answer = installed.inside(PLUGIN, "dra-driver", command)
    assert answer.returncode == 0, answer.stderr
