"""Whose the memory units of a GPU are that can be cut: claims', somebody else's, or nobody's."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from dra_driver.model.devices import Gpu
from dra_driver.model.holdings import Held, Holding
from dra_driver.model.layouts import Made
from dra_driver.model.mig import Instance, Mig, OddInstance, PartitionKey, Placement

WHOLE = "the whole GPU"


@dataclass(frozen=True, slots=True)
class Block:
    """A row of memory units that belong together."""

    placement: Placement
    what: str  # "3g.20gb", or WHOLE
    whose: str  # in words, for people
    claimed: bool = False
    key: PartitionKey | None = None  # None: of no partition that can be used


def blocks(gpu: Gpu, holdings: Iterable[Holding], laid: Collection[Made] = ()) -> tuple[Block, ...]:
    """What of *gpu* is taken, by placement. *holdings*: of this GPU; *laid*: instances that a
    layout made. Empty for a GPU that cannot be cut."""
    if gpu.mig is None:
        return ()
    by_key: dict[PartitionKey | None, list[Holding]] = defaultdict(list)
    for holding in holdings:
        if not holding.admin:
            by_key[holding.partition].append(holding)
    found = [_held(gpu.mig, key, its) for key, its in by_key.items()]
    found += [_free(gpu.mig, one, laid) for one in gpu.mig.instances if one.key not in by_key]
    found += [_odd(gpu.mig, one) for one in gpu.mig.odd if one.key not in by_key]
    return tuple(sorted(found, key=lambda block: (block.placement, block.what)))


def holdings_of(gpu: Gpu, held: Held) -> Iterator[Holding]:
    """Everything that claims hold of *gpu*, however it was called when they got it."""
    for holdings in held.values():
        yield from (one for one in holdings if one.of_gpu in (gpu.uuid, gpu.name))


def profile_name(mig: Mig | None, key: PartitionKey) -> str:
    """As people call it; a board that does not know the profile leaves its number."""
    profile = mig.profile(key.profile_id) if mig else None
    return profile.name if profile else f"profile {key.profile_id}"


def _held(mig: Mig, key: PartitionKey | None, holdings: Collection[Holding]) -> Block:
    claims = ", ".join(dict.fromkeys(str(holding.claim) for holding in holdings))
    if key is None:
        return Block(Placement(0, mig.units), WHOLE, claims, claimed=True)
    there = {one.key: one.uuid for one in mig.instances}.get(key)
    known = next((one.instance.uuid for one in holdings if one.instance), None)
    state = there if known in (None, there) else f"{known} vanished"
    state = state or "not cut yet"
    return Block(key.placement, profile_name(mig, key), f"{claims}  {state}", claimed=True, key=key)


def _free(mig: Mig, one: Instance, laid: Collection[Made]) -> Block:
    if not one.uuid:
        return Block(one.key.placement, profile_name(mig, one.key), "cut by its layout")
    by_layout = any(made.key == one.key and made.uuid in ("", one.uuid) for made in laid)
    maker = "made by a layout" if by_layout else "not made by this driver"
    name = profile_name(mig, one.key)
    return Block(one.key.placement, name, f"{one.uuid}  {maker}", key=one.key)


def _odd(mig: Mig, one: OddInstance) -> Block:
    return Block(one.key.placement, profile_name(mig, one.key), odd_words(one))


def odd_words(one: OddInstance) -> str:
    """What is wrong with it."""
    match one.cis:
        case 0:
            inside = "without a compute instance"
        case 1:
            inside = "with a compute instance that does not fill it"
        case number:
            inside = f"with {number} compute instances"
    return f"GPU instance {one.gi} {inside}: offered to nobody"
