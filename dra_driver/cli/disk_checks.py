"""Are the directories there that the kubelet, the container runtime and we share, and in order?"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from api.names import CDI_CLASS
from cdi.registry import load
from dra_driver.cli.findings import Finding, Level, fail, ok, some, warn
from dra_driver.errors import NodeError, SettingsError
from dra_driver.kubeletplugin.claims import ClaimUid
from dra_driver.kubeletplugin.sockets import socket_paths
from dra_driver.model.holdings import Record
from dra_driver.node.ledger_files import SetAside, read_directory
from dra_driver.node.spec_files import SpecFiles

CDI, FILES, KUBELET, STATE, LEDGER = (
    "CDI directory",
    "CDI files",
    "kubelet directory",
    "state directory",
    "ledger",
)


@dataclass(frozen=True, slots=True)
class Directory:
    """What is at a path, for this process."""

    path: Path
    is_there: bool
    is_directory: bool
    is_writable: bool  # or could be made, where it is not there


def look(path: Path) -> Directory:
    """*path*, or the nearest directory above it, which is where it would be made. NodeError: this
    process may not look."""
    try:
        nearest = next(each for each in (path, *path.absolute().parents) if each.exists())
    except OSError as e:
        raise NodeError(f"{path}: {e.strerror}; ask as root") from e
    return Directory(
        path,
        is_there=nearest == path,
        is_directory=nearest.is_dir(),
        is_writable=nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
    )


@dataclass(frozen=True, slots=True)
class Book:
    """The ledger, as far as it can be read."""

    records: Mapping[ClaimUid, Record]
    aside: Mapping[ClaimUid, SetAside]


def cdi_directory(path: Path) -> Iterator[Finding]:
    yield of_cdi_directory(look(path))


def cdi_files(directory: Path, vendor: str, ledger: Path) -> Iterator[Finding]:
    """*ledger*: the directory of this boot's records."""
    kind = f"{vendor}/{CDI_CLASS}"
    files = SpecFiles(directory, vendor).claims()
    yield of_files(set(files), Book(*read_directory(ledger)))
    yield from of_problems(load([directory]).problems, kind)


def kubelet_directory(kubelet: Path, driver: str, pod_uid: str) -> Iterator[Finding]:
    registry = kubelet / "plugins_registry"
    found = look(registry)
    if found.is_there:
        yield of_directory(KUBELET, found, "--kubelet-dir")
    else:
        yield fail(
            KUBELET,
            f"{registry} does not exist",
            "say where the kubelet's --root-dir is: --kubelet-dir, under the same path in this pod",
        )
    try:
        paths = socket_paths(driver, kubelet / "plugins" / driver, registry, pod_uid or None)
    except SettingsError as e:
        yield fail(KUBELET, str(e), "a socket's path has 107 bytes at most")
    else:
        longest = max(len(os.fsencode(path)) for path in (paths.service, paths.registration))
        yield ok(KUBELET, f"our sockets fit: the longest path has {longest} of 107 bytes")


def state_directory(path: Path) -> Iterator[Finding]:
    yield of_directory(STATE, look(path), "--state-dir")


def ledger(directory: Path) -> Iterator[Finding]:
    place = of_directory(LEDGER, look(directory), "--state-dir")
    if place.level is Level.OK:
        yield from of_ledger(directory, Book(*read_directory(directory)))
    else:
        yield place


def of_directory(what: str, found: Directory, flag: str) -> Finding:
    if found.is_there and not found.is_directory:
        return fail(what, f"{found.path} is no directory", f"remove it, or give another {flag}")
    if not found.is_writable:
        return fail(
            what,
            f"{found.path} cannot be {'written' if found.is_there else 'made'}",
            f"let this process write there (mount it, and not read-only), or give another {flag}",
        )
    if found.is_there:
        return ok(what, f"{found.path} can be written")
    return ok(what, f"{found.path} does not exist; it is made when it is needed")


def of_cdi_directory(found: Directory) -> Finding:
    """A container runtime that uses CDI makes it, so that it is not there tells something."""
    finding = of_directory(CDI, found, "--cdi-dir")
    if found.is_there or finding.level is not Level.OK:
        return finding
    return warn(
        CDI,
        finding.found,
        "does the container runtime use CDI (containerd 2.0; 1.7 with enable_cdi = true; CRI-O), "
        "and does it look there?",
    )


def of_files(files: Collection[ClaimUid], book: Book) -> Finding:
    """Whether every prepared claim has its file, and every file its claim."""
    prepared = {uid: record for uid, record in book.records.items() if record.completed}
    lost = sorted(str(record.claim) for uid, record in prepared.items() if uid not in files)
    if lost:
        return fail(
            FILES,
            f"{len(lost)} prepared claims have none: {some(lost)}",
            "start the plugin anew, which writes them again; until then their containers "
            "cannot be started",
        )
    orphans = sorted(set(files) - book.records.keys() - book.aside.keys())
    if orphans:
        return warn(
            FILES,
            f"{len(orphans)} are of claims that nothing is known of: {some(orphans)}",
            "start the plugin anew, which removes them",
        )
    return ok(FILES, f"{len(prepared)} claims are prepared, each has its file")


def of_problems(problems: Sequence[str], kind: str) -> Iterator[Finding]:
    """What a container runtime cannot use in the directory; ours are those of *kind*."""
    ours = [problem for problem in problems if problem.startswith(f"{kind}=")]
    others = [problem for problem in problems if problem not in ours]
    for problem in ours:
        yield fail(FILES, problem, "remove the file that is not ours: no runtime uses either")
    if others:
        yield warn(FILES, some(others), "whoever wrote them has to mend them; ours still work")


def of_ledger(directory: Path, book: Book) -> Iterator[Finding]:
    for found in book.aside.values():
        held = some(sorted(found.mentions)) or "every GPU"
        yield fail(
            LEDGER,
            f"{found.path} cannot be read: {found.reason}",
            f"{held} takes no new claim until the plugin has settled it with the API server; if "
            "it stays, and no pod uses that claim, remove the file",
        )
    begun = sorted(str(record.claim) for record in book.records.values() if not record.completed)
    if begun:
        yield warn(
            LEDGER,
            f"{len(begun)} claims are begun, or half given back: {some(begun)}",
            "nothing while the kubelet tries again; where that does not end, an event of the pod "
            "and the plugin's log say what is in the way",
        )
    if not book.aside:
        yield ok(LEDGER, f"{len(book.records)} claims in {directory}")
