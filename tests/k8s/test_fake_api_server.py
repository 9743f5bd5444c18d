"""The fake API server refuses what the real one refuses; here is what others may rely on."""

from typing import Any

import pytest

from dra_driver.base.errors import Conflict, Gone, NotFound, Refused, Unreachable

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/ns/resourceclaims"


@pytest.fixture
def api(client):
    return client


def node(name="n1", **labels):
    return {"kind": "Node", "metadata": {"name": name, "labels": labels}}


def claim(**more):
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "c", "namespace": "ns"},
        "spec": {"devices": {"requests": [{"name": "a", "exactly": {"count": 1}}]}},
        **more,
    }


def a_slice(*devices, name="s", version="v1", **spec):
    return {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": "d",
            "nodeName": "n1",
            "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1},
            "devices": list(devices),
            **spec,
        },
    }


def test_put_creates_and_then_replaces_and_keeps_the_uid(server):
    first = server.put(node())
    second = server.put(node(a="b"))

    assert second["metadata"]["labels"] == {"a": "b"}
    assert second["metadata"]["uid"] == first["metadata"]["uid"]
    assert len(server.objects("nodes")) == 1


def test_a_status_is_written_apart_from_the_rest(server, api):
    server.put(claim(status={"reservedFor": []}))
    stored = api.get(f"{CLAIMS}/c")

    changed = api.update(f"{CLAIMS}/c", {**stored, "status": {"x": 1}, "spec": {"devices": {}}})
    assert (changed["status"], changed["spec"]) == ({"reservedFor": []}, {"devices": {}})
    changed = api.patch(f"{CLAIMS}/c/status", {"status": {"x": 1}, "spec": {"y": 1}})
    assert (changed["status"], changed["spec"]) == (
        {"reservedFor": [], "x": 1},
        {"devices": {}},
    )


def test_what_has_a_finalizer_stays_until_that_is_gone(server, api):
    server.put(claim(metadata={"name": "c", "namespace": "ns", "finalizers": ["f"]}))
    api.delete(f"{CLAIMS}/c")

    assert api.get(f"{CLAIMS}/c")["metadata"]["deletionTimestamp"]
    api.patch(f"{CLAIMS}/c", {"metadata": {"finalizers": None}})
    with pytest.raises(NotFound):
        api.get(f"{CLAIMS}/c")


def test_an_update_that_changes_nothing_makes_no_version(server, api):
    made = api.create(SLICES, a_slice({"name": "a"}))

    assert api.update(f"{SLICES}/s", made) == made


def test_a_dry_run_stores_nothing(server, api):
    made = api.create(SLICES, a_slice({"name": "a"}), {"dryRun": "All"})

    assert made["spec"]["devices"] == [{"name": "a"}]
    assert server.objects("resourceslices") == []


def test_a_name_is_given_once(api):
    api.create(SLICES, a_slice())

    with pytest.raises(Conflict, match="already exists"):
        api.create(SLICES, a_slice())


def test_what_may_not_change_does_not(api):
    made = api.create(SLICES, a_slice())
    for field, value in {"driver": "e", "nodeName": "n2"}.items():
        with pytest.raises(Refused, match="immutable"):
            api.update(f"{SLICES}/s", {**made, "spec": {**made["spec"], field: value}})


@pytest.mark.parametrize(
    ("version", "device"),
    [
        ("v1", {"name": "a", "basic": {}}),
        ("v1beta2", {"name": "a", "basic": {}}),
        ("v1beta1", {"name": "a", "attributes": {}}),
        ("v1", {"name": "a", "unheardOf": 1}),
    ],
)
def test_a_field_of_another_version_is_refused(api, version, device):
    with pytest.raises(Refused, match="unknown field"):
        path = f"/apis/resource.k8s.io/{version}/resourceslices"
        api.create(path, a_slice(device, version=version))


def test_a_document_of_another_version_than_its_path_is_refused(api):
    with pytest.raises(Refused, match="the path"):
        api.create(SLICES, a_slice(version="v1beta1"))


def test_every_version_shows_the_same_slice_in_its_own_shape(server, api):
    server.put(a_slice({"name": "a", "attributes": {"x": {"int": 1}}}))

    old = api.get("/apis/resource.k8s.io/v1beta1/resourceslices/s")
    assert old["apiVersion"] == "resource.k8s.io/v1beta1"
    assert old["spec"]["devices"] == [{"name": "a", "basic": {"attributes": {"x": {"int": 1}}}}]


