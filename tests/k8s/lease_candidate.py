"""A process that wants a Lease and says when it led: ``lease_candidate.py KUBECONFIG IDENTITY``.

Its lines say when it was found to lead first and last, by the monotonic clock, which all processes
share.
"""

import pathlib
import sys
import time

from dra_driver.k8s.access import load_kubeconfig
from dra_driver.k8s.leader import Leadership, LeaseName, LeaseSeconds

LEASE = LeaseName("default", "probe-lease")


def main() -> None:
    access = load_kubeconfig(pathlib.Path(sys.argv[1]))
    leadership = Leadership(access, LEASE, sys.argv[2], LeaseSeconds(2, 1.5, 0.1))
    leadership.start(lambda: None, lambda: None)
    led, looked_at = False, 0.0
    while True:
        looked_before, looked_at = looked_at, time.monotonic()
        leads = leadership.leads()
        if leads != led:
            line = f"begin {looked_at}" if leads else f"end {looked_before}"
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
        led = leads
        time.sleep(0.001)


if __name__ == "__main__":
    main()
