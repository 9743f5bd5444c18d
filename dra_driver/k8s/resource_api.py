"""``resource.k8s.io`` as one API server serves it: documents of v1 in, documents of v1 out."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from dra_driver.base.errors import Gone, NotFound, NotServed, Unreachable
from dra_driver.k8s.api import APPLY_PATCH, MOST_RECENT, Document, KubernetesApi, Query, Watch
from dra_driver.k8s.resource_versions import (
    RESOURCE_GROUP,
    choose_version,
    convert_claim_to_v1,
    convert_slice_from_v1,
    convert_slice_to_v1,
)

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class ResourceApi:
    """Slices and claims, whatever version of the group the API server speaks; for many threads.

    The version is asked for once. Where something is not found it is asked for again, because an
    API server that was up- or downgraded answers 404 to everything of a version that is gone.
    """

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api
        self._version = ""
        self._missing = False

    @property
    def version(self) -> str:
        """The version in use. NotServed: there is none. ApiServerError: it cannot be asked for."""
        return self._version or self._discover()

    @property
    def missing(self) -> bool:
        """Whether the API server served no version that we know when it was asked last."""
        return self._missing

    def is_served(self) -> bool:
        """Whether the API server serves a version that we know, asked now. ApiServerError: it
        does not say."""
        try:
            self._discover()
        except NotServed:
            return False
        return True

    def extended_resource(self, device_class: str) -> str | None:
        """The resource that pods ask for to get a claim with this DeviceClass; empty: none. None:
        there is no such class. An API server without the feature says none of any class."""
        try:
            document = self._call(
                lambda base: self._api.get(f"{base}/deviceclasses/{device_class}")
            )
        except NotFound:
            return None
        return _extended_resource(document)

    def extended_resources(self) -> dict[str, str]:
        """By the name of the resource: a DeviceClass by which pods that ask for it get claims."""

        def read(base: str) -> dict[str, str]:
            classes = (
                (_extended_resource(each), str(each["metadata"]["name"]))
                for page in self._api.pages(f"{base}/deviceclasses")
                for each in page.get("items") or ()
            )
            return {resource: name for resource, name in classes if resource}

        return self._call(read)

    def node_uid(self, node: str) -> str:
        """The UID of the Node. NotFound: it is not (yet) there."""
        try:
            uid = self._api.get(f"/api/v1/nodes/{node}")["metadata"]["uid"]
        except NotFound as e:
            raise NotFound(f"{e}; node {node} has to register with the API server first") from e
        return str(uid)

    def slices(self, driver: str, node: str) -> tuple[list[Document], str]:
        """The slices of *driver* on *node* (empty: everywhere), and the resource version to watch
        from."""
        query = {"fieldSelector": _selector(driver, node)}
        slices = self._call(lambda base: self._api.list(f"{base}/resourceslices", query))
        items = [convert_slice_to_v1(document) for document in slices.get("items") or ()]
        return items, str(slices.get("metadata", {}).get("resourceVersion", ""))

    def watch_slices(self, driver: str, node: str, since: str, seconds: int) -> Watch:
        """What happens to the slices of *driver* on *node* after version *since*. Gone: list."""
        query = {
            "fieldSelector": _selector(driver, node),
            "resourceVersion": since,
            "allowWatchBookmarks": "true",
        }
        return self._call(lambda base: self._api.watch(f"{base}/resourceslices", query, seconds))

    def create_slice(self, document: Document) -> Document:
        """Create the slice: what the API server made of it."""
        return self._write(document, self._api.create)

    def update_slice(self, document: Document) -> Document:
        """Replace the slice: what the API server made of it. Conflict: it was changed since."""
        return self._write(document, self._api.update, f"/{document['metadata']['name']}")

    def _write(
        self, document: Document, write: Callable[[str, Document], Document], name: str = ""
    ) -> Document:
        def write_in(base: str) -> Document:
            written = convert_slice_from_v1(base.rpartition("/")[2], document)
            return convert_slice_to_v1(write(f"{base}/resourceslices{name}", written))

        return self._call(write_in)

    def delete_slice(self, document: Mapping[str, Any]) -> None:
        """Delete exactly this slice, as it was seen. Conflict: it was changed since."""
        metadata = document["metadata"]
        self._call(
            lambda base: self._api.delete(
                f"{base}/resourceslices/{metadata['name']}",
                uid=metadata["uid"],
                resource_version=metadata["resourceVersion"],
            )
        )

    def claim(self, namespace: str, name: str, query: Query = MOST_RECENT) -> Document:
        """The claim as it is at this moment; FROM_WATCH_CACHE: as the API server has it in memory,
        which may be a moment old. NotFound: there is none."""
        path = f"namespaces/{namespace}/resourceclaims/{name}"
        return convert_claim_to_v1(self._call(lambda base: self._api.get(f"{base}/{path}", query)))

    def apply_claim_status(
        self, namespace: str, name: str, uid: str, status: Document, manager: str
    ) -> None:
        """Have the status of exactly this claim say *status*, which replaces what *manager* applied
        before. NotFound, Conflict: the claim is deleted, or another one."""
        path = f"namespaces/{namespace}/resourceclaims/{name}/status"

        def apply(base: str) -> Document:
            document: Document = {
                "apiVersion": base.removeprefix("/apis/"),
                "kind": "ResourceClaim",
                "metadata": {"name": name, "namespace": namespace, "uid": uid},
                "status": status,
            }
            query = {"fieldManager": manager, "force": "true"}
            return self._api.patch(f"{base}/{path}", document, query, APPLY_PATCH)

        self._call(apply)

    def claims(self, read_claim: Callable[[Document], Iterable[Answer]]) -> list[Answer]:
        """What *read_claim* finds in the claims of the cluster, of which one page at a time is in
        memory; needs the right to list them."""

        def read(base: str) -> list[Answer]:
            return [
                found
                for page in self._api.pages(f"{base}/resourceclaims")
                for item in page.get("items") or ()
                for found in read_claim(convert_claim_to_v1(item))
            ]

        try:
            return self._call(read)
        except Gone:  # the API server forgot the list before its last page was asked for
            return self._call(read)

    def _call(self, ask: Callable[[str], Answer]) -> Answer:
        """*ask*'s answer for ``/apis/<group>/<version>``, again where the version had changed."""
        version = self.version
        try:
            return ask(f"/apis/{RESOURCE_GROUP}/{version}")
        except NotFound:
            now = self._discover()
            if now == version:
                raise
        return ask(f"/apis/{RESOURCE_GROUP}/{now}")

    def _discover(self) -> str:
        # No lock: several threads may ask at once, and none waits for another's time-out.
        try:
            version = choose_version(self._served_versions())
        except NotServed:
            self._version, self._missing = "", True
            raise
        self._missing = False
        if version != self._version:
            log.info("API version chosen", extra={"group": RESOURCE_GROUP, "version": version})
        self._version = version
        return version

    def _served_versions(self) -> Iterator[str]:
        try:
            group = self._api.get(f"/apis/{RESOURCE_GROUP}")
        except NotFound:
            self._refuse_strangers()
            return
        yield from (version["version"] for version in group.get("versions") or ())

    def _refuse_strangers(self) -> None:
        """Unreachable: what answers 404 is no API server, such as a load balancer without any."""
        try:
            self._api.get("/version")
        except NotFound as e:
            raise Unreachable(
                f"no API server answers, but something that knows nothing: {e}"
            ) from e


def _extended_resource(device_class: Mapping[str, Any]) -> str:
    return str((device_class.get("spec") or {}).get("extendedResourceName") or "")


def _selector(driver: str, node: str) -> str:
    """*node*: empty for all nodes."""
    return f"spec.driver={driver}" + (f",spec.nodeName={node}" if node else "")
