"""What every container with a GPU gets of the driver on the host: the driver's CDI spec.

One file for all claims: a container that is started again after the driver was upgraded gets the
files that are there now, and runtimes, which read the whole directory again after each change of
it, have little to read of each claim. Each device of a claim is answered with this spec's one
device behind its own, and a container gets the edits of a spec once, however many name it.

Without a hook, every library is mounted under the names that programs ask for, in the directories
that glibc searches by itself on Debian and Ubuntu, and on RHEL, SUSE and Amazon Linux (ld.so(8)).
So no process has to run for a container to start. Images that keep their libraries elsewhere (Nix,
musl) need LD_LIBRARY_PATH, and a newer CUDA of the image (``/usr/local/cuda/compat``) is not
preferred. A mount costs the runtime 0.05 to 0.08 ms (runc 1.1), so no library has a needless name.

With a hook (``nvidia-cdi-hook`` of NVIDIA's container toolkit), the edits are those of NVIDIA's own
driver. Hooks belong to the spec: a kubelet that names a device twice would run a device's twice.

``GPU_DRIVER_VERSION=580.95.05`` tells a program which driver it was given.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from api import names
from cdi.spec import CdiDevice, ContainerEdits, Hook, Mount, Spec, qualify
from dra_driver.model.driver_files import DriverFiles, DriverLibrary, HostFile
from dra_driver.plan.prepare.cdi_spec import cdi_vendor

_READ_ONLY: Final = ("ro", "nosuid", "nodev", "rbind", "rprivate")
_SOCKET: Final = (*_READ_ONLY, "noexec")
_RHEL_DIRECTORY: Final = "/usr/lib64"
# For a container runtime of NVIDIA's (nvidia-container-runtime): the GPUs are given already.
_NOT_AGAIN: Final = "NVIDIA_VISIBLE_DEVICES=void"
# Programs are built against these, or load them by this name.
_UNVERSIONED: Final = (
    "libcuda.so",
    "libnvcuvid.so",
    "libnvidia-encode.so",
    "libnvidia-ml.so",
    "libnvidia-opticalflow.so",
)
# Links that NVIDIA's driver asks its hook for: of this library, this link, to this name; empty: to
# the file itself. The first two are there on hosts, too, where programs rely on them; GLVND's
# indirect rendering needs the third.
_HOOK_LINKS: Final = (
    ("libcuda.so", "libcuda.so", "libcuda.so.1"),
    ("libnvidia-opticalflow.so", "libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1"),
    ("libGLX_nvidia.so", "libGLX_indirect.so.0", ""),
)


def driver_spec_id(driver: str = names.DRIVER) -> str:
    """The CDI name of its one device, which the kubelet hands on to the container runtime.

    >>> driver_spec_id()
    'k8s.gpu.nvidia.com/driver=files'
    """
    return str(qualify(cdi_vendor(driver), names.CDI_DRIVER_CLASS, names.CDI_DRIVER_DEVICE))


def driver_spec(files: DriverFiles, hook: str | None = None, driver: str = names.DRIVER) -> Spec:
    """The CDI spec of the installed driver, with one device, ``driver_spec_id``.

    It sets nothing that a claim's spec sets. *hook*: the host's path of ``nvidia-cdi-hook``.
    """
    common = ContainerEdits(
        env=(_NOT_AGAIN,),
        mounts=tuple(_mount(file, _SOCKET) for file in files.sockets),
    )
    edits = _for_any_image(files) if hook is None else _with_hooks(files, hook)
    version = ContainerEdits(env=(f"GPU_DRIVER_VERSION={files.version}",))
    return Spec(
        kind=f"{cdi_vendor(driver)}/{names.CDI_DRIVER_CLASS}",
        devices=(CdiDevice(names.CDI_DRIVER_DEVICE, container_edits=version),),
        container_edits=edits + common,
    )


def _mount(file: HostFile, options: tuple[str, ...] = _READ_ONLY) -> Mount:
    return Mount(file.host_path, file.container_path, options=options)


def _for_any_image(driver: DriverFiles) -> ContainerEdits:
    multiarch = f"/usr/lib/{driver.machine}-linux-gnu"
    libraries = tuple(
        Mount(library.host_path, f"{directory}/{name}", options=_READ_ONLY)
        for directory in (multiarch, _RHEL_DIRECTORY)
        for library in driver.libraries
        for name in _asked_names(library)
    )
    others = (*driver.tools, *driver.firmware, *driver.graphics)
    return ContainerEdits(
        # Triton (torch.compile) looks for libcuda in the cache and nowhere else, unless told where.
        env=(f"TRITON_LIBCUDA_PATH={multiarch}",),
        mounts=(*libraries, *(_mount(file) for file in others)),
    )


def _asked_names(library: DriverLibrary) -> Sequence[str]:
    """Under which names programs ask for it, beside its soname: *links* that say a version, and the
    unversioned names above whether the host has that link or not."""
    unversioned = f"{library.file_name.partition('.so')[0]}.so"
    asked = {library.soname, *(link for link in library.links if not link.endswith(".so"))}
    if unversioned in _UNVERSIONED:
        asked.add(unversioned)
    return sorted(asked)


def _with_hooks(driver: DriverFiles, hook: str) -> ContainerEdits:
    by_path = (library.host_path for library in driver.libraries)
    others = (*driver.tools, *driver.firmware)
    paths = (*by_path, *(file.host_path for file in others))
    directories = sorted(
        {driver.inside(library.host_path).rpartition("/")[0] for library in driver.libraries}
    )
    links = [part for link in _hook_links(driver) for part in ("--link", link)]
    folders = [part for directory in directories for part in ("--folder", directory)]
    return ContainerEdits(
        env=(f"NVIDIA_CTK_LIBCUDA_DIR={driver.inside(driver.lib_dir)}",),
        mounts=(
            *(Mount(path, driver.inside(path), options=_READ_ONLY) for path in paths),
            *(_mount(file) for file in driver.graphics),
        ),
        hooks=(
            _hook(hook, "create-symlinks", *links),
            _hook(hook, "enable-cuda-compat", f"--host-driver-version={driver.version}"),
            _hook(hook, "update-ldcache", *folders),
            _hook(hook, "disable-device-node-modification"),
        ),
    )


def _hook(path: str, *args: str) -> Hook:
    program = path.rpartition("/")[2]
    return Hook("createContainer", path, (program, *args), env=("NVIDIA_CTK_DEBUG=false",))


def _hook_links(driver: DriverFiles) -> Iterator[str]:
    for library in driver.libraries:
        directory = driver.inside(library.host_path).rpartition("/")[0]
        for stem, link, target in _HOOK_LINKS:
            if library.file_name.startswith(f"{stem}."):
                yield f"{target or library.file_name}::{directory}/{link}"
