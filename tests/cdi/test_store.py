"""A reader of the directory sees the old file or the new one, whatever happens to the writer."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from cdi.encoding import from_text, to_json
from cdi.errors import CdiNameError, CdiSpecError, CdiStoreError
from cdi.spec import ContainerEdits
from cdi.store import SpecStore
from tests.cdi.strategies import one_device
from tests.fakes.user import let_in

REPOSITORY = Path(__file__).parents[2]


def spec(value: str = "1", kind: str = "vendor.example/gpu"):
    return one_device(ContainerEdits(env=(f"A={value}",)), kind=kind)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "cdi"


@pytest.fixture(params=[True, False], ids=["fsync", "no fsync"])
def store(directory, request):
    return SpecStore(directory, "vendor.example", "gpu", fsync=request.param)


def names(directory):
    return sorted(entry.name for entry in directory.iterdir())


def test_a_spec_is_written_read_listed_and_removed(store, directory):
    assert store.write(spec(), "b") == to_json(spec())
    store.write(spec("2"), "a")

    path = store.path("b")
    assert path == directory / "vendor.example-gpu_b.json"
    assert path.read_text() == to_json(spec())
    assert store.ids() == ("a", "b")
    assert (store.read("a"), store.read("c")) == (spec("2"), None)

    store.remove("b")
    store.remove("b")

    assert store.ids() == ("a",)
    assert names(directory) == ["vendor.example-gpu_a.json"]


def test_a_directory_that_is_missing_is_empty_and_made_on_the_first_write(store, directory):
    assert (store.ids(), store.read("a"), store.sweep()) == ((), None, ())
    store.remove("a")
    assert not directory.exists()

    before = os.umask(0o077)
    try:
        store.write(spec(), "a")
    finally:
        os.umask(before)

    assert directory.stat().st_mode & 0o777 == 0o755
    assert store.path("a").stat().st_mode & 0o777 == 0o644


def test_writing_the_same_again_touches_nothing_and_another_replaces(store):
    path = store.path("a")
    store.write(spec(), "a")
    first = path.stat()
    store.write(spec(), "a")
    same = path.stat()  # read, which may change when it was last read

    assert (same.st_ino, same.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    store.write(spec("2"), "a")
    assert path.stat().st_ino != first.st_ino
    assert store.read("a") == spec("2")


def test_a_spec_of_another_kind_is_refused(store):
    with pytest.raises(CdiSpecError, match=r"^kind: must be 'vendor.example/gpu' in this store"):
        store.write(spec(kind="vendor.example/nic"), "a")


def test_an_id_that_makes_no_file_name_is_refused(store):
    with pytest.raises(CdiNameError):
        store.write(spec(), "../a")


@pytest.mark.point(100)
def test_files_of_others_are_neither_seen_nor_touched(tmp_path):
    ours, theirs = SpecStore(tmp_path, "aa", "bb-cc"), SpecStore(tmp_path, "aa-bb", "cc")
    others = {
        "nvidia.json": to_json(spec()),
        "aa-bb-cc_.json": "",
        "aa-bb-cc_x.yaml": "",
        ".aa-bb-cc_x.json.y": "",
    }
    for name, text in others.items():
        (tmp_path / name).write_text(text)
    theirs.write(spec(kind="aa-bb/cc"), "x")
    path = theirs.path("x")

    assert ours.path("x") == path
    assert (ours.ids(), theirs.ids()) == ((), ("x",))
    assert ours.sweep(0) == ()
    with pytest.raises(CdiStoreError, match=r"devices of 'aa-bb/cc'.* directory of its own"):
        ours.write(spec(kind="aa/bb-cc"), "x")
    with pytest.raises(CdiStoreError, match=r"devices of 'aa-bb/cc'"):
        ours.remove("x")
    assert names(tmp_path) == sorted([*others, path.name])


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]"])
def test_a_broken_file_with_our_name_is_ours_to_list_replace_and_remove(store, content):
    store.write(spec(), "a")
    path = store.path("a")
    path.write_bytes(content)

    assert store.ids() == ("a",)
    with pytest.raises(CdiSpecError):
        store.read("a")
    store.write(spec(), "a")
    assert store.read("a") == spec()
    path.write_bytes(content)
    store.remove("a")
    assert store.ids() == ()


def test_what_a_killed_writer_left_is_swept_when_it_is_old(store, directory):
    store.write(spec(), "a")
    old, new = (directory / f".vendor.example-gpu_a.json.{age}.tmp" for age in ("old", "new"))
    for path in (old, new):
        path.write_text("{")
    os.utime(old, (0, 0))

    assert store.sweep() == (old.name,)
    assert names(directory) == sorted([new.name, store.path("a").name])


def test_what_a_killed_writer_left_goes_with_its_spec_however_new_it_is(store, directory):
    store.write(spec(), "a")
    temporary = {
        of: directory / f".{store.path(of).name}.ab_cd012.tmp" for of in ("a", "a.json.b", "c")
    }
    for path in temporary.values():
        path.write_text("{")

    next_process = SpecStore(directory, "vendor.example", "gpu")
    next_process.remove("a")
    assert names(directory) == sorted([temporary["a.json.b"].name, temporary["c"].name])
    next_process.remove("c")
    assert names(directory) == [temporary["a.json.b"].name]


def test_a_file_in_the_place_of_the_directory_is_named_with_the_mend(store, directory):
    directory.write_text("")

    with pytest.raises(CdiStoreError, match=f"{directory}: cannot write .*: remove the file that"):
        store.write(spec(), "a")
    with pytest.raises(CdiStoreError, match=f"{directory}: cannot list it") as refused:
        store.ids()
    assert refused.value.directory == directory
    assert isinstance(refused.value.__cause__, OSError)


def test_a_directory_in_the_place_of_a_file_is_told_with_the_mend(store, directory):
    store.path("a").mkdir(parents=True)

    with pytest.raises(CdiStoreError, match=f"{directory}: cannot remove .*remove the directory"):
        store.remove("a")


def test_an_error_nobody_foresaw_still_names_the_directory(store, directory):
    directory.mkdir(exist_ok=True)
    store.path("a").symlink_to(store.path("a"))

    with pytest.raises(CdiStoreError, match=f"{directory}: cannot remove .*look at the directory"):
        store.remove("a")


# The rest runs a writer in a process of its own, which may be killed, or have no right to write.

_PRELUDE = f"""
import itertools, os, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from cdi.errors import CdiStoreError
from cdi.spec import ContainerEdits, CdiDevice, Spec
from cdi.store import SpecStore
def spec(value):
    edits = ContainerEdits(env=("A=" + value,))
    return Spec("vendor.example/gpu", devices=(CdiDevice("gpu-0", (), edits),))
