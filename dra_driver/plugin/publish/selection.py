"""Which profile holds on this node: asked of its labels, of the API server and of the files.

The API server is asked once for each change of what chooses, and never for what the node has
already: without it, and without the controller, a node goes on with that.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol
from urllib.parse import quote

from api.names import NODE_PROFILES_PATH, PROFILE_REVISION_ANNOTATION
from api.strict import ConfigError
from dra_driver.base.backoff import Backoff
from dra_driver.base.errors import ApiServerError, DriverError, NotFound, SettingsError
from dra_driver.base.frozen import frozen
from dra_driver.k8s.api import KubernetesApi
from dra_driver.k8s.node_labels import Labels
from dra_driver.model.node_profiles import NodeProfileObject
from dra_driver.model.profiles import Profile
from dra_driver.plan.profiles.objects import read_node_profile
from dra_driver.plan.profiles.revisions import (
    decode_rules,
    profile_of_revision,
    read_revision,
    revisions_path,
)
from dra_driver.plan.profiles.selection import (
    ChoiceKind,
    NodeChoice,
    SelectedProfile,
    choose_on_node,
    label_choice,
    revision_on_node,
    select_file,
    select_profile,
)

log = logging.getLogger(__name__)

_FIRST_WAIT_SECONDS, _LAST_WAIT_SECONDS = 1.0, 300.0


class OwnNode(Protocol):
    """What of the Node says which profile holds; ``k8s.node_labels.NodeLabels`` is one."""

    @property
    def node(self) -> str: ...

    def now(self) -> Labels: ...

    def annotations(self) -> Labels: ...


class NodeProfileReader:
    """Reads NodeProfiles, and their revisions in one namespace. Nothing is kept.

    ApiServerError: it cannot be read. SettingsError: it says what cannot be used, and why.
    """

    def __init__(self, api: KubernetesApi, namespace: str) -> None:
        self._api = api
        self._revisions = revisions_path(namespace)

    def named(self, name: str) -> NodeProfileObject | None:
        """The NodeProfile of that name; None: there is none, or it is about to go."""
        try:
            document = self._api.get(f"{NODE_PROFILES_PATH}/{quote(name, safe='')}")
        except NotFound:  # also where there is no such kind of object
            self._is_api_server()
            return None
        with _settings_errors():
            profile = read_node_profile(document)
        return None if profile.deleting else profile

    def selecting(self, labels: Labels) -> NodeProfileObject | None:
        """The NodeProfile that selects a node with these labels; None: none does."""
        profiles = []
        try:
            for page in self._api.pages(NODE_PROFILES_PATH):
                profiles += [read_node_profile(document) for document in page.get("items") or ()]
        except NotFound:
            self._is_api_server()
            return None
        except ConfigError as e:
            raise SettingsError(f"a NodeProfile cannot be read: {e}") from e
        return select_profile(labels, profiles)

    def _is_api_server(self) -> None:
        """A load balancer without API servers answers 404 to everything: that raises NotFound."""
        self._api.get("/version")

    def revision(self, name: str) -> Profile:
        """What the revision of that name says."""
        document = self._api.get(f"{self._revisions}/{quote(name, safe='')}")
        with _settings_errors():
            revision = read_revision(document)
            return replace(decode_rules(revision.rules, revision.profile), revision=revision.name)

    def revision_of(self, profile: NodeProfileObject, name: str) -> Profile:
        """What the revision *name* of *profile* says, which may be its spec."""
        if name != profile.revision:
            return self.revision(name)
        if profile.problem:
            raise SettingsError(profile.problem)
        with _settings_errors():
            return replace(decode_rules(profile.rules, profile.name), revision=name)


@contextmanager
def _settings_errors() -> Iterator[None]:
    try:
        yield
    except ConfigError as e:
        raise SettingsError(str(e)) from e


@frozen
class Selection:
    """What holds: the *profile*, or the *problem* with it. *selected* is None while it is not known
    what to look for."""

    selected: SelectedProfile | None
    profile: Profile | None = None
    problem: DriverError | None = None


class ProfileSelector:
    """Finds what holds on the *node*. For one thread."""

    def __init__(
        self,
        node: OwnNode,
        of_files: Callable[[str], Profile],
        otherwise: str = "",
        objects: NodeProfileReader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*of_files*: the profile of a name; raises SettingsError. *otherwise*: which one where
        nothing chooses; empty: the default. *objects*: None: there are only files."""
        self._node = node
        self._of_files = of_files
        self._otherwise = otherwise
        self._objects = objects
        self._clock = clock
        self._backoff = Backoff(_FIRST_WAIT_SECONDS, _LAST_WAIT_SECONDS, randomized=True)
        self._asked: object = None  # what the last answer of the API server is about
        self._answer: Selection | None = None  # None: no NodeProfile holds
        self._again_at: float | None = None  # None: the answer counts until something changes

    @property
    def again_in(self) -> float | None:
        """Seconds until the API server has to be asked again; None: it has not."""
        return None if self._again_at is None else max(self._again_at - self._clock(), 0.001)

    def select(self, kept: Profile | None) -> Selection:
        """What holds now. *kept*: the profile in force, also that of an earlier process."""
        try:
            labels = self._node.now()
            given = self._node.annotations().get(PROFILE_REVISION_ANNOTATION)
        except ApiServerError as e:
            return Selection(None, problem=e)
        return self._of_objects(labels, given, kept) or self._file(labels)

    def _of_objects(
        self, labels: Labels, given: str | None, kept: Profile | None
    ) -> Selection | None:
        """What a NodeProfile says; None: none holds."""
        if self._objects is None:
            return None
        choice = choose_on_node(labels, given, None if kept is None else kept.revision)
        if kept is not None and _has(kept, choice, given):
            self._asked = self._again_at = None
            origin = self._origin(choice, labels)
            return Selection(SelectedProfile(kept.name, origin, False, kept.revision), kept)
        if choice.kind is ChoiceKind.FILES:
            self._asked = self._again_at = None
            return None
        question = (choice, given, labels if choice.kind is ChoiceKind.SELECTED else None)
        is_due = self._again_at is not None and self._clock() >= self._again_at
        if question != self._asked or is_due:
            if question != self._asked:
                self._backoff.reset()
            self._answer = self._ask(self._objects, choice, labels, given)
            self._asked, self._again_at = question, None
            if self._answer is not None and self._answer.problem is not None:
                self._again_at = self._clock() + self._backoff.next_seconds()
        return self._answer

    def _ask(
        self, objects: NodeProfileReader, choice: NodeChoice, labels: Labels, given: str | None
    ) -> Selection | None:
        selected = SelectedProfile(choice.name, self._origin(choice, labels), of_files=False)
        try:
            if choice.kind is ChoiceKind.REVISION:
                name = profile_of_revision(choice.name)
                selected = replace(selected, name=name, revision=choice.name)
                return Selection(selected, objects.revision(choice.name))
            by_label = choice.kind is ChoiceKind.LABEL
            profile = objects.named(choice.name) if by_label else objects.selecting(labels)
            if profile is None:
                return None
            revision = revision_on_node(profile, given)
            selected = replace(selected, name=profile.name, revision=revision)
            return Selection(selected, objects.revision_of(profile, revision))
        except (ApiServerError, SettingsError) as e:
            return Selection(selected if selected.name else None, problem=e)

    def _file(self, labels: Labels) -> Selection:
        selected = select_file(self._otherwise, self._node.node, labels)
        try:
            return Selection(selected, self._of_files(selected.name))
        except SettingsError as e:
            return Selection(selected, problem=e)

    def _origin(self, choice: NodeChoice, labels: Labels) -> str:
        label = label_choice(labels)
        match choice.kind:
            case ChoiceKind.LABEL if label:
                return f"label {label[0]} of node {self._node.node}"
            case ChoiceKind.REVISION:
                return f"annotation {PROFILE_REVISION_ANNOTATION} of node {self._node.node}"
            case ChoiceKind.KEPT:
                return "no controller has given another"
        return f"NodeProfiles that select node {self._node.node}"


def _has(kept: Profile, choice: NodeChoice, given: str | None) -> bool:
    """Whether *kept* is what is chosen, so that nobody need be asked. Revisions never change."""
    if not kept.revision:
        return False
    if choice.kind is ChoiceKind.LABEL:
        return kept.name == choice.name and given in (None, kept.revision)
    return choice.name == kept.revision
