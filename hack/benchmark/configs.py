"""What the costliest configurations that a user can write take of the plugin."""

import time
from contextlib import suppress

from dra_driver.base.errors import ClaimError
from dra_driver.k8s.claims import ClaimRef, ClaimUid, parse_claim
from dra_driver.k8s.responses import parse_json
from dra_driver.plan.prepare.sharing import decode_configs, with_decoded_configs
from hack.benchmark.figures import Measured, Results
from tests.fakes.configs import LONGEST, MOST, claim_text, shapes

_REF = ClaimRef("default", "worst", ClaimUid("uid-worst"))


def measure(repeats: int) -> Results:
    """CPU time from the API server's answer to the decoded configurations: of each shape the best
    of *repeats*, since other work on the machine is nothing of ours; the shape that takes most."""
    best = {name: min(_seconds(text) for _ in range(repeats)) for name, text in shapes().items()}
    worst = max(best, key=lambda name: best[name])
    where = f"{MOST} of {LONGEST >> 10} KiB, {len(best)} shapes, the worst of them: {worst}"
    return {"worst_configs_ms": Measured(best[worst] * 1000, where, repeats)}


def _seconds(parameters: str) -> float:
    answer = claim_text(parameters).encode()
    begun = time.process_time()
    claim = with_decoded_configs(parse_claim(parse_json(answer), _REF, "gpu.nvidia.com"))
    with suppress(ClaimError):
        decode_configs(claim)
    return time.process_time() - begun
