"""What holds on a node is asked of the API server once for each change, and of nobody where the
node has it already."""

import pytest

from dra_driver.base.errors import ApiServerError, Forbidden, NotFound, SettingsError, Unreachable
from dra_driver.model.profiles import Profile
from dra_driver.plugin.publish.selection import NodeProfileReader, ProfileSelector
from tests.plugin.publish.node_profiles import (
    GIVEN,
    LABEL,
    NAMESPACE,
    NODE,
    ChoosingNode,
    gpus,
    named,
    put_profile,
    put_revision,
)

FILES = {"default": Profile("default"), "a": Profile("a")}


def of_files(name):
    if name not in FILES:
        raise SettingsError(f"no profile {name!r}")
    return FILES[name]


class Selecting:
    """A selector of a node, and what it has in force."""

    def __init__(self, client, *, kept=None, given=None, label="", objects=True, flag=""):
        self.node = ChoosingNode(given, **({LABEL: label} if label else {}))
        self.now = 0.0
        self.kept = kept
        reader = NodeProfileReader(client, NAMESPACE) if objects else None
        self.selector = ProfileSelector(self.node, of_files, flag, reader, lambda: self.now)

    def select(self):
        """What holds now; it is in force, if it can be used."""
        selection = self.selector.select(self.kept)
        self.kept = selection.profile or self.kept
        return selection

    def in_force(self):
        self.select()
        return (self.kept.name, self.kept.revision) if self.kept else None


@pytest.fixture
def selecting(client):
    return lambda **options: Selecting(client, **options)


def replicas(profile):
    return profile.entries[0].rules.replicas


def test_the_revision_that_the_controller_gave_holds_and_is_read_once(server, selecting):
    given = put_revision(server, "inference", 4)
    node = selecting(given=given)

    selection = node.select()
    assert replicas(selection.profile) == 4
    assert (selection.selected.name, selection.selected.revision) == ("inference", given)
    assert not selection.selected.of_files
    assert node.in_force() == node.in_force() == ("inference", given)
    assert [request.method for request in server.requests] == ["GET"]


def test_of_a_revision_that_is_in_force_nobody_is_asked(server, selecting):
    node = selecting(kept=Profile("inference", revision="inference-1"), given="inference-1")

    assert node.in_force() == ("inference", "inference-1")
    assert server.requests == ()


@pytest.mark.parametrize("kept", [None, Profile("a"), Profile("old", revision="old-1")])
def test_an_empty_revision_means_the_files(server, selecting, kept):
    put_profile(server, "inference", 4)

    assert selecting(kept=kept, given="").in_force() == ("default", "")
    assert server.requests == ()


def test_a_node_that_was_given_none_keeps_what_it_has_of_a_nodeprofile(server, selecting):
    put_profile(server, "inference", 4)
    node = selecting(kept=Profile("old", revision="old-1"))

    assert node.in_force() == ("old", "old-1")
    assert server.requests == ()


def test_a_node_that_was_given_none_and_has_files_goes_on_with_files(server, selecting):
    put_profile(server, "inference", 4)

    assert selecting(kept=Profile("a")).in_force() == ("default", "")
    assert server.requests == ()


def test_a_new_node_takes_by_itself_what_was_rolled_out_everywhere(server, selecting):
    put_profile(server, "inference", 8, current=4)
    current = put_revision(server, "inference", 4)
    node = selecting()

    assert node.in_force() == ("inference", current)
    assert node.in_force() == ("inference", current)
    assert server.count("GET") == 2


def test_a_new_node_takes_the_spec_of_a_profile_that_was_rolled_out_nowhere(server, selecting):
    put_profile(server, "inference", 8)

    assert selecting().in_force() == ("inference", named("inference", 8))
    assert server.count("GET") == 1


