"""In which of its spaces a claim has a device, where it has several on one GPU.

The ledger does not say it. What containers get with the device does: it is the way to its space.
"""

from collections.abc import Mapping, Sequence

import cdi
from dra_driver.model.holdings import Holding, Record
from dra_driver.model.mps import Served, Space, SpaceName
from dra_driver.plan.mps_edits import mps_edits

_PIPE = "CUDA_MPS_PIPE_DIRECTORY="
_PROTOCOLS = (2, 3)


def spaces_of_device(
    record: Record,
    holding: Holding,
    there: Sequence[Space],
    served: Mapping[SpaceName, Served],
) -> Sequence[Space]:
    """Those of the spaces *there* that the device can be in; one, where that can be told.

    *served*: as the agent serves them, where it was asked and does.
    """
    env = _environment(record, holding)
    directory = next((e.removeprefix(_PIPE) for e in env if e.startswith(_PIPE)), None)
    if directory is None:
        return there
    found = []
    for space in there:
        one = served.get(space.name)
        is_it = one is None or one.pipe_directory == directory
        protocols = _PROTOCOLS if one is None else (one.protocol,)
        edits = [mps_edits(Served(space, protocol, directory)).env for protocol in protocols]
        if is_it and any(env >= set(each) for each in edits):
            found.append(space)
    return found or there


def _environment(record: Record, holding: Holding) -> frozenset[str]:
    """What containers get with the device; empty where it is not prepared."""
    try:
        spec = cdi.from_text(record.spec or "")
    except cdi.CdiError:
        return frozenset()
    names = {
        cdi.parse_name(text).device
        for one in record.prepared or ()
        if (one.device, one.share) == (holding.device, holding.share)
        for text in one.cdi_ids
    }
    edits = (device.container_edits for device in spec.devices if device.name in names)
    return frozenset(entry for one in edits for entry in one.env)
