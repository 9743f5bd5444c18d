"""The command hack/demo."""

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from dra_driver.base.errors import DriverError
from dra_driver.sim.node_spec import node_file
from hack.demonstration import page
from hack.demonstration.errors import DemoError
from hack.demonstration.progress import Steps, style
from hack.demonstration.stage import FRACTIONS_FROM, PARTITIONS, POD, SERVERS, Stage, alone
from hack.testbed import assets
from hack.testbed.cache import cache_dir
from hack.testbed.cluster import Cluster
from hack.testbed.errors import ClusterError
from hack.testbed.layout import default_layout
from hack.testbed.state import load_state

STEPS = 8
SIM = "h100x8"
MPS_SIM = "h100x2-615"  # its driver is one whose MPS server holds the limits
MIG_SIM = "h100x2-mig"
_TROUBLE = (ClusterError, DemoError, DriverError, OSError)


def main() -> int:
    """Do what the command line says; whatever happens, nothing is left that was not asked for."""
    options = _options()
    signal.signal(signal.SIGTERM, _interrupt)
    steps = Steps(STEPS)
    try:
        with alone(default_layout().root):
            if options.down:
                return _down(Stage(_cluster()), steps)
            node_file(options.sim)  # an unknown name is refused now, not after minutes
            return _play(steps, options)
    except _TROUBLE as e:
        steps.say(f"hack/demo: {e}")
        return 1


def _options() -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args()
    shown = MPS_SIM if options.mps else MIG_SIM if options.mig else ""
    if options.sim and shown:
        parser.error(f"--{'mps' if options.mps else 'mig'} shows {shown}: leave --sim out")
    options.sim = options.sim or shown or SIM
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hack/demo",
        description="Pods with a simulated GPU, and with parts of one, on a real Kubernetes on "
        "loopback, shown from end to end, and removed again. DRA_CACHE: where built programs are "
        "kept.",
    )
    parser.add_argument("--keep", action="store_true", help="leave it running, to look around")
    parser.add_argument("--down", action="store_true", help="end what --keep left running")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--mps", action="store_true", help="two pods that compute on one GPU at the same time"
    )
    kinds.add_argument(
        "--mig", action="store_true", help="MIG partitions that are created for two pods"
    )
    parser.add_argument("--sim", metavar="NAME|FILE", help=f"which GPUs (default {SIM})")
    return parser


def _cluster() -> Cluster:
    """The one that is up; else one of the default version."""
    state = load_state(default_layout().state)
    return Cluster(state.version, state.feature_gates) if state else Cluster()


def _play(steps: Steps, options: argparse.Namespace) -> int:
    code = 1
    stage = _stage(options)
    try:
        if stage.is_up:
            steps.say("A demonstration is here already: removing it first.")
            stage.end()
            stage = _stage(options)
        _say_limits(stage, steps)
        shown = _shown(stage, steps, options)
        print(f"\n{shown}\n", flush=True)
        code = 0
    except _TROUBLE as e:
        steps.say(f"\nhack/demo: failed while {steps.current}: {e}")
        if stage.is_up:
            steps.say(f"The logs of everything that ran are in {_saved_logs(stage.cluster)}")
    except KeyboardInterrupt:
        steps.say("\nhack/demo: interrupted")
        code = 130
    except BaseException:  # a mistake of ours: its traceback, but nothing left behind
        _end(stage, steps)
        raise
    if code == 0 and options.keep:
        return _leave(stage, steps, options)
    code = _end(stage, steps) or code
    return code or _say_what_next(steps)


def _stage(options: argparse.Namespace) -> Stage:
    return Stage(_cluster(), options.mps, "mig" if options.mig else "")


def _shown(stage: Stage, steps: Steps, options: argparse.Namespace) -> str:
    """What is shown in the end. What is kept has a controller, too."""
    shown = _scene(options)(stage, steps, options.sim)
    if options.keep:
        stage.start_controller()
    return shown


def _scene(options: argparse.Namespace) -> Callable[[Stage, Steps, str], str]:
    return _run_mps if options.mps else _run_mig if options.mig else _run


def _run(stage: Stage, steps: Steps, sim: str) -> str:
    """What is shown in the end."""
    account = _prepare(stage, steps)
    steps.step(f"starting the driver with simulated GPUs ({sim})")
    devices = stage.start_plugin(account, sim)
    steps.detail(f"published: {', '.join(devices)}")
    steps.step("running a pod with one GPU: deploy/examples/one-gpu")
    log = stage.run_pod()
    steps.step("running three pods that share a GPU: deploy/examples/quarter-gpu")
    quarters = stage.run_quarters()
    steps.detail(page.sharing(quarters))
    steps.step("looking at how the GPU came to the pod")
    view = stage.look(sim, log, quarters)
    steps.detail("done")
    return page.page(view, style(sys.stdout.isatty(), os.environ))


