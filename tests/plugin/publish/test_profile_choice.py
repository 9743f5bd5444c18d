"""The profile in force follows label, flag and files, and outlives whatever becomes of them."""

import logging
import threading
import time

import pytest

from dra_driver.base.errors import ApiServerError, SettingsError
from dra_driver.k8s.node_labels import NodeLabels
from dra_driver.k8s.watch import WatchIntervals
from dra_driver.model.profiles import Profile
from dra_driver.node.state.profile_files import LastProfileFile
from dra_driver.plugin.publish.profiles import ActiveProfile, ProfileCatalog
from dra_driver.plugin.publish.selection import ProfileSelector

NODE = "n1"
LABEL, OLDER = "gpu.nvidia.com/profile", "nvidia.com/device-plugin.config"
FAST = WatchIntervals(watch=60, first_retry=0.01, last_retry=0.05)
PROFILE = """
apiVersion: resource.nvidia.com/v1beta1
kind: NodeProfile
spec: {{gpus: [{{replicas: {}}}]}}
"""


def choice_of(directory, flag="", labels=None, **options):
    """A choice between files in a directory, by *labels*, else by the *flag*."""
    profiles, labels = ProfileCatalog(directory), labels or NodeWithoutLabels()
    selector = ProfileSelector(labels, profiles.named, flag)
    return ActiveProfile(profiles, selector, labels, **options)


class NodeWithoutLabels:
    node = NODE

    def now(self):
        return {}

    def annotations(self):
        return {}

    def start(self, on_change, wait_seconds):
        pass

    def stop(self):
        return True


class Running:
    """A choice between files in a directory, by the labels in a fake API server, else by a flag."""

    def __init__(self, directory, labels, flag):
        self.directory = directory
        self.changed = threading.Condition()
        self.changes = 0
        self.on_change = self.count
        self.choice = choice_of(directory, flag, labels, look_seconds=0.01)
        self.choice.on_change.append(lambda: self.on_change())

    def start(self, wait_seconds=5.0):
        self.choice.start(wait_seconds)
        return self

    def write(self, name, text):
        replace(self.directory / name, text)

    def wait(self, predicate, seconds=60):
        """Wait until *predicate* holds of the choice, asked after every change."""
        with self.changed:
            return self.changed.wait_for(lambda: predicate(self.choice), seconds)

    def is_in_force(self, name):
        return self.wait(lambda choice: name_of(choice) == name)

    def count(self):
        with self.changed:
            self.changes += 1
            self.changed.notify_all()


def replace(path, text):
    fresh = path.with_name(f".{path.name}")
    fresh.write_text(text)
    fresh.rename(path)


def name_of(choice):
    try:
        return choice.current().name
    except (SettingsError, ApiServerError):
        return None


@pytest.fixture
def label(server):
    """Give the Node these labels."""

    def put(**labels):
        named = {{"new": LABEL, "old": OLDER}[key]: value for key, value in labels.items()}
        server.put({"apiVersion": "v1", "kind": "Node", "metadata": metadata(named)})

    return put


def metadata(labels):
    return {"name": NODE, "labels": {"kubernetes.io/hostname": NODE, **labels}}


@pytest.fixture
def run(client, tmp_path):
    """A choice that runs, with the profiles a, b and c; by labels, unless a flag is given."""
    started = []
    (tmp_path / "profiles").mkdir()
    for number, name in enumerate("abc", 2):
        (tmp_path / "profiles" / name).write_text(PROFILE.format(number))

    def run(flag=""):
        labels = NodeLabels(client, NODE, FAST)
        started.append(Running(tmp_path / "profiles", labels, flag))
        return started[-1]

    yield run
    for running in started:
        running.choice.stop()


@pytest.fixture
def running(server, label, run):
    """Profile a is in force, by its label, and the Node is watched."""
    label(new="a")
    running = run().start()
    assert is_watching(server)
    return running


def is_watching(server, times=1):
    return server.wait(lambda: server.count("WATCH", "nodes") >= times)


def test_the_flag_decides_where_no_label_does(server, label, run):
    label()
    running = run("a").start()
    assert running.choice.current().name == "a"

    label(new="b")
    assert running.is_in_force("b")
    label()
    assert running.is_in_force("a")
    assert running.choice.error is None


