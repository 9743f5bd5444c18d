"""Which pods use which claim: the first one prepares it, the last one unprepares it."""

import threading
from collections.abc import Sequence

from dra_driver.base.threads import NamedLocks
from dra_driver.k8s.claims import ClaimRef, ClaimUid, PreparedDevice
from hack.testbed.kubelet_standin.claims import Devices
from tests.fakes.kubelet import FakeKubelet


class SharedClaims:
    """The claims of the pods that live."""

    def __init__(self, kubelet: FakeKubelet) -> None:
        self._kubelet = kubelet
        self._claims = NamedLocks("the claim with UID {name} was busy for {seconds} s")
        self._guard = threading.Lock()
        self._users: dict[ClaimUid, set[str]] = {}
        self._drivers: dict[ClaimUid, tuple[str, ...]] = {}

    def prepare(self, pod_uid: str, claims: Sequence[tuple[ClaimRef, tuple[str, ...]]]) -> Devices:
        """Prepare for a pod, driver by driver: one call to each (manager.go, prepareResources)."""
        with self._guard:
            for ref, names in claims:
                self._users.setdefault(ref.uid, set()).add(pod_uid)
                self._drivers[ref.uid] = names
        devices: dict[ClaimUid, Sequence[PreparedDevice]] = {ref.uid: () for ref, _ in claims}
        with self._claims.hold([ref.uid for ref, _ in claims], 60):
            for driver in sorted({name for _, names in claims for name in names}):
                refs = [ref for ref, names in claims if driver in names]
                devices |= self._kubelet.prepare(refs, driver)
        return devices

    def unprepare(self, pod_uid: str, refs: Sequence[ClaimRef]) -> None:
        """Unprepare what no other pod uses. KubeletError: ask again."""
        for ref in refs:
            with self._guard:
                users = self._users.get(ref.uid, set())
                if users - {pod_uid}:
                    users.discard(pod_uid)
                    continue
                names = self._drivers.get(ref.uid, ())
            for driver in names:
                self._kubelet.unprepare([ref], driver)
            with self._guard:
                self._users.pop(ref.uid, None)
                self._drivers.pop(ref.uid, None)
