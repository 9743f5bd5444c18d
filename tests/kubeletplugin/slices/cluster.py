"""Slices as an API server holds them."""

import copy

from dra_driver.kubeletplugin.slices.reconcile import SliceOwner, plan_writes

HOME = SliceOwner("gpu.example.com", "n1", "uid-of-n1")


class Cluster:
    """Slices as an API server holds them, and whether what can be seen of them is sound."""

    def __init__(self):
        self.slices = {}
        self.version = 0

    def seen(self):
        return copy.deepcopy(list(self.slices.values()))

    def add(self, document, name=None):
        self.version += 1
        made = copy.deepcopy(dict(document))
        prefix = made["metadata"].pop("generateName", "")
        made["metadata"]["name"] = name or f"{prefix[:58]}{self.version:05d}"
        made["metadata"]["uid"] = f"uid-{self.version}"
        made["metadata"]["resourceVersion"] = str(self.version)
        self.slices[made["metadata"]["name"]] = made
        return made

    def steps(self, writes):
        """Carry out *writes* one by one, in their order."""
        for each in writes.delete:
            deleted = self.slices.pop(each["metadata"]["name"])
            assert deleted["metadata"]["resourceVersion"] == each["metadata"]["resourceVersion"]
            yield
        for each in writes.update:
            updated = self.slices[each["metadata"]["name"]]
            assert updated["metadata"]["resourceVersion"] == each["metadata"]["resourceVersion"]
            assert updated["spec"]["pool"]["name"] == each["spec"]["pool"]["name"]
            self.version += 1
            each = copy.deepcopy(dict(each))
            each["metadata"]["resourceVersion"] = str(self.version)
            self.slices[each["metadata"]["name"]] = each
            yield
        for each in writes.create:
            self.add(each)
            yield

    def apply(self, writes):
        return sum(1 for _ in self.steps(writes))

    def publish(self, target):
        return self.apply(plan_writes(target, self.seen(), HOME))

    def visible(self, name="n1"):
        """The devices of the pool that the scheduler would use; None while it is incomplete."""
        ours = [
            each["spec"] for each in self.slices.values() if each["spec"]["pool"]["name"] == name
        ]
        newest = max((each["pool"]["generation"] for each in ours), default=0)
        current = [each for each in ours if each["pool"]["generation"] == newest]
        if not current or len(current) < max(s["pool"]["resourceSliceCount"] for s in current):
            return None
        return [each["name"] for spec in current for each in spec.get("devices", ())]

    def published(self):
        """Devices by slice, in the order in which the scheduler tries them."""
        ordered = sorted(self.slices.items())
        return ["".join(d["name"] for d in each["spec"].get("devices", ())) for _, each in ordered]

    def generations(self):
        return {each["spec"]["pool"]["generation"] for each in self.slices.values()}
