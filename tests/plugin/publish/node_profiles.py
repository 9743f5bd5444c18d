"""NodeProfiles and their revisions in a fake API server, and a Node that chooses among them."""

from dra_driver.model.node_profiles import Revision
from dra_driver.plan.profiles.revisions import canonical_rules, revision_document, revision_name

NODE = "n1"
NAMESPACE = "gpus"
GIVEN = "gpu.nvidia.com/profile-revision"
LABEL = "gpu.nvidia.com/profile"


def gpus(replicas):
    return [{"replicas": replicas}]


def named(profile, replicas):
    """The name of the revision of *profile* with so many replicas."""
    return revision_name(profile, canonical_rules({"gpus": gpus(replicas)}))


def put_profile(server, name, replicas, current=0, finalizers=(), **spec):
    """A NodeProfile; *current*: the replicas of its revision that was rolled out everywhere."""
    status = {"currentRevision": named(name, current)} if current else {}
    return server.put(
        {
            "apiVersion": "resource.nvidia.com/v1beta1",
            "kind": "NodeProfile",
            "metadata": {"name": name, "finalizers": list(finalizers)},
            "spec": {"gpus": gpus(replicas), **spec},
            "status": status,
        }
    )


def put_revision(server, profile, replicas):
    """A revision of *profile*, as the controller keeps it; its name."""
    text = canonical_rules({"gpus": gpus(replicas)})
    revision = Revision(revision_name(profile, text), profile, 1, text, owner_uid="1")
    server.put(revision_document(revision, NAMESPACE))
    return revision.name


class ChoosingNode:
    """The labels and the annotation of a Node, and who follows them."""

    node = NODE
    uid = "uid-1"

    def __init__(self, given=None, **labels):
        self.labels = labels
        self.given = given
        self.error = None
        self.listeners = []

    def now(self):
        if self.error:
            raise self.error
        return dict(self.labels)

    def annotations(self):
        return {} if self.given is None else {GIVEN: self.given}

    def start(self, on_change, wait_seconds):
        self.listeners.append(on_change)

    def stop(self):
        return True

    def set(self, given=None, **labels):
        self.given, self.labels = given, labels
        for listener in self.listeners:
            listener()
