"""The plugin is killed at a moment that a test chooses, and is started again."""

import re
import signal
import time

from tests.e2e.kube import every, wait
from tests.e2e.mig import change_gpu

WORK = re.compile("MIG mode switched|partition (created|removed)|claim served")


def nothing():
    """It comes to that call by itself."""


def killed_at(driver, function, when, again=nothing, begin=nothing):
    """The plugin, which is started where none runs, dies at a call to NVML of the first GPU that
    *begin*, and *again*, done now and then, bring about."""
    change_gpu(driver, fails={function: when})
    begin()
    if "" not in driver.processes:
        driver.start(ready=False)
    process = driver.processes[""]
    dead = lambda: again() or process.poll() is not None  # noqa: E731
    try:
        wait(f"the plugin to be killed at {function}", dead, 40, 0.2)
    finally:
        change_gpu(driver, fails=None)
    del driver.processes[""]
    assert process.returncode == -signal.SIGKILL


def killed_at_work(driver, kube, moments, names, **flags):
    """Kill the plugin a moment after it began to do something for one of these pods, and start it
    with *flags*. Pods that an earlier kill left half prepared are to be among them: nobody else has
    the kubelet look at them soon, and they hold what others wait for."""
    before = len(driver.log)
    nudge = every(1.0, lambda: kube.nudge_all(names))
    works = lambda: nudge() or WORK.search(driver.log, before)  # noqa: E731
    wait(f"something to be done for {names}", works, 30, 0.05)
    time.sleep(moments.uniform(0, 0.06))
    driver.kill()
    driver.start(ready=False, **flags)


def goes(kube, name):
    """A pod that is deleted: what failed is tried again when it is changed."""
    nudge = every(1.0, lambda: kube.nudge(name))
    wait(f"{name} to go", lambda: nudge() or kube.find("Pod", name) is None, 60, 0.5)


def records_go(driver, kube, names):
    """The records of all pods, of which *names* are deleted: likewise."""
    nudge = every(1.0, lambda: kube.nudge_all(names))
    wait("every record to go", lambda: nudge() or not driver.claims(), 90, 0.5)
