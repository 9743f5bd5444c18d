"""What a container cannot have under MPS, and whose containers may be under it at all.

A program reaches the one MPS server that its environment names, and sees the GPUs of that server
and no others. So all that a container has of GPUs is on one server, or nothing of it is.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dra_driver.kubeletplugin.claims import ClaimRef
from dra_driver.kubeletplugin.pods import ContainerSpec, PodSpec
from dra_driver.model.profiles import Tenants

_NOT_ROOT = (
    "securityContext.runAsNonRoot: true (or a runAsUser) and allowPrivilegeEscalation: false, "
    "without privileged and without added capabilities"
)


@dataclass(frozen=True, slots=True)
class User:
    """A container of a pod, and what it uses."""

    pod: PodSpec
    container: ContainerSpec

    def requests(self, claim: ClaimRef, known: Collection[str]) -> set[str]:
        """Which of the *known* requests of *claim* it uses; one without a name may be any."""
        its = {request for name, request in self.container.uses if name == claim.name}
        if self.pod.namespace != claim.namespace or not its:
            return set()
        return {one for one in known if "" in its or one in ("", *its)}

    def __str__(self) -> str:
        return f"pod {self.pod.namespace}/{self.pod.name}, container {self.container.name!r}"


def users(pods: Iterable[PodSpec]) -> tuple[User, ...]:
    """All containers of *pods*."""
    return tuple(User(pod, container) for pod in pods for container in pod.containers)


def mixed_problems(
    claim: ClaimRef, used: Iterable[User], ours: set[str], everything: set[str]
) -> Iterator[str]:
    """Containers with requests of *claim* under MPS (*ours*) and others without."""
    for one in used:
        requests = one.requests(claim, everything)
        if requests & ours and requests - ours:
            yield (
                f"{one} uses request {_list(requests & ours)} under MPS and "
                f"{_list(requests - ours)} without: a program under MPS sees no other GPU; use the "
                "same strategy for both, or different containers"
            )


def split_problems(
    claim: ClaimRef,
    used: Sequence[User],
    groups: Iterable[set[str]],
    gpus: Mapping[str, set[str]],
) -> Iterator[str]:
    """Containers with some of the GPUs of a server that others need to be over more.

    *groups*: the requests that share a server; *gpus*: the names of the GPUs of each request.
    """
    for group in groups:
        everything = set().union(*(gpus[request] for request in group))
        for one in used:
            has = set().union(*(gpus[request] for request in one.requests(claim, group)))
            if has and has != everything:
                yield (
                    f"{one} uses {_list(has)} under MPS, and another container "
                    f"{_list(everything)}: a GPU of a claim is on one MPS server; let both use the "
                    "same requests, or write a claim for each"
                )


def tenant_problems(
    tenants: Tenants, claim: ClaimRef, pod: PodSpec, requests: Collection[str]
) -> list[str]:
    """The containers for which *pod* may not use *requests*, those of *claim* under MPS.

    A container that does not name the claim counts too, an init or ephemeral one as well: what one
    has of MPS it can hand to the others of its pod, in a volume or by a socket.
    """
    everybody = users([pod])
    its = tuple(one for one in everybody if one.requests(claim, requests))
    if not its or not pod.host_users or tenants is Tenants.ANY:
        return []
    if tenants is Tenants.USER_NAMESPACES:
        said = (
            ": this node's profile lets only pods with a user namespace share a GPU by MPS "
            "(mpsTenants: UserNamespaces); set spec.hostUsers: false"
        )
        return [f"{one}{said}" for one in its]
    said = (
        " can run as root or become it, and this node's profile lets no pod with such a container "
        f"share a GPU by MPS (mpsTenants: NonRoot); set {_NOT_ROOT}, or spec.hostUsers: false"
    )
    return [f"{one}{said}" for one in everybody if one.container.root]


def strictest(tenants: Iterable[Tenants]) -> Tenants:
    """The rule that holds where several do."""
    return max(tenants, key=list(Tenants).index, default=Tenants.ANY)


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