store = SpecStore(sys.argv[1], "vendor.example", "gpu", fsync=False)
"""


def writer(directory, body, **options):
    code = _PRELUDE + textwrap.dedent(body)
    command = [sys.executable, "-c", code, str(directory)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


FOREVER = """
for value in itertools.cycle("ab"):
    store.write(spec(value * 20_000), "a")
"""


@contextmanager
def reading(path):
    """Read a file all the time in a thread; give the list of the different texts that it had."""
    texts: set[str] = set()
    stop = threading.Event()

    def read():
        while not stop.is_set():
            try:
                texts.add(path.read_text())
            except FileNotFoundError:
                continue

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield texts
    finally:
        stop.set()
        thread.join()


@pytest.mark.point(97)
def test_a_reader_sees_whole_files_only_while_the_writer_is_killed_again_and_again(directory):
    store = SpecStore(directory, "vendor.example", "gpu", fsync=False)
    whole = {to_json(spec(value * 20_000)) for value in "ab"}
    path = store.path("a")
    chance = random.Random(1)

    with reading(path) as texts:
        for _ in range(6):
            with writer(directory, FOREVER) as process:
                before = path.stat().st_ino if path.exists() else None
                while not path.exists() or path.stat().st_ino == before:
                    assert process.poll() is None, "the writer ended by itself"
                    time.sleep(0.005)
                time.sleep(chance.random() * 0.05)
                process.send_signal(signal.SIGKILL)
            assert path.read_text() in whole

    assert texts == whole
    temporary = [name for name in names(directory) if name != path.name]
    assert all(name.endswith(".tmp") for name in temporary)
    assert store.sweep(0) == tuple(temporary)
    assert names(directory) == [path.name]


def test_a_full_disk_is_named_with_the_mend_and_leaves_the_old_file_alone(directory):
    with tiny_disk(directory):
        store = SpecStore(directory, "vendor.example", "gpu")
        store.write(spec(), "a")

        with pytest.raises(CdiStoreError, match=f"{directory}: cannot write .*: free some space"):
            store.write(spec("x" * 200_000), "a")

        assert store.read("a") == spec()
        assert names(directory) == [store.path("a").name]


@contextmanager
def tiny_disk(directory):
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("a tiny file system needs root and mount")
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not let us mount a tiny file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def test_a_file_that_cannot_grow_leaves_the_old_file_alone(directory):
    body = """
    import resource, signal
    store.write(spec("1"), "a")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    try:
        store.write(spec("x" * 5000), "a")
    except CdiStoreError as e:
        print(e.__cause__.errno)
    """

    with writer(directory, body) as process:
        assert process.communicate()[0] == f"{errno.EFBIG}\n"

    path = SpecStore(directory, "vendor.example", "gpu").path("a")
    assert from_text(path.read_text()) == spec()
    assert names(directory) == [path.name]


def test_a_directory_without_the_right_to_write_is_named_with_the_mend(directory):
    directory.mkdir()
    directory.chmod(0o555)
    let_in(directory.parent)
    body = """
    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        store.write(spec("1"), "a")
    except CdiStoreError as e:
        print(e)
    """

    with writer(directory, body) as process:
        output = process.communicate()[0]

    assert output.startswith(f"CDI directory {directory}: cannot write vendor.example-gpu_a.json: ")
    assert output.endswith(": let this user write there\n")
