"""The files of a claim are all there or not there, whoever was killed when."""

import itertools
import os
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cdi.encoding import from_text
from cdi.spec import CdiDevice, ContainerEdits, Mount, Spec
from cdi.store import SpecStore
from dra_driver.base.errors import ClaimRecordLost, NodeError
from dra_driver.k8s.claims import Claim, ClaimRef, ClaimUid
from dra_driver.kubeletplugin.device_metadata import (
    MetadataDevice,
    MetadataDocument,
    render_metadata_documents,
)
from dra_driver.model.gpus import DeviceName
from dra_driver.model.records import ClaimRecord, Holding
from dra_driver.node.state.claim_files import CdiSpecFiles, ClaimFiles, MetadataFiles
from tests.builders import gpu_uuid

DRIVER = "gpu.nvidia.com"
VENDOR = f"k8s.{DRIVER}"
UID = ClaimUid("0b7ef5a2-5a07-4b8c-9b5f-0c7d8f3f0a11")
OTHER_UID = ClaimUid("7c11aa90-1b5f-4f0e-8a55-6f0f5a9f1d02")
DEVICES = [
    MetadataDevice("gpu/large", "node-1", "gpu-0", {"uuid": {"string": "GPU-a"}}),
    MetadataDevice("spare", "node-1", "gpu-1", {"uuid": {"string": "GPU-b"}}),
    MetadataDevice("spare", "node-1", "gpu-2", {"uuid": {"string": "GPU-c"}}),
]


