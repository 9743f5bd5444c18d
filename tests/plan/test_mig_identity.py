"""What layouts made is known again, and nothing else is taken for it."""

from dataclasses import replace

import pytest

from dra_driver.model.devices import GpuUuid
from dra_driver.model.inventory import Inventory
from dra_driver.model.layouts import Before, Book, Made
from dra_driver.model.mig import Instance, Mig, OddInstance, PartitionKey
from dra_driver.plan.mig.identity import keys_of, known_by, remembered, still_there
from tests.fakes.values import gpu

KEY, OTHER = PartitionKey(19, 0, 1, 1), PartitionKey(19, 1, 1, 1)
MADE = Made(KEY, 7, "MIG-1")


def cut(*instances, odd=(), on=True):
    return replace(gpu(), mig=Mig(on, on, True, (), instances, odd))


def instance(key=KEY, gi=7, uuid="MIG-1"):
    return Instance(key, gi, 0, GpuUuid(uuid))


@pytest.mark.parametrize(
    ("there", "is_ours"),
    [
        pytest.param(cut(instance()), True, id="the same"),
        pytest.param(cut(instance(gi=8)), False, id="another GPU instance"),
        pytest.param(cut(instance(uuid="MIG-2")), False, id="another compute instance"),
        pytest.param(cut(instance(OTHER)), False, id="another place"),
        pytest.param(cut(odd=(OddInstance(KEY, 7, 0),)), True, id="half removed"),
        pytest.param(cut(odd=(OddInstance(KEY, 8, 0),)), False, id="half of another one"),
        pytest.param(cut(), False, id="nothing"),
        pytest.param(gpu(), False, id="a GPU that cannot be cut"),
    ],
)
def test_an_instance_is_known_by_more_than_its_place(there, is_ours):
    assert still_there(there, [MADE]) == ((MADE,) if is_ours else ())


def test_what_it_is_known_by_is_told_by_the_instance():
    assert known_by(instance()) == MADE
    assert keys_of([MADE, Made(OTHER)]) == {KEY, OTHER}


@pytest.mark.parametrize("there", [cut(instance()), cut(odd=(OddInstance(KEY, 3, 0),))])
def test_what_a_crash_kept_from_being_known_further_is_what_lies_there(there):
    assert still_there(there, [Made(KEY), Made(OTHER)]) == (Made(KEY),)


def test_what_is_gone_is_forgotten():
    uuid = gpu().uuid
    book = Book(made={uuid: (MADE, Made(OTHER, 8, "MIG-2"))})

    assert remembered(book, Inventory((cut(instance()),)), ()).made == {uuid: (MADE,)}
    assert remembered(book, Inventory((cut(),)), ()).made == {}


def test_of_what_cannot_be_seen_nothing_is_forgotten():
    uuid = gpu().uuid
    book = Book(made={uuid: (MADE,)})

    assert remembered(book, Inventory(), ()) == book
    assert remembered(book, Inventory((gpu(),)), ()) == book


def test_of_a_gpu_that_a_look_could_not_read_nothing_is_forgotten():
    uuid = gpu().uuid
    book = Book(made={uuid: (MADE,)}, left_on=(uuid,))

    def seen(*old):
        return Inventory((cut(on=False),), as_before=frozenset(old))

    assert remembered(book, seen(uuid), ()) == book
    assert remembered(book, seen(GpuUuid("GPU-another")), ()) == Book()


def test_what_is_gone_of_a_change_that_was_cut_short_is_forgotten_too():
    uuid = gpu().uuid
    before = {uuid: Before(True, (KEY,))}
    book = Book(made={uuid: (MADE, Made(OTHER))}, before=before)

    assert remembered(book, Inventory((cut(),)), ()) == Book(before=before)
    left = remembered(book, Inventory((cut(odd=(OddInstance(KEY, 7, 0),)),)), ())
    assert left == Book(made={uuid: (MADE,)}, before=before)


def test_whose_mode_a_claim_turned_on_is_known_until_it_is_off():
    uuid = gpu().uuid
    noted = remembered(Book(), Inventory((cut(on=False),)), {uuid})

    assert noted.left_on == (uuid,)
    assert remembered(noted, Inventory((cut(),)), ()).left_on == (uuid,)
    assert remembered(noted, Inventory(), ()).left_on == (uuid,)
    assert remembered(noted, Inventory((cut(on=False),)), ()).left_on == ()
