"""Where sockets lie, and whom their coming and going may hurt: nobody."""

import base64
import hashlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.base.errors import NodeError, SettingsError
from dra_driver.kubeletplugin.serve.sockets import (
    MAX_PATH_BYTES,
    hidden_path,
    make_directory,
    remove_dead_sockets,
    rename_into_place,
    socket_paths,
)

DRIVER = "gpu.nvidia.com"
UID = "0f3c1a52-7d1c-4a5e-9f52-4d5c3f1a2b3c"
DEAD = "11111111-1111-4111-8111-111111111111"
DATA = Path("/var/lib/kubelet/plugins/gpu.nvidia.com")
REGISTRY = Path("/var/lib/kubelet/plugins_registry")


@contextmanager
def listening(path: Path, backlog: int = 1) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(path))
        server.listen(backlog)
        yield server


def stale(path: Path) -> None:
    with listening(path):
        pass


def old(path: Path, seconds: float = 61) -> Path:
    """*path* as if it had been made *seconds* ago."""
    then = time.time() - seconds
    os.utime(path, (then, then), follow_symlinks=False)
    return path


def directories(short: Path) -> tuple[Path, Path]:
    data, registry = short / "data", short / "registry"
    data.mkdir()
    registry.mkdir()
    return data, registry


def names_in(*directories: Path) -> list[str]:
    return sorted(path.name for directory in directories for path in directory.iterdir())


def short_hash(text: str, size: int) -> str:
    return (
        base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()[:size]).decode().strip("=")
    )


def test_without_a_pod_the_names_are_those_every_driver_uses() -> None:
    paths = socket_paths(DRIVER, DATA, REGISTRY)
    assert paths.service == DATA / "dra.sock"
    assert paths.registration == REGISTRY / "gpu.nvidia.com-reg.sock"


def test_a_rolling_update_gives_every_pod_sockets_of_its_own() -> None:
    paths = socket_paths(DRIVER, DATA, REGISTRY, UID)
    assert paths.service == DATA / f"dra-{UID}.sock"
    assert paths.registration == REGISTRY / f"gpu.nvidia.com-{UID}-reg.sock"


@pytest.mark.point(9)
def test_a_registration_name_that_is_too_long_gets_the_hash_of_the_pod() -> None:
    long = "gpu." + "x" * 30 + ".nvidia.com"
    assert socket_paths(long, DATA, REGISTRY, UID).registration == REGISTRY / (
        f"{long}-{short_hash(UID, 8)}-reg.sock"
    )


def test_a_driver_name_that_is_too_long_goes_into_the_hash() -> None:
    registry = Path("/var/lib/" + "k" * 30 + "/plugins_registry")
    long = "gpu." + "x" * 45 + ".nvidia.com"
    assert socket_paths(long, DATA, registry, UID).registration == registry / (
        f"dra-{short_hash(chr(0).join((long, UID)), 16)}-reg.sock"
    )


@pytest.mark.point(9)
def test_a_directory_without_room_for_any_name_is_refused_with_what_to_change() -> None:
    with pytest.raises(SettingsError, match=r"no socket fits into /kkk.*use a shorter kubelet"):
        socket_paths(DRIVER, DATA, Path("/" + "k" * 100), UID)


def test_a_relative_directory_is_refused() -> None:
    with pytest.raises(SettingsError, match="plugins is relative"):
        socket_paths(DRIVER, Path("plugins"), REGISTRY)


@pytest.mark.point(9, 13)
@given(
    driver=st.from_regex(r"[a-z]([a-z0-9.-]{0,61}[a-z0-9])?", fullmatch=True),
    directory=st.from_regex(r"/[a-z/ä]{0,100}", fullmatch=True),
    uids=st.lists(st.uuids().map(str), min_size=2, max_size=2, unique=True),
)
def test_paths_always_fit_and_are_never_shared(
    driver: str, directory: str, uids: list[str]
) -> None:
    try:
        first, second = (
            socket_paths(driver, Path(directory), Path(directory), uid) for uid in uids
        )
    except SettingsError:
        assert len(os.fsencode(directory)) > MAX_PATH_BYTES - 36
        return
    paths = [first.service, first.registration, second.service, second.registration]
    assert len(set(paths)) == 4
    for path in paths:
        assert len(os.fsencode(path)) <= MAX_PATH_BYTES
        hidden = hidden_path(path)
        assert len(os.fsencode(hidden)) == len(os.fsencode(path))
        assert hidden.parent == path.parent and hidden.name.startswith(f".{path.name[:-8]}")


