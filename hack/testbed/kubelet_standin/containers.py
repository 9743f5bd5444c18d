"""One container's command as a process, with its CDI devices."""

import json
import os
import posixpath
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from cdi.errors import CdiError
from cdi.registry import load_registry
from cdi.spec import DeviceNode
from hack.cdi_apply import apply_edits

Config = dict[str, Any]

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TERM_SECONDS = 2.0  # between TERM and KILL
_CANNOT_START = 128  # as containerd: ContainerCannotRun


@dataclass(frozen=True, slots=True)
class Ended:
    """How a container ended."""

    exit_code: int
    reason: str
    output: str


def configuration(container: Mapping[str, Any], pod: Mapping[str, Any]) -> Config:
    """The OCI configuration before CDI; environment from values and simple pod fields only."""
    environment = [f"PATH={_SYSTEM_PATH}", f"HOSTNAME={pod['metadata']['name']}"]
    for entry in container.get("env") or ():
        environment.append(f"{entry['name']}={_value(entry, pod)}")
    return {
        "ociVersion": "1.0.2",
        "process": {
            "args": [*(container.get("command") or ()), *(container.get("args") or ())],
            "env": environment,
            "cwd": container.get("workingDir") or "/",
        },
        "mounts": [],
        "linux": {},
    }


def _value(entry: Mapping[str, Any], pod: Mapping[str, Any]) -> str:
    if "value" in entry:
        return str(entry["value"])
    path = ((entry.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath", "")
    value: Any = pod
    for part in path.split(".") if path else ():
        value = (value or {}).get(part)
    return "" if value is None or value is pod else str(value)


class Run:
    """A container's one run, in *directory*."""

    def __init__(self, directory: Path, config: Config, names: Sequence[str], cdi: Path) -> None:
        self._directory = directory
        self._config = config
        self._names = names
        self._cdi = cdi
        self._stopped = threading.Event()
        self.over = threading.Event()  # nothing of it runs any more
        self._process: subprocess.Popen[bytes] | None = None
        self._guard = threading.Lock()

    def wait(self) -> Ended:
        """Run it to its end."""
        try:
            return self._run()
        finally:
            self.over.set()

    def _run(self) -> Ended:
        (self._directory / "work").mkdir(parents=True, exist_ok=True)
        try:
            edits = load_registry((self._cdi,)).edits(self._names)
            nodes = tuple(_followed(node) for node in edits.device_nodes)
            config = apply_edits(self._config, replace(edits, device_nodes=nodes))
        except CdiError as error:
            return Ended(_CANNOT_START, "CDIInjectionFailed", str(error))
        text = json.dumps(config, indent=2, sort_keys=True)
        (self._directory / "config.json").write_text(text + "\n")
        args = config["process"]["args"]
        if not args:
            return Ended(_CANNOT_START, "StandinNeedsCommand", "there is no image to take it from")
        root = self._directory / "root"
        _lay_out(config, root)
        return self._end_of(args, _environment(config, root))

    def stop(self) -> None:
        """End it soon, with all its children."""
        self._stopped.set()
        self._signal(signal.SIGTERM)
        timer = threading.Timer(_TERM_SECONDS, self._signal, (signal.SIGKILL,))
        timer.daemon = True
        timer.start()

    def _end_of(self, args: Sequence[str], environment: Mapping[str, str]) -> Ended:
        output = self._directory / "output"
        with output.open("wb") as sink:
            try:
                with self._guard:
                    if self._stopped.is_set():
                        return Ended(_CANNOT_START, "Stopped", "")
                    self._process = _start(args, environment, self._directory / "work", sink)
            except OSError as error:
                return Ended(_CANNOT_START, "StartError", f"{args[0]}: {error}")
            code = self._process.wait()
        exit_code = code if code >= 0 else 128 - code
        text = output.read_text(errors="replace")
        return Ended(exit_code, "Error" if exit_code else "Completed", text)

    def _signal(self, number: signal.Signals) -> None:
        with self._guard:
            if self._process is None or self._process.poll() is not None:
                return
            os.killpg(self._process.pid, number)  # its own group: start_new_session


def _start(
    args: Sequence[str], environment: Mapping[str, str], directory: Path, sink: Any
) -> "subprocess.Popen[bytes]":
    # Through env(1), which looks the program up on the container's PATH and not on ours.
    return subprocess.Popen(
        ["/usr/bin/env", "--", *args],
        env=dict(environment),
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=sink,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _followed(node: DeviceNode) -> DeviceNode:
    """Links are followed: a user who may not make device nodes simulates them by links."""
    return replace(node, host_path=os.path.realpath(node.host_path or node.path))


def _environment(config: Config, root: Path) -> dict[str, str]:
    """The process's variables; mounted programs and libraries come first."""
    environment = dict(entry.split("=", 1) for entry in config["process"]["env"] if "=" in entry)
    targets = [PurePosixPath(mount["destination"]) for mount in config["mounts"]]
    for kind, variable in (("bin", "PATH"), ("lib", "LD_LIBRARY_PATH")):
        directories = [_inside(root, str(t.parent)) for t in targets if _kind(t) == kind]
        before = [environment[variable]] if environment.get(variable) else []
        environment[variable] = ":".join([*dict.fromkeys(map(str, directories)), *before])
    return environment


def _kind(target: PurePosixPath) -> str:
    if target.parent.name in ("bin", "sbin"):
        return "bin"
    return "lib" if ".so" in target.name else ""


def _lay_out(config: Config, root: Path) -> None:
    """What the container would find at its paths, as links; a device is one to /dev/null.

    That is enough for programs that look beside themselves, as the simulated nvidia-smi does.
    """
    links = {mount["destination"]: mount["source"] for mount in config["mounts"]}
    links |= dict.fromkeys((d["path"] for d in config["linux"].get("devices") or ()), "/dev/null")
    root.mkdir(parents=True, exist_ok=True)
    for path in sorted(links, key=lambda path: (path.count("/"), path)):
        place = _inside(root, path)
        if any(parent.is_symlink() for parent in place.parents if parent.is_relative_to(root)):
            continue  # what is mounted into another mount would be written into the machine's file
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.is_symlink():
            place.symlink_to(links[path])


def _inside(root: Path, path: str) -> Path:
    return root / posixpath.normpath(f"/{path}").lstrip("/")