def test_a_version_that_is_not_served_is_not_found(server, api):
    server.served = ["v1"]

    with pytest.raises(NotFound):
        api.list("/apis/resource.k8s.io/v1beta1/resourceslices")


def test_only_fields_that_can_be_selected_are(server, api):
    server.put(a_slice())

    assert len(api.list(SLICES, {"fieldSelector": "spec.driver=d,spec.nodeName=n1"})["items"]) == 1
    assert api.list(SLICES, {"fieldSelector": "spec.driver=e"})["items"] == []
    with pytest.raises(Refused, match="not supported"):
        api.list(SLICES, {"fieldSelector": "spec.pool.name=n1"})


def test_a_gate_that_is_off_drops_its_fields_unless_they_were_in_use(server, api):
    taint: dict[str, Any] = {"name": "a", "taints": [{"key": "k", "effect": "NoExecute"}]}
    server.disable("DRADeviceTaints", "DRAPartitionableDevices")
    made = api.create(SLICES, a_slice(taint))
    assert made["spec"]["devices"] == [{"name": "a"}]

    server.enable("DRADeviceTaints")
    made = api.update(f"{SLICES}/s", {**made, "spec": a_slice(taint)["spec"]})
    server.disable("DRADeviceTaints")
    taint["taints"][0]["key"] = "other"
    made = api.update(f"{SLICES}/s", {**made, "spec": a_slice(taint)["spec"]})
    assert made["spec"]["devices"][0]["taints"][0]["key"] == "other"


def test_a_fault_hits_what_it_names_as_often_as_it_says(server, api):
    server.put(node())
    server.fail(500, "PUT", "nodes", times=2)
    node_before = api.get("/api/v1/nodes/n1")
    for _ in range(2):
        with pytest.raises(Unreachable):
            api.update("/api/v1/nodes/n1", node_before)

    assert api.update("/api/v1/nodes/n1", node_before) == node_before


def test_a_fault_can_be_healed(server, api):
    server.put(node())
    server.hang_up(times=99)
    with pytest.raises(Unreachable):
        api.get("/api/v1/nodes/n1")
    server.heal()

    assert api.get("/api/v1/nodes/n1")


def test_it_comes_back_at_the_same_address_with_what_it_had(server, api):
    server.put(node())
    server.refuse_connections()
    with pytest.raises(Unreachable):
        api.get("/api/v1/nodes/n1")
    server.accept_connections()

    assert api.get("/api/v1/nodes/n1")


def test_garbage_is_what_belongs_to_nodes_that_are_gone(server):
    made = server.put(node())
    owner = {"kind": "Node", "name": "n1", "uid": made["metadata"]["uid"]}
    owned = a_slice()
    owned["metadata"]["ownerReferences"] = [owner]
    server.put(owned)
    server.collect_garbage()
    assert len(server.objects("resourceslices")) == 1

    server.remove("nodes", "n1")
    server.collect_garbage()
    assert server.objects("resourceslices") == []


def test_its_log_of_requests_says_what_was_asked(server, api):
    server.put(node())
    api.get("/api/v1/nodes/n1")
    api.watch("/api/v1/nodes", {"resourceVersion": "1"}, 5).close()

    assert [(each.method, each.path) for each in server.requests] == [
        ("GET", "/api/v1/nodes/n1"),
        ("WATCH", "/api/v1/nodes"),
    ]
    assert server.count("GET", "nodes") == 1
    server.forget_requests()
    assert server.requests == ()


@pytest.mark.parametrize("value", ["a" * 64, "-a", "a/b", "a b"])
def test_a_value_that_no_label_can_have_is_refused(server, api, value):
    server.put(node(a="1"))

    with pytest.raises(Refused, match=r"metadata\.labels"):
        api.patch("/api/v1/nodes/n1", {"metadata": {"labels": {"b": value}}})
    assert api.get("/api/v1/nodes/n1")["metadata"]["labels"] == {"a": "1"}


@pytest.mark.parametrize("value", [1, True])
def test_the_value_of_a_label_is_text(server, api, value):
    server.put(node())

    with pytest.raises(Refused, match="cannot unmarshal"):
        api.patch("/api/v1/nodes/n1", {"metadata": {"labels": {"b": value}}})


