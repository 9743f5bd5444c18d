"""A cluster as the controller sees it, whose writes conflict as those of an API server."""

from dataclasses import dataclass, field, replace
from typing import Any

from dra_driver.model.node_profiles import (
    GivenSince,
    NodeProfileObject,
    NodeReport,
    NodeView,
    Revision,
    RolloutRules,
)
from dra_driver.plan.profiles.revisions import canonical_rules, revision_name
from dra_driver.plan.profiles.rollout import (
    Moment,
    Surroundings,
    decide_rollout,
    revisions_in_use,
)

NAME = "inference"
TIME = "2026-01-31T12:00:00Z"


def gpus(replicas):
    return canonical_rules({"gpus": [{"replicas": replicas}]})


def revision(replicas):
    """The name of the revision with these replicas."""
    return revision_name(NAME, gpus(replicas))


def profile(replicas=1, **fields: Any):
    text = gpus(replicas)
    return NodeProfileObject(
        NAME, "uid", "1", 1, rules=text, revision=revision_name(NAME, text), **fields
    )


def kept(replicas, number=1, owner="uid"):
    """The ControllerRevision of these replicas."""
    return Revision(revision(replicas), NAME, number, gpus(replicas), owner, "1")


def report(replicas, **fields: Any):
    return NodeReport(NAME, revision(replicas), **fields)


def node(number, given=None, reports=None, **fields: Any):
    """A node that was *given* a revision and *reports* one, each by its replicas."""
    return NodeView(
        f"node-{number:04}",
        f"uid-{number}",
        "1",
        given=revision(given) if given else given,
        report=report(reports) if reports else NodeReport("default", of_files=True),
        **fields,
    )


@dataclass
class Writer:
    """A process of the controller: what it decided and has not written yet."""

    writes: list[Any] = field(default_factory=list)
    given_since: dict[str, GivenSince] = field(default_factory=dict)


class Fleet:
    """The API server, the plugins of the nodes, and the clock."""

    def __init__(self, nodes=6, rules=RolloutRules(2, in_percent=False)):  # noqa: B008
        self.seconds = 0.0
        self.versions = 1
        self.profile = profile(1, rollout=rules)
        self.nodes = {each.name: each for each in (node(number) for number in range(nodes))}
        self.joined = nodes
        self.revisions: dict[str, Revision] = {}
        self.refusing: set[str] = set()  # nodes that refuse every revision
        self.silent: set[str] = set()  # nodes whose plugin does nothing
        self.given_at: dict[str, float] = {}
        self.leader = Writer()

    def version(self):
        self.versions += 1
        return str(self.versions)

    def specify(self, replicas):
        text = gpus(replicas)
        self.change_profile(rules=text, revision=revision_name(NAME, text))

    def change_rollout(self, **fields):
        self.change_profile(rollout=replace(self.profile.rollout, **fields))

    def change_profile(self, **fields):
        generation = self.profile.generation + 1
        version = self.version()
        self.profile = replace(
            self.profile, resource_version=version, generation=generation, **fields
        )

    def join(self):
        """A node that takes by itself what the profile offers to it."""
        name = self.profile.status.current_revision or self.profile.revision
        self.joined += 1
        new = node(self.joined)
        self.nodes[new.name] = replace(
            new, resource_version=self.version(), report=NodeReport(NAME, name)
        )

    def change_node(self, name, **fields):
        changed = replace(self.nodes[name], **fields)
        if changed != self.nodes[name]:
            self.nodes[name] = replace(changed, resource_version=self.version())

    def act(self, name):
        """The plugin of the node follows the annotation, else tries again what it took itself."""
        now = self.nodes[name]
        revision = now.given or now.report.revision
        if revision and name not in self.silent:
            refusal = "it does not fit" if name in self.refusing else ""
            self.change_node(name, report=NodeReport(NAME, revision, refusal=refusal))

    def decide(self, writer):
        nodes = sorted(self.nodes.values(), key=lambda each: each.name, reverse=True)
        decision = decide_rollout(
            self.profile,
            Surroundings(nodes, tuple(self.revisions.values()), revisions_in_use(nodes)),
            Moment(self.seconds, TIME, writer.given_since),
        )
        writer.given_since = dict(decision.given_since)
        return decision

    def look(self):
        """The leader decides; what it has not written is decided again."""
        decision = self.decide(self.leader)
        writes: list[Any] = []
        if decision.status != self.profile.status:
            writes.append(("status", self.profile.resource_version, decision.status))
        if decision.revision:
            writes.append(("revision", decision.revision))
        writes += [("delete", old) for old in decision.old_revisions]
        writes += [("node", change) for change in decision.nodes]
        self.leader.writes = writes
        return decision

    def write(self, writer, number=0):
        """One of the writes of *writer*, unless it conflicts."""
        if not writer.writes:
            return
        kind, *what = writer.writes.pop(number % len(writer.writes))
        getattr(self, f"_write_{kind}")(*what)

    def _write_status(self, version, status):
        if self.profile.resource_version == version:
            self.profile = replace(self.profile, resource_version=self.version(), status=status)

    def _write_revision(self, change):
        new, before = change.revision, self.revisions.get(change.revision.name)
        if change.exists == (before is not None):
            if before and before.resource_version != new.resource_version:
                return
            self.revisions[new.name] = replace(new, resource_version=self.version())

    def _write_delete(self, old):
        if self.revisions.get(old.name) == old:
            del self.revisions[old.name]

    def _write_node(self, change):
        now = self.nodes.get(change.node)
        if now and now.resource_version == change.resource_version:
            assert change.revision is None or change.revision in self.revisions
            self.change_node(change.node, given=change.revision)
            self.given_at[change.node] = self.seconds

    def without_report(self):
        """The names of the nodes that were given what they do not report."""
        return [
            each.name
            for each in self.nodes.values()
            if each.given and not (each.report and each.report.revision == each.given)
        ]

    def in_progress(self):
        """Those of them that have not failed to report in time."""
        deadline = self.profile.rollout.progress_deadline_seconds
        names = self.without_report()
        return [name for name in names if self.seconds - self.given_at[name] < deadline]

    def settle(self, rounds=200):
        """Everything works until nothing is written any more; how many rounds that took."""
        for number in range(rounds):
            self.look()
            if not self.leader.writes and not self.in_progress():
                return number
            while self.leader.writes:
                self.write(self.leader)
                assert len(self.in_progress()) <= self.limit()
            for name in self.nodes:
                self.act(name)
        raise AssertionError("it does not come to an end")

    def limit(self):
        return self.profile.rollout.nodes_at_once(len(self.nodes))