def test_a_label_that_changes_or_goes_counts_at_once(server, label, running):
    label(new="b", old="c")
    assert running.is_in_force("b")
    label(old="c")
    assert running.is_in_force("c")
    label()
    assert running.is_in_force("default")
    assert server.count("GET") == 1


def test_other_changes_of_the_node_change_nothing(server, label, running):
    before, changes = running.choice.current(), running.changes

    node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata({LABEL: "a"})}
    server.put({**node, "spec": {"unschedulable": True}})
    label(new="b")

    assert running.is_in_force("b")
    assert running.changes == changes + 1
    label(new="a")
    assert running.is_in_force("a")
    assert running.choice.current() == before


def test_a_file_that_changes_counts_within_moments(label, run):
    label(new="a")
    running = run().start()

    running.write("a", PROFILE.format(9))

    assert running.wait(lambda choice: choice.current().entries[0].rules.replicas == 9)


def mounted(directory, version, replicas):
    """Has profile m in *directory*, as the kubelet mounts a ConfigMap, or changes it there."""
    data = directory / f"..{version}"
    data.mkdir()
    (data / "m").write_text(PROFILE.format(replicas))
    (directory / "..data_tmp").symlink_to(data.name)
    (directory / "..data_tmp").rename(directory / "..data")
    if not (directory / "m").is_symlink():
        (directory / "m").symlink_to("..data/m")


def test_files_are_not_looked_at_where_the_kernel_tells_of_changes(tmp_path):
    profiles, elsewhere = tmp_path / "profiles", tmp_path / "elsewhere"
    for directory in (profiles, elsewhere):
        directory.mkdir()
    (elsewhere / "file").write_text(PROFILE.format(2))
    (profiles / "linked").symlink_to(elsewhere / "file")
    changes = threading.Event()
    choice = choice_of(profiles, "linked", look_seconds=3600)
    choice.on_change.append(changes.set)
    choice.start()
    changes.clear()

    replace(elsewhere / "file", PROFILE.format(3))
    assert changes.wait(20)
    choice.stop()
    assert choice.current().entries[0].rules.replicas == 3


def test_a_configmap_that_changes_counts_at_once(tmp_path):
    mounted(tmp_path, "first", 2)
    changes = threading.Event()
    choice = choice_of(tmp_path, "m", look_seconds=3600)
    choice.on_change.append(changes.set)
    choice.start()
    for version, replicas in (("second", 3), ("third", 4)):
        changes.clear()
        mounted(tmp_path, version, replicas)
        assert changes.wait(20)
        assert choice.current().entries[0].rules.replicas == replicas
    choice.stop()


def test_files_that_cannot_be_watched_are_looked_at(tmp_path):
    changes = threading.Event()
    choice = choice_of(tmp_path / "p", "p", look_seconds=0.01)
    choice.on_change.append(changes.set)
    choice.start()
    assert choice.error
    changes.clear()

    replace(tmp_path / "p", PROFILE.format(3))  # of what is missing nothing is told

    assert changes.wait(20)
    choice.stop()
    assert choice.current().entries[0].rules.replicas == 3


def test_the_profile_stays_the_same_object_when_another_file_changes(label, run):
    label(new="a")
    running = run().start()
    before = running.choice.current()

    running.write("b", PROFILE.format(9))
    running.write("c", "spec: [")
    time.sleep(0.1)

    assert running.choice.current() is before
    assert running.choice.error is None


def test_an_unknown_profile_leaves_the_last_one_in_force_and_is_said(server, label, running):
    label(new="x")

    assert running.wait(lambda choice: choice.error)
    assert running.choice.current().name == "a"
    assert running.choice.error == (
        f"label {LABEL} of node {NODE}: no profile 'x' in {running.directory}; there are: "
        "a, b, c, default, exclusive, mig; profile 'a' stays in force"
    )
    label(new="b")
    assert running.is_in_force("b")
    assert running.choice.error is None


def test_a_profile_that_breaks_stays_in_force_as_it_was_until_it_is_mended(label, run):
    label(new="a")
    running = run().start()

    running.write("a", PROFILE.format(0))
    assert running.wait(lambda choice: choice.error)
    assert running.choice.current().entries[0].rules.replicas == 2
    assert "spec.gpus[0].replicas: 0" in running.choice.error

    running.write("a", PROFILE.format(5))
    assert running.wait(lambda choice: choice.error is None)
    assert running.choice.current().entries[0].rules.replicas == 5


