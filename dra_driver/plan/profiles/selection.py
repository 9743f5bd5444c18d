"""What holds on a node: a label on it, the NodeProfiles that select it, or the files.

1. A label that a person put on the Node names a NodeProfile, else a profile of the files.
2. Of the NodeProfiles that select the Node the one of the highest priority, of these the oldest.
3. The files.

The plugin of a node asks this for itself (``choose_on_node``), the controller for all nodes at once
(``assign_nodes``).
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto

from api.names import DEVICE_PLUGIN_CONFIG_LABEL, PROFILE_LABEL
from dra_driver.base.frozen import frozen
from dra_driver.model.node_profiles import NodeProfileObject, NodeView
from dra_driver.model.profiles import DEFAULT_PROFILE
from dra_driver.plan.profiles.revisions import profile_of_revision


class ChoiceKind(Enum):
    """Where the plugin of a node finds what holds."""

    LABEL = auto()  # the NodeProfile that a label names; without one, the file of that name
    REVISION = auto()  # the ControllerRevision that the controller gave the node
    KEPT = auto()  # what the node keeps from an earlier NodeProfile
    SELECTED = auto()  # the NodeProfile that selects the node (``select_profile``), else the files
    FILES = auto()


@frozen
class NodeChoice:
    """Where to look, and the name of the profile or revision where the node has that already."""

    kind: ChoiceKind
    name: str = ""


@frozen
class Assignment:
    """Which NodeProfile holds on which node."""

    nodes: Mapping[str, list[NodeView]]  # by profile, one list for each
    without_profile: list[NodeView]  # neither a label nor a NodeProfile chooses there
    ties: Mapping[str, frozenset[str]]  # by profile: others of its priority that select a node, too


def label_choice(labels: Mapping[str, str]) -> tuple[str, str] | None:
    """The label that chooses the profile of a node, and its value."""
    for label in (PROFILE_LABEL, DEVICE_PLUGIN_CONFIG_LABEL):
        if name := labels.get(label):
            return label, name
    return None


@frozen
class SelectedProfile:
    """A profile by name, and who chose it."""

    name: str
    origin: str  # "label … of node …", "--profile", "nothing chooses another"
    of_files: bool = True  # or bundled; else it is a NodeProfile
    revision: str = ""  # of a NodeProfile; empty: that is not known


def select_file(flag: str, node: str, labels: Mapping[str, str]) -> SelectedProfile:
    """The profile of files: a label of the *node* names it, else the flag, else it is the
    default."""
    if label := label_choice(labels):
        return SelectedProfile(label[1], f"label {label[0]} of node {node}")
    if flag:
        return SelectedProfile(flag, "--profile")
    return SelectedProfile(DEFAULT_PROFILE.name, "nothing chooses another")


def choose_on_node(labels: Mapping[str, str], given: str | None, kept: str | None) -> NodeChoice:
    """What holds on the node with these *labels*.

    *given*: the revision that the controller gave it, "" for no NodeProfile, None for no word.
    *kept*: the revision that the node keeps on disk, "" for what files said, None for nothing.
    """
    if label := label_choice(labels):
        return NodeChoice(ChoiceKind.LABEL, label[1])
    if given:
        return NodeChoice(ChoiceKind.REVISION, given)
    if given is None and kept is None:
        return NodeChoice(ChoiceKind.SELECTED)
    if given is None and kept:
        return NodeChoice(ChoiceKind.KEPT, kept)
    return NodeChoice(ChoiceKind.FILES)


def revision_on_node(profile: NodeProfileObject, given: str | None = None) -> str:
    """The revision of *profile* that a node takes by itself: the one that it was *given*, else the
    last one that was rolled out everywhere, else that of the spec."""
    if given and profile_of_revision(given) == profile.name:
        return given
    return profile.status.current_revision or profile.revision


def select_profile(
    labels: Mapping[str, str], profiles: Iterable[NodeProfileObject]
) -> NodeProfileObject | None:
    """The NodeProfile that holds on a node with these *labels* that itself names none."""
    matching = [profile for profile in profiles if _selects(profile, labels)]
    return min(matching, key=_precedence, default=None)


def assign_nodes(profiles: Sequence[NodeProfileObject], nodes: Iterable[NodeView]) -> Assignment:
    """Which of *profiles* holds on which of *nodes*.

    A node whose label names a file is nobody's, and so is one with a revision of a profile that
    cannot be read: it keeps what it has.
    """
    assigned: dict[str, list[NodeView]] = {profile.name: [] for profile in profiles}
    usable = {profile.name for profile in profiles if _is_usable(profile)}
    unreadable = {profile.name for profile in profiles if profile.problem}
    selection = _Selection(profiles)
    without_profile: list[NodeView] = []
    for node in nodes:
        if label := label_choice(node.labels):
            if label[1] in usable:
                assigned[label[1]].append(node)
        elif unreadable and _profile_on(node) in unreadable:
            continue
        elif holder := selection.holder(node.labels):
            assigned[holder].append(node)
        else:
            without_profile.append(node)
    return Assignment(assigned, without_profile, selection.ties())


class _Selection:
    """What selects a node, found once for all nodes with the same values of the labels that any
    selector asks for: a cluster has thousands of nodes, but few kinds of them."""

    def __init__(self, profiles: Sequence[NodeProfileObject]) -> None:
        self._profiles = sorted(filter(_is_usable, profiles), key=_precedence)
        self._keys = sorted({key for each in self._profiles for key in each.node_selector})
        self._holders: dict[tuple[str | None, ...], str] = {}
        self._ties: dict[str, set[str]] = {}

    def holder(self, labels: Mapping[str, str]) -> str:
        """The name of the profile; empty: none selects the node."""
        values = tuple([labels.get(key) for key in self._keys])
        holder = self._holders.get(values)
        if holder is None:
            holder = self._holders[values] = self._select(labels)
        return holder

    def ties(self) -> dict[str, frozenset[str]]:
        return {name: frozenset(others) for name, others in self._ties.items()}

    def _select(self, labels: Mapping[str, str]) -> str:
        matching = [profile for profile in self._profiles if _selects(profile, labels)]
        if not matching:
            return ""
        tied = {each.name for each in matching if each.priority == matching[0].priority}
        for name in tied if len(tied) > 1 else ():
            self._ties.setdefault(name, set()).update(tied - {name})
        return matching[0].name


def _is_usable(profile: NodeProfileObject) -> bool:
    return not (profile.problem or profile.deleting)


def _selects(profile: NodeProfileObject, labels: Mapping[str, str]) -> bool:
    return _is_usable(profile) and all(
        labels.get(key) == value for key, value in profile.node_selector.items()
    )


def _precedence(profile: NodeProfileObject) -> tuple[int, str, str]:
    return -profile.priority, profile.created, profile.name


def _profile_on(node: NodeView) -> str:
    """The NodeProfile that a node was given or, without a word, took by itself."""
    if node.given is not None:
        return profile_of_revision(node.given)
    return node.report.profile if node.report and not node.report.of_files else ""
