"""The manifests of examples, made to run on a cluster without a registry."""

import shlex
from pathlib import Path
from typing import Any

import yaml

from dra_driver.k8s.quantity import rounded_up
from hack.testbed.images import GLIBC

Document = dict[str, Any]

EXAMPLES = Path(__file__).parents[2] / "deploy/examples"
_STAY = "trap 'exit 0' TERM; while :; do sleep 1 & wait; done"
_MIB = 1024 * 1024


def documents(example: str) -> list[Document]:
    """What an example's manifest has."""
    return list(yaml.safe_load_all((EXAMPLES / example / f"{example}.yaml").read_text()))


def with_local_image(document: Document) -> Document:
    """The same object; a pod gets an image that the node has, and goes on after its command."""
    if document["kind"] != "Pod":
        return document
    for container in document["spec"]["containers"]:
        container |= {"image": GLIBC, "imagePullPolicy": "Never"}
        if "sleep" not in str(container["command"]):
            command = f"{shlex.join(container['command'])} || exit; {_STAY}"
            container["command"] = ["sh", "-c", command]
    document["spec"]["terminationGracePeriodSeconds"] = 2
    return document


def with_memory(document: Document, most: int) -> Document:
    """The same object; a claim asks for at most so many MiB of memory."""
    if document["kind"] == "ResourceClaimTemplate":
        for request in document["spec"]["spec"]["devices"]["requests"]:
            amounts = request["exactly"]["capacity"]["requests"]
            if mebibytes(amounts["memory"]) > most:
                amounts["memory"] = f"{most}Mi"
    return document


def mebibytes(amount: str) -> int:
    """Of a quantity."""
    return rounded_up(amount) // _MIB
