"""The service accounts of the chart, for processes of this machine."""

from pathlib import Path

import yaml

from hack.demonstration.kubectl import Kubectl
from hack.testbed.cluster import Cluster

TOKEN_SECONDS = 24 * 3600


def write_kubeconfig(
    cluster: Cluster, kubectl: Kubectl, namespace: str, account: str, path: Path, *bound: str
) -> None:
    """Write a kubeconfig with the rights of *account* to *path*. *bound*: more arguments of
    ``kubectl create token``."""
    token = kubectl.run(
        "create",
        "token",
        account,
        f"--namespace={namespace}",
        f"--duration={TOKEN_SECONDS}s",
        *bound,
    )
    document = yaml.safe_load(cluster.kubeconfig.read_text())
    document["users"] = [{"name": account, "user": {"token": token.strip()}}]
    document["contexts"][0]["context"]["user"] = account
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(document))
