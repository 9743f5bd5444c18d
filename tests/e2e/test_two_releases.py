"""Two images that differ in every format: the chart is updated to one and rolled back, and claims
that either prepared are taken back by the other."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.e2e.kube import wait
from tests.e2e.manifests import fraction, on, pod, template
from tests.e2e.release import NAME, REPOSITORY
from tests.neighbour_release import NEXT_RELEASE, ROOT, write_next_release

pytestmark = [pytest.mark.usefixtures("containers"), pytest.mark.timeout(600)]

TAG = "next"
NEEDED = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "requirements-runtime.lock",
    "deploy/debian.lock",
)


@pytest.fixture(scope="module")
def next_image(cluster, imported, tmp_path_factory):
    """The tag of the image of the next release, where the node has it."""
    source = write_next_release(tmp_path_factory.mktemp("next") / "source")
    shutil.copytree(ROOT / "hack", source / "hack")
    (source / "deploy").mkdir()
    for file in NEEDED:
        shutil.copy(ROOT / file, source / file)
    command = [sys.executable, "-m", "hack.container_image", f"{REPOSITORY}:{TAG}"]
    built = source.parent / "image"
    subprocess.run([*command, "--directory", built], cwd=source, check=True, timeout=300)
    [archive] = built.glob("*.tar")
    cluster.import_images(archive)
    return TAG


def run(kube, name, gpu):
    """A pod under MPS, which holds a claim."""
    half = fraction("20Gi", cel=on(kube.uuid(gpu)))
    half["exactly"]["capacity"]["requests"]["cores"] = "50"
    kube.apply(template(name, half))
    kube.apply(pod(name, template=name))
    kube.wait_pod(name, "Running")


def end(kube, name):
    kube.delete("Pod", name)
    kube.wait_gone("Pod", name)


def records(release):
    """What is written of claims, by the release that wrote it."""
    state = release.cluster.kubelet_dir / "plugins/gpu.nvidia.com/state/claims"
    assert not list(state.rglob("*.unreadable"))
    documents = [json.loads(path.read_text()) for path in state.rglob("*.json")]
    return sorted(
        (document["release"].startswith(NEXT_RELEASE), document["ClaimRecord"].get("colours"))
        for document in documents
    )


def test_each_release_takes_back_what_the_other_prepared(installed, kube, next_image):
    run(kube, "before", "gpu-6")

    installed.upgrade(image={"tag": next_image})
    installed.wait_ready()
    run(kube, "meanwhile", "gpu-7")
    assert records(installed) == [(False, None), (True, ["green"])]
    end(kube, "before")

    installed.helm("rollback", NAME)
    installed.wait_ready()
    assert records(installed) == [(True, ["green"])]
    run(kube, "beside", "gpu-7")  # the older agent serves it in the newer one's server
    end(kube, "meanwhile")
    end(kube, "beside")
    wait("every claim to go", lambda: not kube.all("ResourceClaim"), 30)
    assert records(installed) == []
