"""The objects of one collection, followed: of each no more than its user keeps.

Documents are reduced one by one, so that thousands of objects need as much memory as what is kept
of them. The collection is listed once, and again only where the API server remembers no longer what
happened since.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

from dra_driver.base.backoff import Backoff
from dra_driver.base.errors import DriverError, Gone, NotFound, Unreachable
from dra_driver.k8s.api import Document, KubernetesApi, Query, Watch
from dra_driver.k8s.watch import BrokenEvent, Watcher, WatchIntervals

log = logging.getLogger(__name__)

Kept = TypeVar("Kept")
OnChange = Callable[[str, Kept | None, Kept | None], None]

_PAGE: Final = "100"  # objects: a Node with its images has 15 KB, and five times that once parsed
_VERSION: Final = "/version"
_MISSING_SECONDS: Final = (1.0, 60.0)  # the first and the longest wait for a resource


class Collection(Generic[Kept]):
    """Follows the objects at one path, by their names. Any thread may call its methods.

    * In an outage, the objects stay as they were last seen.
    * An object that *keep* cannot read is not there; that is logged once and spoils no other.
    * Where the API server does not know the resource, because its CustomResourceDefinition was
      removed, the collection is empty until it does.
    """

    def __init__(
        self,
        api: KubernetesApi,
        path: str,
        keep: Callable[[Document], Kept | None],
        query: Query | None = None,
        intervals: WatchIntervals | None = None,
    ) -> None:
        """*keep*: what is kept of an object, compared with ``==``; None: nothing, it does not
        concern us. It may raise anything. *query*: selectors."""
        self._api = api
        self._path = path
        self._keep = keep
        self._query: Query = query or {}
        self._on_change: OnChange[Kept] = lambda name, before, after: None
        self._objects: dict[str, Kept] = {}
        self._skipped: dict[str, str] = {}  # and why, by name
        self._since = ""  # the resource version from which to watch; empty: it is listed first
        self._broken_since = ""  # where an event was that could not be read
        self._logged = ""
        self._is_served = True
        self._lists = 0
        self._errors = 0
        self._missing = Backoff(*_MISSING_SECONDS)
        self._listed = threading.Event()
        self._watcher = Watcher(
            path.rpartition("/")[2],
            self._look,
            self._see,
            self._failed,
            intervals or WatchIntervals(),
        )

    def start(self, on_change: OnChange[Kept]) -> None:
        """Begin. *on_change* is called with each object that changed, in our thread: its name, what
        was kept of it before and what is kept now. None: it was not there, or is not any more."""
        self._on_change = on_change
        self._watcher.start()

    def stop(self, timeout_seconds: float = 1.0) -> bool:
        """End the thread. Whether it ended in time."""
        return self._watcher.stop(timeout_seconds)

    def wait_until_listed(self, seconds: float) -> bool:
        """Whether everything was seen once, after at most *seconds*."""
        return self._listed.wait(seconds)

    def now(self) -> Mapping[str, Kept]:
        """What is kept of the objects, by name. Takes less than a millisecond for 5,000."""
        return self._objects.copy()

    @property
    def is_served(self) -> bool:
        """Whether the API server knows the resource."""
        return self._is_served

    @property
    def lists(self) -> int:
        """How often it was listed."""
        return self._lists

    @property
    def errors(self) -> int:
        """How often a list or a watch failed."""
        return self._errors

    @property
    def skipped(self) -> int:
        """How many objects *keep* cannot read now."""
        return len(self._skipped)

    def _look(self, seconds: int) -> Watch | float:
        try:
            self._since = self._since or self._list()
            query = {"resourceVersion": self._since, "allowWatchBookmarks": "true"}
            watch = self._api.watch(self._path, {**self._query, **query}, seconds)
        except NotFound as e:
            return self._not_served(e)
        return watch

    def _not_served(self, error: NotFound) -> float:
        self._api.get(_VERSION)  # no API server, such as a load balancer, does not know that either
        self._since = ""
        if self._is_served:
            log.warning("what is followed is not there, and looked for: %s", error)
        self._is_served = False
        self._replace({})
        return self._missing.next_seconds()

    def _list(self) -> str:
        """List everything as it is now: the resource version of it."""
        self._lists += 1
        version, objects, names = "", {}, set()
        for page in self._api.pages(self._path, {"limit": _PAGE, **self._query}):
            version, documents = _version(page), page.get("items", page)
            if not version or not isinstance(documents or [], list):
                raise Unreachable(f"list {self._path}: the API server did not answer with a list")
            for document in documents or ():
                name = _name(document)
                names.add(name)
                kept = self._reduced(name, document)
                if kept is not None:
                    objects[name] = kept
        self._skipped = {name: why for name, why in self._skipped.items() if name in names}
        if not self._is_served:
            log.info("what is followed is there again: %s", self._path)
        self._is_served = True
        self._missing.reset()
        self._replace(objects)
        return version

    def _replace(self, objects: dict[str, Kept]) -> None:
        before, self._objects = self._objects, objects
        self._logged = ""
        self._listed.set()
        for name in sorted(before.keys() | objects.keys()):
            self._tell(name, before.get(name), objects.get(name))

    def _see(self, event: Mapping[str, Any]) -> None:
        document = event.get("object")
        self._since = _version(document) or self._since
        self._logged = ""
        if event.get("type") == "BOOKMARK":
            return
        name = _name(document)
        if event.get("type") == "DELETED":
            self._skipped.pop(name, None)
            kept = None
        else:
            kept = self._reduced(name, document)
        before = self._objects.get(name)
        if kept == before:
            return
        if kept is None:
            del self._objects[name]
        else:
            self._objects[name] = kept
        self._tell(name, before, kept)

    def _reduced(self, name: str, document: Any) -> Kept | None:
        """What is kept of it; the value that there is, where that is equal."""
        try:
            kept = self._keep(document) if name else None
            why = "" if name else "it has no name"
        except Exception as e:  # noqa: BLE001 - anything may stand in an object
            kept, why = None, repr(e)
        if why and self._skipped.get(name) != why:
            log.warning("an object cannot be read: %s", why, extra={"object": name})
        if why:
            self._skipped[name] = why
        else:
            self._skipped.pop(name, None)
        before = self._objects.get(name)
        return before if kept == before else kept

    def _tell(self, name: str, before: Kept | None, after: Kept | None) -> None:
        if before == after:
            return
        try:
            self._on_change(name, before, after)
        except Exception:  # a fault of ours: the other changes are told
            log.exception("a change was not taken", extra={"object": name})

    def _failed(self, error: DriverError) -> None:
        """An outage is logged when it begins, not with every attempt."""
        self._errors += 1
        if isinstance(error, Gone):  # the watch or the list fell too far behind, which happens
            self._since = ""
            return
        if isinstance(error, BrokenEvent):  # it may come again as it is: a list goes past it
            if self._broken_since == self._since:
                self._since = ""
            self._broken_since = self._since
        if str(error) != self._logged:
            log.warning("cannot follow %s, trying again: %s", self._path, error)
            self._logged = str(error)


def _name(document: Any) -> str:
    return _metadata(document, "name")


def _version(document: Any) -> str:
    """The API server fails for good to watch from one that is no number."""
    version = _metadata(document, "resourceVersion")
    return version if version.isdecimal() else ""


def _metadata(document: Any, field: str) -> str:
    """A field of the metadata; empty: there is none, or no document."""
    metadata = document.get("metadata") if isinstance(document, dict) else None
    value = metadata.get(field) if isinstance(metadata, dict) else None
    return value if isinstance(value, str) else ""