@pytest.mark.parametrize("flag", ["", "x"])
def test_with_no_good_one_yet_the_reason_is_raised(label, run, flag):
    label(**({} if flag else {"new": "x"}))
    running = run(flag).start()

    origin = "--profile" if flag else f"label {LABEL} of node {NODE}"
    with pytest.raises(SettingsError, match=f"^{origin}: no profile 'x' in "):
        running.choice.current()
    assert running.choice.error.startswith(f"{origin}: no profile 'x' in ")
    running.write("x", PROFILE.format(7))
    assert running.is_in_force("x")


def test_before_it_is_started_there_is_none(run):
    with pytest.raises(SettingsError, match="no profile was looked for yet"):
        run().choice.current()


def test_an_api_server_that_is_away_at_the_start_is_said_and_waited_for(server, label, run):
    label(new="a")
    server.refuse_connections()
    running = run().start()

    with pytest.raises(
        ApiServerError, match=r"profile of this node is not known: .* cannot be reached"
    ):
        running.choice.current()

    server.accept_connections()
    assert running.is_in_force("a")
    assert running.choice.error is None


def test_an_outage_changes_nothing_and_afterwards_the_label_counts_again(server, label, running):
    server.refuse_connections()
    label(new="b")
    time.sleep(0.1)
    assert running.choice.current().name == "a"
    assert running.choice.error is None

    server.accept_connections()
    assert running.is_in_force("b")


def test_what_has_no_meaning_in_a_profile_is_logged_when_it_comes_into_force(label, run, caplog):
    caplog.set_level(logging.INFO)
    label(new="plugin")
    running = run()
    running.write("plugin", "version: v1\nflags: {failOnInitError: true, gdsEnabled: true}\n")

    running.start()
    time.sleep(0.05)

    messages = [
        record.getMessage() for record in caplog.records if "has no meaning" in record.getMessage()
    ]
    assert [record.split(": ")[1] for record in messages] == [
        "flags.failOnInitError",
        "flags.gdsEnabled",
    ]


def test_a_fault_of_whoever_listens_ends_nothing(server, label, run, caplog):
    label(new="a")
    running = run()

    def fail():
        running.count()
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("a fault")

    running.on_change = fail
    running.start()
    assert is_watching(server)

    label(new="b")
    assert running.is_in_force("b")
    running.write("b", PROFILE.format(9))
    assert running.wait(lambda choice: choice.current().entries[0].rules.replicas == 9)
    running.write("b", PROFILE.format(10))
    assert running.wait(lambda choice: choice.current().entries[0].rules.replicas == 10)

    messages = {record.getMessage() for record in caplog.records if record.levelno == logging.ERROR}
    assert messages == {"a step of a loop failed"}


def test_stopping_takes_no_time_and_may_come_before_the_start(server, label, run):
    label(new="a")
    run().choice.stop()
    running = run().start()
    assert is_watching(server)

    began = time.monotonic()
    running.choice.stop()

    assert time.monotonic() - began < 20, "a watch lasts minutes"
    ours = [
        thread for thread in threading.enumerate() if thread.name in ("profiles", "node-labels")
    ]
    for thread in ours:  # it may be about to end
        thread.join(20)
        assert not thread.is_alive()


def test_a_restart_does_not_lose_the_profile_that_was_in_force(tmp_path):
    (tmp_path / "a").write_text(PROFILE.format(2))
    last = LastProfileFile(tmp_path / "state" / "profile.json")
    first = choice_of(tmp_path, "a", last=last)
    first.start()
    first.stop()
    (tmp_path / "a").write_text(PROFILE.format("many"))

    second = choice_of(tmp_path, "a", last=last)
    second.start()
    second.stop()

    assert second.current() == first.current()
    assert "replicas" in str(second.error)
    assert "stays in force" in str(second.error)


def test_what_is_wanted_now_counts_before_what_was_in_force(tmp_path):
    (tmp_path / "a").write_text(PROFILE.format(2))
    last = LastProfileFile(tmp_path / "state" / "profile.json")
    last.keep(Profile("older"))

    choice = choice_of(tmp_path, "a", last=last)
    choice.start()
    choice.stop()

    assert choice.current().name == "a"
    assert last.read() == choice.current()
    assert choice.error is None
