"""kill -9 at every effect of Allocate, PreStartContainer and taking back."""

import pytest

from dra_driver.model.profiles import SharingStrategy
from dra_driver.node.state.claim_files import CdiSpecFiles, ClaimFiles, MetadataFiles
from dra_driver.node.state.ledger import Ledger
from tests.fakes.allocations import GPU, AllocationWorld, replica
from tests.fakes.preparers import DRIVER


class Killed(BaseException):
    """Nothing that would clean up runs, because nobody catches it."""


class Effects:
    """Counts effects, and kills at the *at*-th: before it, or when it is done."""

    def __init__(self) -> None:
        self.at = 0
        self.after = False
        self.count = 0
        self.dead = False

    def kill_at(self, at: int, after: bool) -> None:
        self.at, self.after, self.count, self.dead = at, after, 0, False

    def act(self, effect):
        """Do *effect*; the dead do nothing."""
        self._check()
        self.count += 1
        is_the_one = self.count == self.at
        self.dead = is_the_one and not self.after
        self._check()
        answer = effect()
        self.dead = self.dead or is_the_one
        self._check()
        return answer

    def _check(self) -> None:
        if self.dead:
            raise Killed


def mortal(base, *names):
    """*base*, each of whose methods *names* is an effect; *effects* of the class counts them."""

    def method(name):
        def call(self, *args):
            return type(self).effects.act(lambda: getattr(base, name)(self, *args))

        return call

    return type(f"Mortal{base.__name__}", (base,), {name: method(name) for name in names})


class World(AllocationWorld):
    def __init__(self, directory):
        self.effects = Effects()
        super().__init__(
            directory, replicas=4, default_strategy=SharingStrategy.MPS, fractions=True
        )

    def start(self, **fields):
        self.effects.kill_at(0, False)
        super().start(**fields)

    def open_disk(self):
        super().open_disk()
        ledger = mortal(Ledger, "begin", "write", "end", "forget")
        specs = mortal(CdiSpecFiles, "write", "remove")
        metadata = mortal(MetadataFiles, "write", "remove")
        for kind in (ledger, specs, metadata):
            kind.effects = self.effects
        self.ledger = ledger(self.directory / "claims", f"boot-{self.boot}")
        self.specs = specs(self.directory / "cdi", f"k8s.{DRIVER}")
        self.files = ClaimFiles(self.specs, metadata(self.directory / "plugin"))
        for name in ("_serve", "_limit", "_make", "_do"):
            plain = getattr(type(self.node), name)
            setattr(self.node, name, self._mortal_step(plain))

    def _mortal_step(self, plain):
        return lambda *args: self.effects.act(lambda: plain(self.node, *args))

    def ends_with_nothing_left(self):
        """Every pod ends, and some looks later there is nothing."""
        for uid in list(self.node_pods):
            self.end(uid.removeprefix("uid-"))
        for _ in range(3):
            self.now += 60
            self.reconciler.look()
        return self.nothing_left and not self.node.namespaces


def admit_train(world):
    world.admit("train", replica(0), replica(1, 1))


def start_train(world):
    world.allocations.pre_start(GPU, [replica(0), replica(1, 1)])


def take_back(world):
    world.reconciler.look()
    world.now += 60
    world.reconciler.look()


def end_train(world):
    world.end("train", deleted=False)


ACTS = {
    "Allocate": ((), admit_train),
    "PreStartContainer": ((admit_train,), start_train),
    "PreStartContainer after a reboot": ((admit_train, lambda world: world.reboot()), start_train),
    "PreStartContainer of the next pod": (
        (
            admit_train,
            start_train,
            end_train,
            lambda world: world.admit("next", replica(0)),
        ),
        lambda world: world.allocations.pre_start(GPU, [replica(0)]),
    ),
    "taking back": ((admit_train, start_train, end_train), take_back),
}


def effects_of(world, before, act):
    for step in before:
        step(world)
    world.effects.kill_at(0, False)
    act(world)
    return world.effects.count


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", list(ACTS))
def test_killed_at_any_effect_the_next_process_goes_on_and_nothing_is_left_over(
    tmp_path, name, after
):
    before, act = ACTS[name]
    effects = effects_of(World(tmp_path / "alive"), before, act)
    assert effects > 3
    for at in range(1, effects + 1):
        world = World(tmp_path / str(at))
        for step in before:
            step(world)
        world.effects.kill_at(at, after)
        with pytest.raises(Killed):
            act(world)

        world.start()
        act(world)  # the kubelet asks again, and so does the loop
        if name.startswith("PreStart"):
            (record,) = world.ledger.records()
            assert record.completed
            assert record.pods
            assert {namespace.name for namespace in record.namespaces} == set(world.node.namespaces)

        assert world.ends_with_nothing_left(), f"killed at effect {at} of {effects}"


@pytest.mark.parametrize("name", list(ACTS))
def test_killed_at_any_effect_and_never_asked_again_nothing_is_left_over(tmp_path, name):
    before, act = ACTS[name]
    effects = effects_of(World(tmp_path / "alive"), before, act)
    for at in range(1, effects + 1):
        world = World(tmp_path / str(at))
        for step in before:
            step(world)
        world.effects.kill_at(at, True)
        with pytest.raises(Killed):
            act(world)

        world.start()

        assert world.ends_with_nothing_left(), f"killed at effect {at} of {effects}"
