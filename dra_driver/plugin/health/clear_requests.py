"""The annotation of the own Node by which an administrator says that GPUs are well."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from api.names import CLEAR_FAULTS_ANNOTATION
from dra_driver.base.backoff import Backoff
from dra_driver.base.errors import ApiServerError
from dra_driver.k8s.api import KubernetesApi
from dra_driver.model.gpus import Gpu, GpuUuid
from dra_driver.model.health import HealthState
from dra_driver.plan.health.state import cleared

log = logging.getLogger(__name__)

ALL: Final = "all"
_FIRST_WAIT_SECONDS, _LAST_WAIT_SECONDS = 1.0, 300.0  # until it is tried again to remove it


class ClearAnnotation:
    """Acts on each annotation once, and then removes it. For one thread."""

    def __init__(
        self,
        api: KubernetesApi,
        node: str,
        annotations: Callable[[], Mapping[str, str]],
        clock: Callable[[], float],
    ) -> None:
        """*annotations*: of the Node, as last seen; ApiServerError: they are not known yet."""
        self._api = api
        self._path = f"/api/v1/nodes/{node}"
        self._annotations = annotations
        self._clock = clock
        self._acted_on = ""  # and not seen to be gone since
        self._is_removed = False
        self._backoff = Backoff(_FIRST_WAIT_SECONDS, _LAST_WAIT_SECONDS)
        self._again_at = float("-inf")
        self._logged_error = ""

    def seen(self) -> None:
        """The annotations are others now: one that is gone may come again. For the thread that
        sees every change."""
        try:
            if CLEAR_FAULTS_ANNOTATION not in self._annotations():
                self._acted_on = ""
        except ApiServerError:
            return

    def apply(self, state: HealthState, gpus: Sequence[Gpu]) -> HealthState:
        """*state* without the faults of the GPUs that are named."""
        try:
            request = self._annotations().get(CLEAR_FAULTS_ANNOTATION, "")
        except ApiServerError:
            return state
        if not request or request == self._acted_on:
            return state
        self._acted_on, self._is_removed = request, False
        self._again_at = float("-inf")
        named, unknown = named_gpus(request, gpus)
        log.info("an administrator says that GPUs are well", extra={"gpus": request})
        if unknown:
            facts = {"annotation": CLEAR_FAULTS_ANNOTATION, "unknown": ",".join(unknown)}
            log.warning("the annotation names GPUs that this node does not have", extra=facts)
        for gpu in named:
            state = cleared(state, gpu)
        return state

    def done(self) -> float | None:
        """Remove the annotation that was acted on, unless it is another one by now. The seconds
        until it is tried again, if it failed."""
        if not self._acted_on or self._is_removed:
            return None
        if (seconds := self._again_at - self._clock()) > 0:
            return seconds
        try:
            self._remove()
        except ApiServerError as error:
            seconds = self._backoff.next_seconds()
            self._again_at = self._clock() + seconds
            if str(error) != self._logged_error:
                facts = {"annotation": CLEAR_FAULTS_ANNOTATION, "error": str(error)}
                log.warning("an annotation of the Node cannot be removed", extra=facts)
            self._logged_error = str(error)
            return seconds
        self._is_removed, self._logged_error = True, ""
        self._backoff.reset()
        return None

    def _remove(self) -> None:
        metadata = self._api.get(self._path)["metadata"]
        if (metadata.get("annotations") or {}).get(CLEAR_FAULTS_ANNOTATION) != self._acted_on:
            return  # the watch tells which one it is
        patch = {
            "resourceVersion": metadata["resourceVersion"],  # Conflict: it may have changed
            "annotations": {CLEAR_FAULTS_ANNOTATION: None},
        }
        self._api.patch(self._path, {"metadata": patch})


def named_gpus(request: str, gpus: Iterable[Gpu]) -> tuple[list[GpuUuid | None], list[str]]:
    """The GPUs that *request* names ("gpu-0, GPU-…"; None: "all"), and the words in it that name
    none."""
    by_name: dict[str, GpuUuid | None] = {ALL: None}
    for gpu in gpus:
        by_name[gpu.name] = by_name[gpu.uuid] = gpu.uuid
    words = [word for part in request.split(",") if (word := part.strip())]
    named = dict.fromkeys(by_name[word] for word in words if word in by_name)
    return list(named), [word for word in words if word not in by_name]
