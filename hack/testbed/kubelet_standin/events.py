"""What ``kubectl describe pod`` tells of a pod that cannot start."""

import uuid
from collections.abc import Mapping
from typing import Any

from hack.testbed.kubelet_standin.node import now

# pkg/kubelet/events: FailedPrepareDynamicResources, with kubelet.go's message before the error.
_REASON = "FailedPrepareDynamicResources"


def warning(pod: Mapping[str, Any], error: str) -> dict[str, Any]:
    """The event of a pod whose claims cannot be prepared."""
    metadata, time = pod["metadata"], now()
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}",
            "namespace": metadata["namespace"],
        },
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
        "type": "Warning",
        "reason": _REASON,
        "message": f"Failed to prepare dynamic resources: {error}",
        "source": {"component": "kubelet", "host": pod["spec"].get("nodeName", "")},
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
    }
