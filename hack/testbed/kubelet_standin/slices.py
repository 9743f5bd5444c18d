"""The kubelet's other duty to drivers: slices of one that is gone do not stay."""

import logging
import time
from collections.abc import Callable

from dra_driver.base.errors import NotFound
from dra_driver.k8s.client import ApiClient

log = logging.getLogger(__name__)

_PATH = "/apis/resource.k8s.io/v1/resourceslices"
WIPE_SECONDS = 30.0  # pkg/kubelet/cm/dra/manager.go, defaultWipingDelay


class SliceWiper:
    """Deletes a driver's slices of this node once no instance answered for 30 s, and at start."""

    def __init__(self, api: ApiClient, node: str, is_usable: Callable[[str], bool]) -> None:
        self._api = api
        self._node = node
        self._is_usable = is_usable
        self._gone_since: dict[str, float] = {}

    def wipe_all(self) -> None:
        """As the kubelet does when it starts (1.31 and newer)."""
        for driver in sorted(self._published()):
            self._wipe(driver)

    def look(self) -> None:
        """Call it often."""
        for driver in sorted(self._published()):
            if self._is_usable(driver):
                self._gone_since.pop(driver, None)
            elif time.monotonic() - self._gone_since.setdefault(driver, time.monotonic()) > (
                WIPE_SECONDS
            ):
                self._wipe(driver)
                del self._gone_since[driver]

    def _published(self) -> dict[str, list[str]]:
        """Names of this node's slices by driver; none where the API server serves no slices."""
        names: dict[str, list[str]] = {}
        selector = {"fieldSelector": f"spec.nodeName={self._node}"}
        try:
            items = self._api.list(_PATH, selector)["items"]
        except NotFound:
            return names
        for item in items:
            names.setdefault(item["spec"]["driver"], []).append(item["metadata"]["name"])
        return names

    def _wipe(self, driver: str) -> None:
        for name in sorted(self._published().get(driver, ())):
            try:
                self._api.delete(f"{_PATH}/{name}")
            except NotFound:
                continue
            log.info("deleted a slice of a driver that is gone", extra={"slice": name})
