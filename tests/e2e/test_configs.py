"""Configurations that users write to stall others: refused in an event, while others are served."""

from tests.e2e.admission import not_enforced, text_of
from tests.e2e.kube import wait
from tests.e2e.manifests import claim, container, pod_of
from tests.fakes.configs import MOST, shapes

SHAPES = {"unknown": "unknown fields", "lists": "lists", "deep": "lists in lists"}


def test_the_costliest_configurations_are_refused_in_an_event_and_stall_nobody(
    kube, driver, tmp_path
):
    """As claims that are older than the admission policy."""
    with not_enforced(kube):
        for name, shape in SHAPES.items():
            path = tmp_path / f"{name}.json"
            path.write_text(text_of(f"costly-{name}", shapes()[shape], MOST))
            kube.kubectl("create", "--validate=false", "-f", str(path))
    for name in SHAPES:
        uses = [{"name": "gpu", "resourceClaimName": f"costly-{name}"}]
        kube.apply(pod_of(f"costly-{name}", [container(uses=({"name": "gpu"},))], uses))
    kube.apply(claim("beside"))
    uses = [{"name": "gpu", "resourceClaimName": "beside"}]
    kube.apply(pod_of("beside", [container(uses=({"name": "gpu"},))], uses))

    kube.wait_pod("beside", "Running")
    for name in SHAPES:

        def refusal(name=name):
            events = kube.events(f"costly-{name}")
            return next((event for event in events if "unknown field" in event), "")

        message = wait(f"the refusal of {name}", refusal, 120)
        assert "unknown field" in message and len(message.encode()) < 2048
        assert kube.phase(f"costly-{name}") == "Pending"