def test_a_new_node_asks_again_when_its_labels_change_and_no_sooner(server, selecting):
    put_profile(server, "inference", 8, nodeSelector={"pool": "x"})
    node = selecting(flag="missing")  # nothing comes into force, so it stays a new node
    assert node.in_force() is None
    assert node.in_force() is None
    assert server.count("GET") == 1

    node.node.set(pool="x")
    assert node.in_force() == ("inference", named("inference", 8))


def test_a_new_node_that_nothing_selects_takes_the_files(server, selecting):
    put_profile(server, "inference", 8, nodeSelector={"pool": "other"})

    assert selecting().in_force() == ("default", "")
    assert selecting(flag="a").in_force() == ("a", "")


def test_without_the_kind_of_object_there_are_the_files(server, selecting):
    server.fail(404, "GET", "nodeprofiles", times=2)

    assert selecting().in_force() == ("default", "")
    assert selecting(label="a").in_force() == ("a", "")


@pytest.mark.parametrize("label", ["", "a"])
def test_who_answers_404_to_everything_is_no_api_server(server, selecting, label):
    server.fail(404, times=10**6)
    node = selecting(label=label)

    assert isinstance(node.select().problem, NotFound)
    assert node.kept is None
    server.heal()
    node.now += 1
    assert node.in_force() == (label or "default", "")


def test_a_label_names_a_nodeprofile_before_a_file(server, selecting):
    put_profile(server, "a", 8)

    node = selecting(label="a")
    assert node.in_force() == ("a", named("a", 8))
    assert node.select().selected.origin == f"label {LABEL} of node {NODE}"


def test_a_label_means_the_revision_that_the_controller_gave_of_that_profile(server, selecting):
    put_profile(server, "a", 8, current=4)
    given, other = put_revision(server, "a", 2), put_revision(server, "b", 2)
    current = put_revision(server, "a", 4)

    assert selecting(label="a", given=given).in_force() == ("a", given)
    assert selecting(label="a", given=other).in_force() == ("a", current)


def test_a_label_that_changes_there_and_back_is_looked_up_again(server, selecting):
    put_profile(server, "inference", 8)
    node = selecting(label="inference", given="")
    node.in_force()
    node.node.set(given="")
    assert node.in_force() == ("default", "")

    put_profile(server, "inference", 9)
    node.node.set(given="", **{LABEL: "inference"})
    assert node.in_force() == ("inference", named("inference", 9))


def test_a_labelled_profile_that_is_about_to_go_is_gone(server, client, selecting):
    put_profile(server, "a", 8, finalizers=["test/wait"])
    client.delete("/apis/resource.nvidia.com/v1beta1/nodeprofiles/a")
    assert server.objects("nodeprofiles")

    assert selecting(label="a").in_force() == ("a", "")


def test_a_restart_without_a_controller_takes_no_newer_spec_of_a_labelled_profile(
    server, selecting
):
    put_profile(server, "inference", 9)
    kept = Profile("inference", revision=named("inference", 8))

    assert selecting(label="inference", kept=kept).in_force() == ("inference", kept.revision)
    assert server.requests == ()


def test_a_labelled_profile_that_is_gone_holds_until_the_controller_says_so(server, selecting):
    kept = Profile("a", revision="a-1")
    node = selecting(label="a", kept=kept)
    assert node.in_force() == ("a", "a-1")

    node.node.set(given="", **{LABEL: "a"})
    assert node.in_force() == ("a", "")


def test_without_a_namespace_of_revisions_no_object_is_looked_at(server, selecting):
    put_profile(server, "a", 8)

    assert selecting(label="a", given="b-1", objects=False).in_force() == ("a", "")
    assert server.requests == ()


