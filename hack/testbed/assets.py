"""The programs of a cluster: built once from pinned Go modules, or taken from KUBE_ASSETS."""

import hashlib
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hack.testbed.cache import Progress, cache_dir, made
from hack.testbed.errors import ClusterError
from hack.testbed.toolchain import find_go
from hack.testbed.waits import tail

VERSIONS = ("1.36.3", "1.35.4", "1.34.4", "1.30.14", "1.28.15", "1.26.13")
DEFAULT_VERSION = VERSIONS[0]
BUILD_SECONDS = 3600
PROGRESS_SECONDS = 10

CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
NODE = ("kubelet", "containerd", "containerd-shim-runc-v2", "ctr")

_MODULES = Path(__file__).parent / "go"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one Go module is built into. `aliases` are names for a program that looks at its own."""

    name: str
    module: Path
    packages: tuple[str, ...]
    programs: tuple[str, ...]
    sources: Path | None = None
    ldflags: str = "-s -w"
    aliases: Mapping[str, str] = field(default_factory=dict)

    def digest(self) -> str:
        """Changes when anything that the programs are built from does."""
        total = hashlib.sha256(
            repr((self.packages, self.ldflags, sorted(self.aliases.items()))).encode()
        )
        total.update(f"{platform.system()} {platform.machine()}".encode())
        for path in self._files():
            total.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
        return total.hexdigest()[:12]

    def _files(self) -> list[Path]:
        sources = sorted(self.sources.rglob("*.go")) if self.sources else []
        return [self.module / "go.mod", self.module / "go.sum", *sources]

    def lay_out(self, directory: Path) -> None:
        """A module to build in, apart from the checkout."""
        shutil.copytree(self.sources, directory) if self.sources else directory.mkdir()
        for name in ("go.mod", "go.sum"):
            shutil.copy(self.module / name, directory)


def minor(version: str) -> int:
    """Of Kubernetes 1.x.

    >>> minor("1.28.15")
    28
    """
    return int(version.split(".")[1])


def kubernetes(version: str) -> Recipe:
    """Every Kubernetes component in one program, and kubectl."""
    if version not in VERSIONS:
        raise ClusterError(f"Kubernetes {version} is not among those pinned: {', '.join(VERSIONS)}")
    major, minor, _ = version.split(".")
    # Without these the API server (up to 1.27 that of client-go) calls itself v0.0.0, and clients
    # that look at it go astray.
    stamp = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor}
    flags = [
        f"-X k8s.io/{module}.{key}={value}"
        for module in ("component-base/version", "client-go/pkg/version")
        for key, value in stamp.items()
    ]
    components = (*(name for name in CONTROL_PLANE if name != "kubectl"), "kubelet")
    return Recipe(
        name=f"kubernetes-{version}",
        module=_MODULES / version,
        sources=_MODULES / "cmd",
        packages=("./kubernetes", "./kubectl"),
        programs=(*components, "kubectl"),
        ldflags=" ".join(["-s -w", *flags]),
        aliases=dict.fromkeys(components, "kubernetes"),
    )


CONTAINERD = Recipe(
    name="containerd",
    module=_MODULES / "containerd",
    packages=("tool",),
    programs=("containerd", "containerd-shim-runc-v2", "ctr"),
)
HELM = Recipe(name="helm", module=_MODULES / "helm", packages=("tool",), programs=("helm",))


def find_program(name: str, version: str, progress: Progress) -> Path:
    """One program, built now if it has to be; from KUBE_ASSETS where it is there."""
    directory = _given_directory()
    if directory and (directory / name).is_file():
        return directory / name
    for recipe in (kubernetes(version), CONTAINERD, HELM):
        if name in recipe.programs:
            return build(recipe, progress) / name
    known = ", ".join(sorted({*CONTROL_PLANE, *NODE, *HELM.programs}))
    raise ClusterError(f"no program is called {name!r} here; there are: {known}")


def find_programs(names: Iterable[str], version: str, progress: Progress) -> dict[str, Path]:
    """All these programs, by name. With KUBE_ASSETS all must be there, and nothing is built."""
    directory = _given_directory()
    if directory is None:
        return {name: find_program(name, version, progress) for name in names}
    paths = {name: directory / name for name in names}
    if missing := [name for name, path in paths.items() if not os.access(path, os.X_OK)]:
        raise ClusterError(
            f"KUBE_ASSETS={directory} lacks: {', '.join(missing)}. Put them there (executable), "
            "or unset KUBE_ASSETS to have them built"
        )
    return paths


def _given_directory() -> Path | None:
    directory = os.environ.get("KUBE_ASSETS")
    return Path(directory).absolute() if directory else None


def build(recipe: Recipe, progress: Progress) -> Path:
    """The directory with the programs of this recipe."""
    target = cache_dir() / f"{recipe.name}-{recipe.digest()}"
    return made(target, lambda directory: _build(recipe, directory, progress), progress)


def _build(recipe: Recipe, directory: Path, progress: Progress) -> None:
    go = find_go(recipe.module, progress)
    module = directory / "src"
    recipe.lay_out(module)
    progress(f"{recipe.name}: fetching the Go modules (once)")
    packages = _go(recipe, [go, "list", "-deps", *recipe.packages], module)
    progress(f"{recipe.name}: compiling up to {len(packages)} packages (once, some minutes)")
    command: list[str | Path] = [
        go,
        "build",
        "-v",
        "-ldflags",
        recipe.ldflags,
        "-o",
        f"{directory}/",
        *recipe.packages,
    ]
    _watch(recipe, command, module, len(packages), progress)
    for alias, program in recipe.aliases.items():
        (directory / alias).symlink_to(program)
    if missing := [name for name in recipe.programs if not (directory / name).exists()]:
        raise ClusterError(f"{recipe.name} was built, but without {', '.join(missing)}")
    shutil.rmtree(module)


def _environment() -> dict[str, str]:
    # -mod=readonly: what is built is what go.mod and go.sum say, whatever exists meanwhile.
    # GOTOOLCHAIN=local: the Go that was chosen, not one that it would fetch.
    # GOGC: a compiler that collects less often takes a fifth less time (31 s of CPU time, not 38).
    return {
        **os.environ,
        "CGO_ENABLED": "0",
        "GOTOOLCHAIN": "local",
        "GOGC": "400",
        "GOMEMLIMIT": "2GiB",
        "GOWORK": "off",
        "GO111MODULE": "on",
        "GOFLAGS": "-mod=readonly -trimpath -buildvcs=false",
    }


def _go(recipe: Recipe, command: list[str | Path], module: Path) -> list[str]:
    answer = subprocess.run(
        command,
        cwd=module,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    if answer.returncode != 0:
        ending = "\n".join(answer.stderr.splitlines()[-15:])
        raise ClusterError(f"{recipe.name}: the Go modules cannot be had:\n{ending}")
    return answer.stdout.splitlines()


def _watch(
    recipe: Recipe, command: list[str | Path], module: Path, total: int, progress: Progress
) -> None:
    """Run the build, and say every few seconds how far it is."""
    log = module / "build.log"
    start = spoken = time.monotonic()
    with (
        log.open("wb") as f,
        subprocess.Popen(
            command, cwd=module, env=_environment(), stdin=subprocess.DEVNULL, stdout=f, stderr=f
        ) as compiling,
    ):
        try:
            while compiling.poll() is None:
                now = time.monotonic()
                if now - start > BUILD_SECONDS:
                    raise ClusterError(f"{recipe.name}: not built in {BUILD_SECONDS} s")
                if now - spoken > PROGRESS_SECONDS:
                    spoken = now
                    lines = log.read_bytes().count(b"\n")
                    progress(f"{recipe.name}: {lines} of {total} packages, {now - start:.0f} s")
                time.sleep(0.1)
        finally:
            compiling.terminate()
    if compiling.returncode != 0:
        raise ClusterError(
            f"{recipe.name}: the build failed; its last lines:\n{tail(log)}\n"
            "Packages that were compiled are kept: run the same command again once it is mended"
        )
    progress(f"{recipe.name}: built in {time.monotonic() - start:.0f} s")
