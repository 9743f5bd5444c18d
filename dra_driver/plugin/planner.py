"""What preparing a claim takes, by what is offered, what others hold and what the GPUs say now."""

from collections.abc import Collection
from dataclasses import replace

from dra_driver.errors import DriverError, NodeError, SettingsError, UnknownDevice
from dra_driver.kubeletplugin.claims import Claim
from dra_driver.model.devices import DeviceName
from dra_driver.model.offer import Offer, board
from dra_driver.plan.gpu_settings import to_look_up, with_found
from dra_driver.plan.mig.claims import still_cut
from dra_driver.plan.mps import Pods
from dra_driver.plan.prepare import Plan, plan_claim
from dra_driver.plugin.claim_partitions import ClaimPartitions
from dra_driver.plugin.side_by_side import side_by_side
from dra_driver.plugin.tools import Tools
from dra_driver.plugin.unsettled import refuse_unsettled


class Planner:
    """Plans claims for the node whose pool is *pool*."""

    def __init__(self, tools: Tools, pool: str, partitions: ClaimPartitions) -> None:
        self._node = tools.node
        self._offers = tools.offers
        self._ledger = tools.ledger
        self._pool = pool
        self._partitions = partitions

    def wanted(self, claim: Claim) -> set[str]:
        """The GPUs of *claim*, by name and by UUID: a GPU can be called otherwise than it was."""
        names = {board(allocation.device) for allocation in claim.allocations}
        try:
            offered = self._offers.now().by_name
        except DriverError:  # what was prepared before is answered all the same
            return names
        devices = (offered.get(DeviceName(a.device)) for a in claim.allocations)
        return names | {device.gpu.uuid for device in devices if device is not None}

    def offer(self, claim: Claim) -> Offer:
        """What is offered now. NodeError: the node's profile cannot be used."""
        try:
            return self._offers.now()
        except SettingsError as e:
            raise NodeError(
                f"claim {claim.ref} has to wait for a profile of this node that can be used: {e}"
            ) from e

    def plan(self, claim: Claim, offer: Offer, wanted: Collection[str], pods: Pods | None) -> Plan:
        """While nobody else acts on *wanted*: the GPUs of *claim*. Errors as ``plan_claim`` says,
        and NodeError where somebody else has changed a GPU."""
        refuse_unsettled(claim, self._ledger.set_aside())
        neighbours = self._ledger.neighbours(claim.ref.uid, wanted)
        left = self._ledger.leftover(claim.ref.uid)
        others = (*neighbours, *still_cut(left))
        try:
            plan = plan_claim(claim, offer, others, self._pool, pods)
        except UnknownDevice:
            # It may have appeared since the last look: the scheduler saw another process's slice.
            plan = plan_claim(claim, self._offers.refresh(), others, self._pool, pods)
        if self._partitions.are_taken(plan, others):
            # By somebody else, since the last look: what is there now may do, or says who it is.
            plan = plan_claim(claim, self._offers.refresh(), others, self._pool, pods)
            self._partitions.refuse_taken(plan, others)
        self._partitions.drop(left, (*neighbours, plan.record))
        settings = to_look_up(plan.steps, others)
        found = dict(zip(settings, side_by_side(self._node.found, settings), strict=True))
        return replace(plan, steps=with_found(plan.steps, found))