def _run_mps(stage: Stage, steps: Steps, sim: str) -> str:
    """The same of two pods that share a GPU by MPS."""
    _refuse_old(stage)
    account = _prepare(stage, steps)
    steps.step("starting the MPS agent")
    stage.agent.start(sim)
    steps.step(f"starting the driver with simulated GPUs ({sim})")
    devices = stage.start_plugin(account, sim)
    steps.detail(f"published: {', '.join(devices)}")
    steps.step("running two pods under MPS: deploy/examples/mps-two-servers")
    logs = stage.run(SERVERS)
    steps.step("looking at what they have of the GPU")
    cluster = stage.cluster
    view = page.Servers(cluster.version, cluster.why, logs, stage.plugin.claims(sim))
    steps.detail("done")
    return page.servers_page(view, style(sys.stdout.isatty(), os.environ))


def _run_mig(stage: Stage, steps: Steps, sim: str) -> str:
    """The same of two pods with partitions that are created for them."""
    _refuse_old(stage)
    account = _prepare(stage, steps)
    steps.step(f"starting the driver with simulated GPUs ({sim}) and the profile mig")
    devices = stage.start_plugin(account, sim)
    steps.detail(f"published: {', '.join(devices)}")
    steps.step(f"running two pods with partitions: {', '.join(PARTITIONS)}")
    logs = stage.run(*PARTITIONS)
    steps.step("reading how the GPUs are divided, before and after the pods end")
    view = stage.look_at_partitions(sim, logs)
    steps.detail("done")
    return page.partitions_page(view, style(sys.stdout.isatty(), os.environ))


def _refuse_old(stage: Stage) -> None:
    if stage.minor < FRACTIONS_FROM:
        raise DemoError(
            f"Kubernetes {stage.cluster.version} divides no GPU: it takes 1.{FRACTIONS_FROM}; "
            "`hack/cluster down`, then again"
        )


def _prepare(stage: Stage, steps: Steps) -> str:
    """A cluster with the chart on it. The name of the plugin's service account."""
    version = stage.cluster.version
    steps.step("looking at what is here")
    if stage.begin():
        steps.detail(f"Kubernetes {version} is up already, and will be left up")
    steps.step(_building(stage))
    stage.build(steps.detail)
    steps.step(f"starting Kubernetes {version}")
    stage.bring_up(steps.detail)
    steps.step("installing the chart deploy/helm/dra-driver-gpu")
    return stage.install()


def _building(stage: Stage) -> str:
    """What the step of the build is about: minutes, or nothing at all."""
    recipes = [assets.kubernetes(stage.cluster.version)]
    recipes += [] if stage.is_usual else [assets.HELM]
    recipes += [assets.CONTAINERD] if stage.cluster.mode == "full" else []
    targets = {recipe.name: cache_dir() / f"{recipe.name}-{recipe.digest()}" for recipe in recipes}
    missing = [name for name, target in targets.items() if not target.is_dir()]
    if directory := os.environ.get("KUBE_ASSETS"):
        return f"taking programs from KUBE_ASSETS={directory}"
    if missing:
        return f"building {', '.join(missing)} (first time only, 5 to 15 minutes)"
    return f"finding {', '.join(targets)} in {cache_dir()}"


def _say_limits(stage: Stage, steps: Steps) -> None:
    if stage.cluster.why:
        steps.say(f"{page.limits(stage.cluster.why)}\n")


def _say_what_next(steps: Steps) -> int:
    print(f"\n{page.ended()}\n", flush=True)
    steps.say(f"Done in {steps.seconds:.0f} s.")
    return 0


def _leave(stage: Stage, steps: Steps, options: argparse.Namespace) -> int:
    """Say which pod to look into, where one is left."""
    pod = f"{SERVERS}/large" if options.mps else "" if options.mig else f"{POD}/{POD}"
    programs = str(stage.cluster.layout.bin)
    inside = pod if stage.cluster.mode == "full" else ""
    doctor = stage.plugin.doctor(options.sim)
    print(page.left_running(str(stage.cluster.kubeconfig), programs, inside, doctor))
    steps.say(f"\nDone in {steps.seconds:.0f} s.")
    return 0


def _down(stage: Stage, steps: Steps) -> int:
    if not stage.is_up:
        steps.say("Nothing of a demonstration is here.")
        return 0
    return _end(stage, steps)


def _end(stage: Stage, steps: Steps) -> int:
    """Remove what there is. It is soon over, so it is not interrupted."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if not stage.is_up:
        return 0
    try:
        stays = stage.end()
    except _TROUBLE as e:
        steps.say(f"hack/demo: failed while removing it: {e}")
        steps.say("`hack/demo --down` tries again; `hack/cluster down` removes the cluster with it")
        return 1
    steps.say(
        f"Everything is stopped and removed{', but the cluster that was up' if stays else ''}."
    )
    return 0


def _saved_logs(cluster: Cluster) -> Path:
    """A copy that stays when the cluster goes."""
    directory = Path(tempfile.mkdtemp(prefix="dra-demo-logs-"))
    if cluster.logs.is_dir():
        shutil.copytree(cluster.logs, directory, dirs_exist_ok=True, ignore_dangling_symlinks=True)
    return directory


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