def test_a_socket_appears_under_its_name_and_leaves_no_other(short: Path) -> None:
    hidden = hidden_path(short / "dra.sock")
    assert hidden.name.startswith(".")
    with listening(hidden):
        made = rename_into_place(hidden, short / "dra.sock")
        assert made is not None and made.in_place()
        assert os.listdir(short) == ["dra.sock"]
        made.remove()
    assert os.listdir(short) == []


@pytest.mark.point(7)
@pytest.mark.parametrize("obstacle", ["socket", "file", "dangling link"])
def test_what_a_dead_process_left_is_replaced(
    short: Path, obstacle: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = short / "dra.sock"
    if obstacle == "socket":
        stale(path)
    elif obstacle == "file":
        path.write_text("in the way")
    else:
        path.symlink_to(short / "nowhere")
    hidden = hidden_path(path)
    with listening(hidden), caplog.at_level(logging.WARNING):
        made = rename_into_place(hidden, path)
        assert made is not None and made.in_place()
    assert [r.message for r in caplog.records] == ["removed what another process left"]


def test_a_live_process_keeps_its_socket(short: Path) -> None:
    path = short / "dra.sock"
    with listening(path), listening(hidden_path(path)):
        (hidden,) = short.glob(".*")
        assert rename_into_place(hidden, path) is None
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(os.fspath(path))


def test_a_busy_process_is_a_live_one(short: Path) -> None:
    path, hidden = short / "dra.sock", short / ".new"
    with listening(path, backlog=0), listening(hidden), socket.socket(socket.AF_UNIX) as client:
        client.connect(os.fspath(path))  # fills the queue
        assert rename_into_place(hidden, path) is None


def test_a_directory_in_the_way_is_for_a_person_to_remove(short: Path) -> None:
    (short / "dra.sock").mkdir()
    with listening(short / ".new"), pytest.raises(SettingsError, match="is a directory"):
        rename_into_place(short / ".new", short / "dra.sock")


@pytest.mark.point(13)
def test_anothers_socket_is_never_removed(short: Path) -> None:
    path = short / "dra.sock"
    with listening(short / ".a"), listening(short / ".b"):
        ours = rename_into_place(short / ".a", path)
        assert ours is not None
        path.unlink()
        theirs = rename_into_place(short / ".b", path)
        ours.remove()
        assert theirs is not None and theirs.in_place() and not ours.in_place()


def test_directories_are_made_as_needed_and_otherwise_left_alone(short: Path) -> None:
    make_directory(short / "a" / "plugins", 0o750)
    assert (short / "a" / "plugins").stat().st_mode & 0o777 == 0o750
    make_directory(short / "a" / "plugins", 0o700)
    assert (short / "a" / "plugins").stat().st_mode & 0o777 == 0o750


def test_a_directory_that_cannot_be_made_is_named(short: Path) -> None:
    (short / "file").touch()
    with pytest.raises(NodeError, match=r"cannot make the directory .*file/plugins"):
        make_directory(short / "file" / "plugins", 0o750)


def test_sockets_of_dead_pods_are_swept_and_those_of_the_living_stay(short: Path) -> None:
    data, registry = directories(short)
    ours = socket_paths(DRIVER, data, registry, UID)
    dead = socket_paths(DRIVER, data, registry, DEAD)
    alone = socket_paths(DRIVER, data, registry)
    for path in (dead.service, dead.registration, ours.service):
        stale(path)
    theirs = registry / "other.example.com-reg.sock"
    stale(theirs)
    with listening(alone.service), listening(alone.registration):
        remove_dead_sockets(ours)

        names = {ours.service, alone.service, alone.registration, theirs}
        assert names_in(data, registry) == sorted(path.name for path in names)


@pytest.mark.point(7)
@pytest.mark.parametrize("pod", [None, UID, DEAD, DEAD.replace("-", "")])
def test_what_a_process_that_died_while_starting_hid_is_swept_by_the_next(
    short: Path, pod: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    data, registry = directories(short)
    dead = socket_paths(DRIVER, data, registry, pod)
    hidden = [hidden_path(dead.service), hidden_path(dead.registration)]
    for path in hidden:
        stale(path)
        old(path)

    with caplog.at_level(logging.INFO):
        remove_dead_sockets(socket_paths(DRIVER, data, registry, UID))

    assert names_in(data, registry) == []
    assert {vars(record)["path"] for record in caplog.records} == set(map(str, hidden))


@pytest.mark.point(7)
def test_the_pods_hash_in_a_hidden_name_is_known_as_ours(short: Path) -> None:
    data, registry = directories(short)
    driver = "gpu." + "x" * (70 - len(os.fsencode(registry))) + ".com"
    dead = socket_paths(driver, data, registry, DEAD)
    assert dead.registration.name == f"{driver}-{short_hash(DEAD, 8)}-reg.sock"
    stale(hidden_path(dead.registration))
    (hidden,) = registry.glob(".*")
    old(hidden)

    remove_dead_sockets(socket_paths(driver, data, registry, UID))

    assert names_in(registry) == []


@pytest.mark.point(7)
def test_a_restarted_pod_knows_its_hidden_name_even_without_the_drivers_in_it(short: Path) -> None:
    data, registry = directories(short)
    driver = "gpu." + "x" * (90 - len(os.fsencode(registry))) + ".com"
    ours = socket_paths(driver, data, registry, UID)
    assert ours.registration.name.startswith("dra-")
    hidden = hidden_path(ours.registration)
    stale(hidden)
    old(hidden)

    remove_dead_sockets(ours)

    assert names_in(registry) == []


@pytest.mark.point(13)
def test_a_process_that_is_starting_keeps_what_it_hid(short: Path) -> None:
    data, registry = directories(short)
    ours = socket_paths(DRIVER, data, registry, UID)
    bound = [hidden_path(path) for path in (ours.service, ours.registration)]
    for path in bound:  # it does not listen yet
        stale(path)
        old(path, 50)
    waiting, busy = (hidden_path(path) for path in (ours.service, ours.registration))
    with (
        listening(waiting),
        listening(busy, backlog=0),
        socket.socket(socket.AF_UNIX) as client,
    ):
        client.connect(os.fspath(busy))  # fills the queue
        old(waiting)
        old(busy)

        remove_dead_sockets(ours)

        expected = sorted(path.name for path in (*bound, waiting, busy))
        assert names_in(data, registry) == expected


@pytest.mark.point(13)
@pytest.mark.parametrize(
    "name",
    [
        ".0123abc",  # nobody's, in a directory that all drivers share
        ".other.example.com-0123abc",
        f".{DRIVER}.example-0123abc",
        f".{DRIVER}-extra-0123abc",
        f".{DRIVER}-0123ab",
        f".{DRIVER}-0123abcd",
        f".{DRIVER}-0123ABC",
        f".{DRIVER.replace('.', '-')}-0123abc",
        f".{DRIVER}-0123abc.sock",
        f"{DRIVER}-0123abc",
    ],
)
def test_other_names_in_the_registry_are_never_swept(short: Path, name: str) -> None:
    data, registry = directories(short)
    stale(registry / name)
    old(registry / name)
    remove_dead_sockets(socket_paths(DRIVER, data, registry, UID))
    assert names_in(registry) == [name]


@pytest.mark.point(13)
@pytest.mark.parametrize("kind", ["file", "directory", "link to a socket", "datagrams"])
def test_only_sockets_as_we_bind_them_are_swept(short: Path, kind: str) -> None:
    data, registry = directories(short)
    ours = socket_paths(DRIVER, data, registry, UID)
    path = hidden_path(ours.registration)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        match kind:
            case "file":
                path.touch()
            case "directory":
                path.mkdir()
            case "link to a socket":
                stale(short / "elsewhere")
                path.symlink_to(short / "elsewhere")
            case _:
                datagrams.bind(os.fspath(path))
        old(path)
        remove_dead_sockets(ours)
        assert names_in(registry) == [path.name]
