"""``dra-driver uninstall-check``: which claims still need the driver, anywhere in the cluster."""

from dra_driver.base.errors import NotServed
from dra_driver.cli.findings import abbreviated
from dra_driver.k8s.api import KubernetesApi
from dra_driver.k8s.claims import HeldClaim, held_claims
from dra_driver.k8s.resource_api import ResourceApi

_MAX_SHOWN = 20  # claims; the kubelet keeps 2 KiB of what a container says at its end


def uninstall_problem(api: KubernetesApi, driver: str) -> str:
    """Which claims *driver* has to go on serving; empty: none. ApiServerError: it is not known.

    Containers with GPUs by the device-plugin API can end without it.
    """
    try:
        claims = sorted(held_claims(ResourceApi(api), driver))
    except NotServed:
        return ""
    if not claims:
        return ""
    lines = [f"  {_line(claim)}" for claim in claims[:_MAX_SHOWN]]
    if len(claims) > _MAX_SHOWN:
        lines.append(f"  and {len(claims) - _MAX_SHOWN} more")
    return "\n".join(
        [
            f"{len(claims)} claims hold devices of {driver}. Without the driver their pods cannot "
            "end, and containers of theirs that were restarted may lack devices:"
            if len(claims) > 1
            else f"a claim holds devices of {driver}. Without the driver its pods cannot end:",
            *lines,
            "Delete these pods first. `helm uninstall --no-hooks` does not ask.",
        ]
    )


def _line(claim: HeldClaim) -> str:
    pods = f"pods: {abbreviated(claim.pods)}" if claim.pods else "no pod: delete the claim"
    return f"{claim.namespace}/{claim.name}  {pods}"
