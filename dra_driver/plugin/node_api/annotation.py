"""Keeps an annotation of the own Node as it is to be."""

import logging
from collections.abc import Callable
from typing import Final

from dra_driver.base.backoff import Backoff
from dra_driver.base.errors import ApiServerError
from dra_driver.base.threads import Loop
from dra_driver.k8s.client import ApiClient
from dra_driver.k8s.node_labels import NodeLabels

log = logging.getLogger(__name__)

_CHECK_SECONDS = 600.0  # until the next look, which asks nobody: a change may have been missed
_FIRST_WAIT_SECONDS, _LAST_WAIT_SECONDS = 1.0, 300.0  # until a failed write is tried again


class AnnotationWriter:
    """Writes the annotation where the Node has another one, on a thread of its own: nothing waits
    for it. To be woken (``loop.soon``) when the Node changes, and when something else is to be
    said. A failed write is tried again."""

    def __init__(
        self,
        api: ApiClient,
        node: NodeLabels,
        name: str,
        text: Callable[[], str | None],
        writes: Callable[[], bool],
    ) -> None:
        """*node* follows the annotation *name*. *text*: what it is to say; None: it is to be gone.
        *writes*: whether that is known, and this process is the one that writes it."""
        self._api = api
        self._node = node
        self._name = name
        self._text = text
        self._writes = writes
        self._backoff = Backoff(_FIRST_WAIT_SECONDS, _LAST_WAIT_SECONDS, randomized=True)
        self._logged_error = ""
        self.loop: Final = Loop(f"annotation-{name}", self.write, _CHECK_SECONDS)

    def write(self) -> float:
        """Write the annotation, if the Node has another one. Returns the seconds until the next
        try."""
        if not self._writes():
            return _CHECK_SECONDS
        try:
            text = self._text()
            if self._node.annotations().get(self._name) != text:
                patch = {"metadata": {"annotations": {self._name: text}}}
                self._api.patch(f"/api/v1/nodes/{self._node.node}", patch)
        except ApiServerError as e:
            if str(e) != self._logged_error:
                log.warning("annotation %s of the Node cannot be written: %s", self._name, e)
            self._logged_error = str(e)
            return self._backoff.next_seconds()
        self._logged_error = ""
        self._backoff.reset()
        return _CHECK_SECONDS