class World:
    """A plugin's data directory and a CDI directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = directory / "plugins" / DRIVER
        self.cdi = directory / "cdi"
        self.shared: list[str] = []
        self.metadata = MetadataFiles(self.data, self.shared.append)
        self.files = ClaimFiles(CdiSpecFiles(self.cdi, VENDOR), self.metadata)

    def documents(self, uid: ClaimUid = UID, name: str = "train") -> tuple[MetadataDocument, ...]:
        claim = Claim(ClaimRef("ml", name, uid), ())
        return render_metadata_documents(claim, DEVICES, DRIVER, self.files.metadata_directory)

    def write(self, uid: ClaimUid = UID, name: str = "train") -> str:
        shown = self.documents(uid, name)
        return self.files.write(uid, spec_of(uid, shown), shown)

    def prepared(self) -> ClaimRecord:
        """The record of a claim with its files."""
        ref = ClaimRef("ml", "train", UID)
        holdings = tuple(
            Holding(
                ref, DeviceName(device.device), gpu_uuid(), request=device.request.partition("/")[0]
            )
            for device in DEVICES
        )
        spec, shown = self.write(), self.documents()
        return ClaimRecord(ref, holdings, prepared=(), spec=spec, documents=shown)

    def remove(self) -> None:
        self.files.remove(UID)

    def document(self, request: str = "gpu", uid: ClaimUid = UID) -> Path:
        return self.data / "metadata" / f"{uid}_{request}.json"

    def spec(self, uid: ClaimUid = UID) -> Path:
        return self.cdi / f"{VENDOR}-claim_{uid}.json"

    def everything(self) -> dict[str, str]:
        """Each file with its text."""
        return {
            str(path.relative_to(self.directory)): path.read_text()
            for path in sorted(self.directory.rglob("*"))
            if path.is_file()
        }

    def specs_show_whole_documents(self) -> None:
        """No container is shown a file that is missing or cut short."""
        expected = {document.container_path: document.text for document in self.documents()}
        for path in self.cdi.glob("*.json"):
            for device in from_text(path.read_text()).devices:
                for mount in device.container_edits.mounts:
                    assert Path(mount.host_path).read_text() == expected[mount.container_path]


def spec_of(uid: ClaimUid, shown: tuple[MetadataDocument, ...]) -> Spec:
    """A spec that shows each document with a device of its own, beside a library."""
    library = Mount("/usr/lib64/libcuda.so.1", "/usr/lib64/libcuda.so.1")
    devices = (
        CdiDevice(
            f"{uid}-{document.request}",
            container_edits=ContainerEdits(
                mounts=(Mount(document.host_path, document.container_path),)
            ),
        )
        for document in shown
    )
    edits = ContainerEdits(mounts=(library,))
    return Spec(f"{VENDOR}/claim", devices=tuple(devices), container_edits=edits)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_each_request_has_a_file_beside_the_one_spec_of_the_claim(world):
    text = world.write()
    gpu, spare = world.documents()
    assert world.everything() == {
        str(world.spec().relative_to(world.directory)): text,
        str(world.document("gpu").relative_to(world.directory)): gpu.text,
        str(world.document("spare").relative_to(world.directory)): spare.text,
    }


@pytest.mark.point(91)
def test_anybody_in_a_container_may_read(world):
    before = os.umask(0o077)
    try:
        world.write()
    finally:
        os.umask(before)
    assert stat.S_IMODE(world.document().stat().st_mode) == 0o644
    assert stat.S_IMODE(world.document().parent.stat().st_mode) == 0o755


def test_writing_the_same_again_changes_nothing(world):
    world.write()
    before = world.everything()
    world.write()
    assert world.everything() == before


def test_a_running_container_keeps_the_document_that_it_was_started_with(world):
    world.write()
    with world.document().open() as mounted:
        world.metadata.write([replace(world.documents()[0], text="new")])
        assert mounted.read() == world.documents()[0].text
    assert world.document().read_text() == "new"


def test_a_file_that_links_elsewhere_is_replaced_and_its_target_left_alone(world):
    theirs = world.directory / "theirs"
    theirs.write_text("theirs")
    world.document().parent.mkdir(parents=True)
    world.document().symlink_to(theirs)
    world.write()
    assert theirs.read_text() == "theirs"
    assert not world.document().is_symlink()


@pytest.mark.point(92)
def test_what_is_removed_is_gone_and_removing_it_again_is_success(world):
    world.write()
    for _ in range(2):
        world.remove()
        assert world.everything() == {}
    assert world.files.claims() == frozenset()


def test_removing_a_claim_leaves_all_others_what_they_have(world):
    longer = ClaimUid(f"{UID}-0")
    for uid in (OTHER_UID, longer):
        world.write(uid, "other")
    before = world.everything()
    world.write()
    world.remove()
    assert world.everything() == before
    assert world.files.claims() == {OTHER_UID, longer}


def test_files_that_are_not_ours_are_neither_counted_nor_removed(world):
    world.write()
    theirs = [
        world.data / "dra.sock",
        world.document().with_name("notes.txt"),
        world.cdi / f"{DRIVER}_metadata_{UID}_gpu.json",
    ]
    for path in theirs:
        path.write_text("{}")
    world.remove()
    world.files.sweep()
    assert world.files.claims() == frozenset()
    assert all(path.exists() for path in theirs)


def test_claims_are_known_by_what_is_left_of_them(world):
    world.write()
    world.write(OTHER_UID, "other")
    world.spec().unlink()  # a cleared /var/run
    for request in ("gpu", "spare"):
        world.document(request, OTHER_UID).unlink()
    assert world.files.claims() == {UID, OTHER_UID}


def test_a_spec_that_is_gone_comes_back(world):
    record = world.prepared()
    before = world.everything()
    world.spec().unlink()
    assert not world.files.exist(record)
    world.files.restore(record)
    assert world.everything() == before
    assert world.files.exist(record)


@pytest.mark.parametrize("request_name", ["gpu", "spare"])
@pytest.mark.parametrize("lose", [Path.unlink, lambda path: path.write_text("half of")])
def test_a_document_that_is_gone_or_cut_short_comes_back(world, request_name, lose):
    record = world.prepared()
    before = world.everything()
    lose(world.document(request_name))
    world.files.restore(record)
    assert world.everything() == before


def test_a_document_that_is_gone_is_missed(world):
    record = world.prepared()
    world.document("spare").unlink()
    assert not world.files.exist(record)


def test_what_is_whole_is_left_as_it_is(world):
    """A container may have it mounted."""
    record = world.prepared()
    before = {path: path.stat().st_ino for path in (world.spec(), world.document())}
    world.files.restore(record)
    assert {path: path.stat().st_ino for path in before} == before


def test_what_was_recorded_of_files_is_found_in_the_files(world):
    record = world.prepared()
    assert world.files.with_texts(replace(record, spec=None, documents=())) == record


@pytest.mark.parametrize("lost", [World.spec, World.document])
def test_what_was_recorded_is_not_guessed_from_some_of_the_files(world, lost):
    record = world.prepared()
    lost(world).unlink()
    with pytest.raises(ClaimRecordLost, match="delete the pods that use it"):
        world.files.with_texts(replace(record, spec=None, documents=()))


def test_a_directory_that_cannot_be_made_is_named_with_the_mend(world):
    world.data.parent.mkdir()
    world.data.write_text("in the way")
    with pytest.raises(NodeError, match=f"device metadata in {world.data}.* let this process"):
        world.write()
    world.remove()
    assert world.files.claims() == frozenset()
    assert not world.spec().exists()


def test_a_file_that_cannot_be_written_is_named(world):
    world.document("spare").mkdir(parents=True)
    with pytest.raises(NodeError, match=f"Is a directory: '{world.document('spare')}'"):
        world.write()
    assert not world.spec().exists()


EFFECTS = {"os.mkdir", "os.rename", "os.remove", "os.chmod", "tempfile.mkstemp", "open"}


def killed_before(count: int, act: Callable[[], object]) -> bool:
    """Do *act* in a process that dies before its effect on the disk with this number (from 0).

    False: it makes no so many.
    """
    child = os.fork()
    if child == 0:
        remaining = itertools.count(-count)

        def hook(event: str, arguments: object) -> None:
            if event in EFFECTS and next(remaining) == 0:
                os._exit(9)

        sys.addaudithook(hook)
        try:
            act()
        except BaseException:  # noqa: BLE001 - nothing of pytest may run in this process
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 9)
    return os.waitstatus_to_exitcode(status) == 9


def nothing(world: World) -> None:
    pass


def places(directory: Path, act: Callable[[World], object], first: Callable[[World], object]):
    """A world for every place at which *act*, in a world as *first* left it, can be killed."""
    for count in itertools.count():
        world = World(directory / str(count))
        first(world)
        if not killed_before(count, partial(act, world)):
            assert count > 2, "it has so many effects at least"
            return
        yield world


@pytest.mark.parametrize(("act", "first"), [(World.write, nothing), (World.remove, World.write)])
def test_no_kill_leaves_a_spec_that_shows_what_is_not_whole(tmp_path, act, first):
    for world in places(tmp_path, act, first):
        world.specs_show_whole_documents()


def test_a_killed_write_is_completed_by_the_next_one(tmp_path):
    for world in places(tmp_path, World.write, nothing):
        world.write()
        texts = {document.host_path: document.text for document in world.documents()}
        assert {path: Path(path).read_text() for path in texts} == texts


@pytest.mark.parametrize(
    ("act", "first"),
    [(World.write, nothing), (World.write, World.write), (World.remove, World.write)],
)
def test_after_a_kill_nothing_is_left_once_the_claim_is_given_back(tmp_path, act, first):
    for world in places(tmp_path, act, first):
        assert world.files.claims() <= {UID}
        world.remove()
        SpecStore(world.cdi, VENDOR, "claim").sweep(older_than_seconds=0)
        assert world.everything() == {}


@pytest.mark.parametrize("act", [World.write, World.remove])
def test_after_a_kill_what_belongs_to_no_claim_is_found_and_removed(tmp_path, act):
    first = World.write if act is World.remove else nothing
    for world in places(tmp_path, act, first):
        for uid in world.files.claims():
            world.files.remove(uid)
        assert not list(world.data.rglob("*.json"))
        assert not list(world.cdi.glob("k8s*"))


def test_of_a_claim_whose_record_is_known_everything_is_removed_and_nothing_of_another(tmp_path):
    world = World(tmp_path)
    record = world.prepared()
    world.write(ClaimUid("another"), "another")
    of_both = world.everything()
    world.files.remove(UID, record)
    assert of_both.keys() - world.everything().keys() == {path for path in of_both if UID in path}
    world.files.remove(UID, record)


def test_the_directory_is_shared_with_containers_once_it_is_made(world: World) -> None:
    world.write()
    world.write(OTHER_UID)
    assert world.shared == [str(world.data / "metadata")]