def test_a_revision_that_is_missing_is_said_and_looked_for_ever_more_seldom(server, selecting):
    kept = Profile("old", revision="old-1")
    node = selecting(given=named("inference", 4), kept=kept)

    selection = node.select()
    assert isinstance(selection.problem, NotFound)
    assert selection.selected.revision == named("inference", 4)
    assert selection.selected.origin == f"annotation {GIVEN} of node {NODE}"
    waits = []
    for _ in range(12):
        waits.append(node.selector.again_in)
        node.now += waits[-1]
        node.select()
    assert server.count("GET", "controllerrevisions") == 13
    assert 0.5 <= waits[0] <= 1
    assert 150 <= waits[-1] <= 300
    assert node.kept is kept

    put_revision(server, "inference", 4)
    node.now += 300
    assert node.in_force() == ("inference", named("inference", 4))
    assert node.selector.again_in is None


def test_between_two_tries_nobody_is_asked(server, selecting):
    node = selecting(given="inference-1")
    for _ in range(3):
        assert node.select().problem

    assert server.count("GET") == 1


def test_another_revision_is_looked_for_at_once(server, selecting):
    node = selecting(given="inference-1")
    for _ in range(12):
        node.select()
        node.now += node.selector.again_in
    node.node.set(given="inference-2")
    node.select()
    assert node.selector.again_in <= 1
    node.node.set(given=put_revision(server, "inference", 4))

    assert node.in_force() == ("inference", named("inference", 4))


@pytest.mark.parametrize(
    ("status", "error"), [(503, Unreachable), (403, Forbidden), (404, NotFound)]
)
def test_an_api_server_that_does_not_answer_changes_nothing(server, selecting, status, error):
    given = put_revision(server, "inference", 4)
    server.fail(status, "GET", "controllerrevisions", times=3)
    node = selecting(given=given, kept=Profile("old", revision="old-1"))

    assert isinstance(node.select().problem, error)
    assert node.kept.name == "old"
    node.now += 1
    server.heal()
    assert node.in_force() == ("inference", given)


def test_a_new_node_without_an_api_server_has_nothing_and_asks_again(server, selecting):
    put_profile(server, "inference", 8)
    server.fail(503, "GET", "nodeprofiles", times=3)
    node = selecting()

    selection = node.select()
    assert isinstance(selection.problem, ApiServerError)
    assert selection.selected is None
    node.now += 1
    assert node.in_force() == ("inference", named("inference", 8))


def test_a_revision_of_which_nothing_can_be_made_is_refused_with_its_field(server, selecting):
    put_profile(server, "inference", 8)
    broken = {"fractions": "Never", "replicas": 4}
    server.put(
        {
            "apiVersion": "resource.nvidia.com/v1beta1",
            "kind": "NodeProfile",
            "metadata": {"name": "broken"},
            "spec": {"gpus": [broken]},
        }
    )
    selection = selecting(label="broken").select()

    assert isinstance(selection.problem, SettingsError)
    assert str(selection.problem).startswith("spec.gpus[0].replicas: has no effect with fractions")
    assert selection.selected.name == "broken"


def test_a_revision_whose_data_are_not_what_its_name_says_is_refused(server, selecting):
    name = named("inference", 4)
    server.put(
        {
            "apiVersion": "apps/v1",
            "kind": "ControllerRevision",
            "metadata": {
                "name": name,
                "namespace": NAMESPACE,
                "labels": {"resource.nvidia.com/node-profile": "inference"},
            },
            "data": {"spec": {"gpus": gpus(5)}},
            "revision": 1,
        }
    )

    problem = selecting(given=name).select().problem
    assert isinstance(problem, SettingsError)
    assert "is not what revision" in str(problem)


def test_an_annotation_that_is_no_name_reaches_nothing_else(server, selecting):
    assert isinstance(selecting(given="../../../../v1/nodes/n1").select().problem, ApiServerError)
    assert "/" not in server.requests[0].path.partition("/controllerrevisions/")[2]


def test_labels_that_are_not_known_leave_all_as_it_is(selecting):
    node = selecting(kept=Profile("old", revision="old-1"))
    node.node.error = Unreachable("no answer")

    selection = node.select()
    assert (selection.selected, selection.profile) == (None, None)
    assert str(selection.problem) == "no answer"
