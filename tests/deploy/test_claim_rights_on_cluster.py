"""What the rights of the plugin let it write into claims, without the admission policies."""

from collections.abc import Iterator

import pytest

from dra_driver.base.errors import Refused
from hack.testbed.cluster import Cluster
from tests.deploy.policies import (
    OTHER,
    THERE,
    Call,
    Clients,
    apply_devices,
    claim_device,
    open_clients,
    place,
    remove,
    status_of_claim,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]  # helm is built on first use

CLAIMS = ("claim-mine", "claim-theirs")


@pytest.fixture(scope="module")
def clients(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    if cluster.version.startswith(("1.34", "1.35")):
        pytest.skip("older API servers do not look at whose devices are written")
    directory = tmp_path_factory.mktemp("rights")
    with open_clients(cluster, directory, rights_alone=True) as clients:
        for path, document in (THERE[name] for name in CLAIMS):
            clients.admin.create(path, document)
            status = f"{path}/{document['metadata']['name']}/status"
            clients.admin.patch(status, {"status": document["status"]})
        yield clients
        for name in CLAIMS:
            remove(clients.admin, place(name))


@pytest.mark.point(87)
def test_it_writes_of_its_own_devices(clients: Clients) -> None:
    apply_devices("claim-mine", claim_device())(clients.plugin, {})


@pytest.mark.point(87)
@pytest.mark.parametrize(
    ("call", "right"),
    [
        pytest.param(
            apply_devices("claim-theirs", claim_device(pool=OTHER)),
            "resourceclaims/driver",
            id="of another node",
        ),
        pytest.param(
            apply_devices("claim-mine", claim_device("other.test", reason="Other")),
            "resourceclaims/driver",
            id="of another driver",
        ),
        pytest.param(
            status_of_claim("claim-mine", allocation=None, devices=None),
            "resourceclaims/binding",
            id="the allocation",
        ),
    ],
)
def test_it_writes_nothing_else(clients: Clients, call: Call, right: str) -> None:
    with pytest.raises(Refused, match=f'requires resource="{right}"'):
        call(clients.plugin, {})


@pytest.mark.point(87)
def test_a_token_without_a_node_writes_nothing(clients: Clients) -> None:
    again = apply_devices("claim-mine", claim_device(reason="Again"))
    with pytest.raises(Refused, match='requires resource="resourceclaims/driver"'):
        again(clients.nobody, {})
