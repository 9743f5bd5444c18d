"""Configurations that users write to stall others: refused in an event, while others are served."""

import json

from tests.e2e.kube import wait
from tests.e2e.manifests import claim, container, pod_of, sharing
from tests.fakes.configs import MOST, shapes

SHAPES = {"unknown": "unknown fields", "lists": "lists", "deep": "lists in lists"}


def written(name, parameters):
    """The claim called *name* with as many of these configurations as it can have, as text: Python
    writes no JSON of 5,000 levels."""
    document = claim(name, config=[sharing()])
    (config,) = document["spec"]["devices"]["config"]
    config["opaque"]["parameters"] = "PARAMETERS"
    config_text = json.dumps(config).replace('"PARAMETERS"', parameters)
    document["spec"]["devices"]["config"] = ["CONFIG"]
    return json.dumps(document).replace('"CONFIG"', ",".join([config_text] * MOST))


def test_the_costliest_configurations_are_refused_in_an_event_and_stall_nobody(
    kube, driver, tmp_path
):
    for name, shape in SHAPES.items():
        path = tmp_path / f"{name}.json"
        path.write_text(written(f"costly-{name}", shapes()[shape]))
        kube.kubectl("create", "--validate=false", "-f", str(path))
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
