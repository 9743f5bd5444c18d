"""What pods are told of MPS, in the words of the person who has to mend it."""

from collections.abc import Iterable, Sequence

from dra_driver.model.mps import Incident
from dra_driver.plan.mps_watch import ClaimSpace, Stray


def restarted(incident: Incident, one: ClaimSpace) -> str:
    """The server of this space was restarted."""
    return (
        f"the MPS server of {_gpus([one])} was restarted ({incident.reason}): what "
        f"ran there for claim {one.claim} was ended, and a program that is still there fails at "
        "its next call of CUDA; restart the container if it does not restart by itself"
    )


def not_used(stray: Stray, gpu: str) -> str:
    """A process goes past its server. *gpu*: as people know it."""
    return (
        f"process {stray.process.pid} of the host uses {gpu} for {_claims(stray)} and is no "
        "client of the claim's MPS server: it runs without the limits of MPS. Either it unset or "
        "changed CUDA_MPS_PIPE_DIRECTORY, or it is from before a restart of the server, or the "
        "server does not serve its user; restart the container with the variable as it was given"
    )


def agent_down(one: ClaimSpace, seconds: float, error: str) -> str:
    """Nobody looks after the servers."""
    return (
        f"the MPS agent of this node has not answered for {seconds:g} s: claim {one.claim} goes on "
        f"with its limits on {_gpus([one])}, but nobody restarts its MPS server when that fails, "
        "and new claims under MPS wait; look at the pod of the DaemonSet …-mps-agent on this node "
        f"({error})"
    )


def pod_not_served(spaces: Sequence[ClaimSpace], problems: Iterable[str]) -> str:
    """Containers of a pod that joined the claim of *spaces* cannot use it like this."""
    return (
        f"claim {spaces[0].claim}, which is under MPS on {_gpus(spaces)}, was prepared before this "
        f"pod came, and does not serve all of it: {'; '.join(problems)}"
    )


def about(stray: Stray) -> str:
    """What the processes that go past MPS in the same way have in common."""
    return f"{stray.gpu} {_claims(stray)}"


def _gpus(spaces: Iterable[ClaimSpace]) -> str:
    return ", ".join(dict.fromkeys(name for one in spaces for name in one.known_as.values()))


def _claims(stray: Stray) -> str:
    return _list("claim", map(str, stray.claims))


def _list(word: str, names: Iterable[str]) -> str:
    several = list(names)
    return f"{word}{'s' if len(several) > 1 else ''} {' or '.join(several)}"
