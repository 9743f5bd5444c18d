"""What the API server holds of our slices, as far as we know, and the writes that change it."""

import logging
from collections.abc import Mapping
from typing import Any

from dra_driver.base.errors import NotFound, NotServed, Refused, Unreachable
from dra_driver.k8s.api import Document, Watch
from dra_driver.k8s.resource_api import ResourceApi
from dra_driver.kubeletplugin.slices.comparison import comparable_spec, dropped_fields
from dra_driver.kubeletplugin.slices.reconcile import Pool, SliceOwner, plan_writes, pool_problems

log = logging.getLogger(__name__)


class PoolWriter:
    """The slices of one driver on one node. For one thread; every method may raise ApiServerError.

    After an error nothing is known any more: ``forget``, and look again.
    """

    def __init__(self, resources: ResourceApi, driver: str, node: str) -> None:
        self._resources = resources
        self._driver = driver
        self._node = node
        self._home: SliceOwner | None = None
        self._seen: dict[str, Document] = {}
        self._since = ""
        self._valid: Pool | None = None
        self._echoes: set[str] = set()  # resource versions of our writes that a watch will repeat
        self._stored_specs: dict[str, str] = {}  # what we sent -> what the API server made of it
        self.dropped: tuple[str, ...] = ()  # fields that it does not keep

    def forget(self, error: Exception | None = None) -> None:
        """Look again next time. An API server that was away may come back with other features."""
        self._home = None
        if isinstance(error, Unreachable):
            self._stored_specs.clear()

    def look(self) -> SliceOwner:
        """See which slices are there, and whose they are: a Node may have come back as another."""
        documents, self._since = self._resources.slices(self._driver, self._node)
        self._seen = {document["metadata"]["name"]: _slim(document) for document in documents}
        self._echoes.clear()
        self._home = SliceOwner(self._driver, self._node, self._resources.node_uid(self._node))
        return self._home

    def write(self, pool: Pool) -> int:
        """Make the API server hold *pool*: how many writes that took; none where it does.

        Refused: it never would, or the scheduler could use nothing of *pool*.
        """
        self._refuse_invalid(pool)
        owner = self._home or self.look()
        writes = plan_writes(pool, tuple(self._seen.values()), owner, self._stored_specs)
        dropped: set[str] = set()
        for document in writes.delete:
            self._delete(document)
        for document in writes.update:
            dropped.update(self._remember(document, self._resources.update_slice(dict(document))))
        for document in writes.create:
            dropped.update(self._remember(document, self._resources.create_slice(dict(document))))
        if writes.update or writes.create:
            self._note_dropped(tuple(sorted(dropped)))
        return len(writes)

    def remove(self) -> int:
        """Remove all slices of the driver on the node: how many there were. An API server that
        knows no slices has none."""
        self.forget()
        try:
            documents, _ = self._resources.slices(self._driver, self._node)
        except NotServed:
            return 0
        for document in documents:
            self._delete(document)
        return len(documents)

    def watch(self, seconds: int) -> Watch:
        """What happens to our slices from where we stand."""
        return self._resources.watch_slices(self._driver, self._node, self._since, seconds)

    def is_by_others(self, event: Mapping[str, Any]) -> bool:
        """Whether *event* of our watch tells of a change that is not our own."""
        document = event["object"]
        name, version = document["metadata"].get("name"), document["metadata"]["resourceVersion"]
        self._since = version
        if event["type"] == "BOOKMARK":
            return False
        if event["type"] == "DELETED":
            return name in self._seen
        if version in self._echoes:
            self._echoes.discard(version)
            return False
        return True

    def _refuse_invalid(self, pool: Pool) -> None:
        if pool is self._valid:
            return
        if problems := pool_problems(pool):
            raise Refused(f"pool {pool.name} is not published: {'; '.join(problems)}")
        self._valid = pool

    def _delete(self, document: Mapping[str, Any]) -> None:
        try:
            self._resources.delete_slice(document)
        except NotFound:
            log.debug("slice was gone already", extra={"slice": document["metadata"]["name"]})
        self._seen.pop(document["metadata"]["name"], None)

    def _remember(self, sent: Mapping[str, Any], stored: Document) -> tuple[str, ...]:
        """Remember what is there now: the fields of *sent* that *stored* lacks."""
        name, version = stored["metadata"]["name"], stored["metadata"]["resourceVersion"]
        if version != sent["metadata"].get("resourceVersion"):  # the same: nothing was written
            self._echoes.add(version)
        self._seen[name] = _slim(stored)
        sent_spec, stored_spec = comparable_spec(sent["spec"]), comparable_spec(stored["spec"])
        if sent_spec == stored_spec:
            return ()
        self._stored_specs[sent_spec] = stored_spec
        return dropped_fields(sent["spec"], stored["spec"])

    def _note_dropped(self, fields: tuple[str, ...]) -> None:
        if self._stored_specs:
            specs = {comparable_spec(document["spec"]) for document in self._seen.values()}
            self._stored_specs = {
                sent: spec for sent, spec in self._stored_specs.items() if spec in specs
            }
        if fields == self.dropped:
            return
        self.dropped = fields
        if fields:
            log.warning(
                "the API server drops fields of our slices: their feature gates are off",
                extra={"fields": fields, "driver": self._driver},
            )


def _slim(document: Document) -> Document:
    """*document* without the bookkeeping of field managers, which can outweigh it."""
    metadata = {k: v for k, v in document["metadata"].items() if k != "managedFields"}
    return {**document, "metadata": metadata}