def test_a_patch_of_a_label_leaves_the_others_and_null_takes_one_away(server, api):
    server.put(node(a="1", b="2"))

    api.patch("/api/v1/nodes/n1", {"metadata": {"labels": {"b": None, "c": "3"}}})

    assert api.get("/api/v1/nodes/n1")["metadata"]["labels"] == {"a": "1", "c": "3"}


def test_a_node_that_is_not_there_cannot_be_patched(api):
    with pytest.raises(NotFound):
        api.patch("/api/v1/nodes/n9", {"metadata": {"labels": {"b": "1"}}})


PROFILES = "/apis/resource.nvidia.com/v1beta1/nodeprofiles"
REVISIONS = "/apis/apps/v1/namespaces/ns/controllerrevisions"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/ns/leases"


def profile(name="p", **spec):
    metadata = {"name": name}
    kind = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "NodeProfile"}
    return {**kind, "metadata": metadata, "spec": spec}


def test_the_status_of_a_custom_resource_is_written_apart_and_not_counted(api):
    made = api.create(PROFILES, {**profile(a=1), "status": {"x": 1}})
    assert ("status" in made, made["metadata"]["generation"]) == (False, 1)

    patch = {"status": {"x": 2}, "spec": {"a": 2}, "metadata": {"labels": {"a": "b"}}}
    changed = api.patch(f"{PROFILES}/p/status", patch)
    assert (changed["status"], changed["spec"]) == ({"x": 2}, {"a": 1})
    assert (changed["metadata"]["generation"], "labels" in changed["metadata"]) == (1, False)

    changed = api.patch(f"{PROFILES}/p", patch)
    assert (changed["status"], changed["spec"]) == ({"x": 2}, {"a": 2})
    assert changed["metadata"]["generation"] == 2


def test_an_object_is_put_with_its_status(server):
    first = server.put({**profile(a=1), "status": {"x": 1}})
    second = server.put({**profile(a=2), "status": {"x": 2}})

    assert (first["status"], second["status"], second["spec"]) == ({"x": 1}, {"x": 2}, {"a": 2})


@pytest.mark.parametrize("path", [LEASES, PROFILES])
def test_some_are_replaced_only_by_who_says_which_version_he_read(api, path):
    kind = {LEASES: {"metadata": {"name": "p"}, "spec": {}}, PROFILES: profile()}[path]
    made = api.create(path, kind)

    with pytest.raises(Refused, match="must be specified for an update"):
        api.update(f"{path}/p", kind)
    assert api.update(f"{path}/p", {**kind, "metadata": made["metadata"]}) == made


def test_a_crd_that_is_removed_takes_its_objects_and_watches_with_it(server, api):
    server.put(profile())
    since = api.list(PROFILES)["metadata"]["resourceVersion"]
    watch = api.watch(PROFILES, {"resourceVersion": since}, 60)

    server.remove_crd("nodeprofiles")

    assert [event["type"] for event in watch] in (["DELETED"], [])
    with pytest.raises(NotFound):
        api.list(PROFILES)
    server.add_crd("nodeprofiles")
    assert api.list(PROFILES)["items"] == []


def test_a_list_is_one_moment_on_all_its_pages_until_that_is_forgotten(server, api):
    for name in "abcd":
        server.put(node(name))
    pages = api.pages("/api/v1/nodes", {"limit": "2"})
    first = next(pages)
    server.remove("nodes", "c")
    second = next(pages)

    names = [each["metadata"]["name"] for page in (first, second) for each in page["items"]]
    assert names == ["a", "b", "c", "d"]
    assert second["metadata"] == {"resourceVersion": first["metadata"]["resourceVersion"]}

    pages = api.pages("/api/v1/nodes", {"limit": "2"})
    next(pages)
    server.forget_history()
    with pytest.raises(Gone):
        next(pages)


def test_labels_are_selected_by_their_value_or_by_being_there(server, api):
    server.put(node("a", x="1", y="1"))
    server.put(node("b", x="2"))

    def selected(selector):
        items = api.list("/api/v1/nodes", {"labelSelector": selector})["items"]
        return [each["metadata"]["name"] for each in items]

    assert (selected("x"), selected("x=2"), selected("x=1,y")) == (["a", "b"], ["b"], ["a"])
