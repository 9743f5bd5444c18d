"""The chart's files as data, and the real helm."""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml

from api.names import CONFIG_GROUP
from hack.testbed.assets import DEFAULT_VERSION, find_program
from hack.testbed.cache import silent

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "deploy/helm/dra-driver-gpu"
GOLDEN = REPOSITORY / "tests/data/golden/chart/default.yaml"
MPS_AGENT = "mps-agent"  # the component
CONTROLLER = "controller"  # likewise
UNINSTALL = "uninstall"  # what `helm uninstall` runs first
CRD_TEMPLATE = "nodeprofiles-customresourcedefinition.yaml"
NODE_POLICY = "node ValidatingAdmissionPolicy"
STATUS_POLICY = "node-status ValidatingAdmissionPolicy"
EVENTS_POLICY = "events ValidatingAdmissionPolicy"
CONFIGS_POLICY = "claim-configs ValidatingAdmissionPolicy"
RENDER_GOLDEN = (
    *("template", "dra-driver-gpu", str(CHART)),
    *("--namespace", "dra-driver-gpu", "--kube-version", DEFAULT_VERSION),
)


def values() -> dict[str, Any]:
    [document] = documents((CHART / "values.yaml").read_text())
    return dict(document)


def schema() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    return document


def documents(text: str) -> list[Any]:
    """Those of a text in YAML, by libyaml, which takes a tenth of the time for a whole chart."""
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


def objects(rendered: str) -> dict[str, Any]:
    """Rendered objects by kind, of which the chart has at most one for the plugin; those of the MPS
    agent by component and kind, as in ``mps-agent DaemonSet``, and likewise those of the
    controller, those that `helm uninstall` makes, and the policies on nodes and their status, on
    the status of claims, on events, on revisions and on configurations, with their bindings;
    DeviceClasses by name."""
    rendered_documents = documents(rendered)
    rendered_objects = {_key(document): document for document in rendered_documents}
    assert len(rendered_objects) == len(rendered_documents)
    return rendered_objects


def _key(document: dict[str, Any]) -> str:
    kind, name = str(document["kind"]), str(document["metadata"]["name"])
    if kind == "DeviceClass":
        return name
    parts = (
        *(MPS_AGENT, CONTROLLER, UNINSTALL),
        *("controller-events", "node", "node-status", "claim-status", "events", "revisions"),
        "claim-configs",
    )
    part = next((part for part in parts if name.endswith(f"-{part}")), "")
    return f"{part} {kind}".lstrip()


def chart_in_group(group: str, directory: Path) -> Path:
    """A copy of the chart whose CRD is in another API group: of those on a cluster, one release
    has each CRD, and another that installs it has fewer rights."""
    copy = Path(shutil.copytree(CHART, directory / "chart"))
    for name in (CRD_TEMPLATE, "_names.tpl"):
        change(copy / "templates" / name, CONFIG_GROUP, group)
    return copy


def change(path: Path, old: str, new: str) -> None:
    """Replace a text in a file, which has it."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def pod_spec(rendered: dict[str, Any], component: str = "") -> dict[str, Any]:
    """Of the pods of the plugin, of the MPS agent, or of the controller."""
    kind = "Deployment" if component == CONTROLLER else "DaemonSet"
    spec: dict[str, Any] = rendered[f"{component} {kind}".lstrip()]["spec"]["template"]["spec"]
    return spec


def variables(pod: dict[str, Any]) -> dict[str, Any]:
    """The environment variables of its container that have a value."""
    return {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}


def host_paths(pod: dict[str, Any]) -> dict[str, str]:
    """The directories of the host that its volumes are, by the volume's name."""
    return {v["name"]: v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v}


def helm(*arguments: str, kubeconfig: str = "") -> subprocess.CompletedProcess[str]:
    """Run helm at the top of the repository. It is built on first use."""
    program = find_program("helm", DEFAULT_VERSION, silent)
    with tempfile.TemporaryDirectory() as home:  # it keeps caches there, whatever it is told
        return subprocess.run(
            [program, *arguments],
            cwd=REPOSITORY,
            env={"HOME": home, "KUBECONFIG": kubeconfig, "GOGC": "off"},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )


def render(*arguments: str, namespace: str = "gpus") -> dict[str, Any]:
    """What `helm template` makes of the chart with these arguments, as `objects` does."""
    answer = helm("template", "dra-driver-gpu", str(CHART), "--namespace", namespace, *arguments)
    assert answer.returncode == 0, answer.stderr
    return objects(answer.stdout)


def refusal(*arguments: str, namespace: str = "gpus") -> str:
    """What helm says when it refuses the chart with these arguments."""
    answer = helm("template", "dra-driver-gpu", str(CHART), "--namespace", namespace, *arguments)
    assert answer.returncode != 0, answer.stdout
    return answer.stderr
