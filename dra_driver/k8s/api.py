"""What the driver uses of an API server; ``dra_driver.k8s.client.ApiClient`` is one.

Kept apart from the client: the MPS agent, which knows claims as values, loads no client.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

Document = dict[str, Any]
Query = Mapping[str, str]

MOST_RECENT: Final[Query] = {}
APPLY_PATCH: Final = "application/apply-patch+yaml"  # server-side apply; JSON is YAML
FROM_WATCH_CACHE: Final[Query] = {"resourceVersion": "0"}  # answered without asking etcd


class Watch(Protocol):
    """Events, oldest first; any thread may end it."""

    def __iter__(self) -> Iterator[Document]: ...

    def close(self) -> None: ...


class KubernetesApi(Protocol):
    """One API server. Its errors are ApiServerErrors, and every call ends in seconds."""

    def get(self, path: str, query: Query = ...) -> Document: ...

    def pages(self, path: str, query: Query = ...) -> Iterator[Document]: ...

    def list(self, path: str, query: Query) -> Document: ...

    def create(self, path: str, document: Document, query: Query = ...) -> Document: ...

    def update(self, path: str, document: Document) -> Document: ...

    def patch(
        self, path: str, patch: Document, query: Query = ..., content_type: str = ...
    ) -> Document: ...

    def delete(self, path: str, uid: str = "", resource_version: str = "") -> None: ...

    def watch(
        self, path: str, query: Query, seconds: int, *, metadata_only: bool = False
    ) -> Watch: ...

    def now(self) -> float | None:
        """What the API server's clock shows, in seconds of the epoch; None: not known."""
