"""What a claim asks for, request by request: each as the ways in which it can be served."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """One way to serve a request: itself, or one entry of its ``firstAvailable``."""

    path: str
    asked: Document
    name: str = ""  # with its subrequest: "gpu/large"
    configs: Sequence[Document] = ()  # of its claim
    has_fields: bool = True  # False: what is at its path is no more than a number

    def field(self, name: str) -> str:
        """Where *name* of it stands."""
        return f"{self.path}.{name}" if self.has_fields else self.path

    @property
    def class_name(self) -> str:
        return str(self.asked.get("deviceClassName"))

    @property
    def selectors(self) -> Sequence[Document]:
        """Its own, besides those of its class."""
        return self.asked.get("selectors") or ()

    @property
    def admin(self) -> bool:
        return bool(self.asked.get("adminAccess"))

    @property
    def every(self) -> bool:
        """Whether it is for all devices of a node that match."""
        return self.asked.get("allocationMode") == "All"

    @property
    def count(self) -> int:
        return int(self.asked.get("count") or 1)

    @property
    def amounts(self) -> Mapping[str, str]:
        return {
            str(name): str(amount)
            for name, amount in ((self.asked.get("capacity") or {}).get("requests") or {}).items()
        }


def requests_of(claim: Document) -> list[list[Request]]:
    """Every request of a claim as the ways to serve it."""
    found = []
    devices = (claim.get("spec") or {}).get("devices") or {}
    configs = devices.get("config") or ()
    for index, request in enumerate(devices.get("requests") or ()):
        path, name = f"spec.devices.requests[{index}]", str(request.get("name"))
        if "exactly" in request:
            found.append([Request(f"{path}.exactly", request["exactly"], name, configs)])
        else:
            listed = request.get("firstAvailable") or ()
            found.append(
                [
                    Request(
                        f"{path}.firstAvailable[{i}]", one, f"{name}/{one.get('name')}", configs
                    )
                    for i, one in enumerate(listed)
                ]
            )
    return found
