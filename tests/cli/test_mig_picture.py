"""GPUs with MIG as text: whose each memory unit is, and what still fits."""

import re

from hypothesis import given
from hypothesis import strategies as st

from dra_driver.cli.mig_picture import (
    available_partitions,
    gpu_mig_pictures,
    memory_units,
    mig_picture,
    placement_letter,
    unit_width,
)
from dra_driver.cli.mig_status import OccupiedPlacement, occupied_placements
from dra_driver.cli.terminal import Terminal, bar_style
from dra_driver.model.gpus import MigInfo, Placement
from dra_driver.model.mig_layouts import LayoutInstance
from dra_driver.model.offer import Device, Offer
from dra_driver.model.records import ClaimRecord, holdings_by_gpu
from tests.builders import gpu
from tests.cli.mig import PROFILES, a100, holding, instance, key, offered, unusable

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
PLAIN = bar_style(Terminal())


def shown(*gpus, holdings=(), laid=None, width=100, offer=None, **fields):
    what = offered(*gpus) if offer is None else offer
    held = holdings_by_gpu([ClaimRecord(each.claim, (each,)) for each in holdings])
    pictures = gpu_mig_pictures(what, gpus, held, laid or {})
    return mig_picture(pictures, Terminal(width=width, **fields)).splitlines()


def test_a_board_shows_whose_each_unit_is_and_what_still_fits():
    board = a100(0, instance("3g.20gb", 0, 1), instance("2g.10gb", 4, 2))

    assert shown(board, holdings=[holding("training", "3g.20gb", 0)]) == [
        "gpu-0  NVIDIA A100-SXM4-40GB  [AAAAAAAAAAAAAAAAAAA|bbbbbbbbb|....|....]  2 free of 8",
        "  A  3g.20gb  team-a/training  MIG-00000000-0000-0000-0000-000000000001",
        "  b  2g.10gb  MIG-00000000-0000-0000-0000-000000000002  not made by this driver",
        "  .  room for 1 x 1g.5gb",
    ]


def test_a_free_board_says_which_partitions_fit():
    assert shown(a100()) == [
        "gpu-0  NVIDIA A100-SXM4-40GB  [....|....|....|....|....|....|....|....]  8 free of 8",
        "  .  room for 7 x 1g.5gb or 3 x 2g.10gb or 2 x 3g.20gb or 1 x 7g.40gb",
    ]


def test_a_board_that_is_also_offered_as_a_whole_says_so_while_nothing_is_on_it():
    board = a100()

    free = shown(board, offer=offered(board, whole=True))
    used = shown(board, holdings=[holding("a", "1g.5gb")], offer=offered(board, whole=True))

    assert free[-1].endswith("or 1 x 7g.40gb or all of it")
    assert used[-1] == "  .  room for 6 x 1g.5gb or 2 x 2g.10gb or 1 x 3g.20gb"


def test_free_units_that_are_too_few_for_anything_are_told_of():
    board = a100()
    seven = [holding(f"c{start}", "1g.5gb", start) for start in range(7)]

    assert shown(board, holdings=seven)[-1] == "  .  too little for any partition that is offered"
    assert shown(board, holdings=seven, offer=Offer())[-1].startswith("  G  ")


def test_words_that_do_not_fit_go_on_below():
    _, first, second = shown(a100(), width=50)

    assert first == "  .  room for 7 x 1g.5gb or 3 x 2g.10gb"
    assert second == "     or 2 x 3g.20gb or 1 x 7g.40gb"


def test_a_claim_for_the_whole_gpu_has_every_unit_and_leaves_no_room():
    board = a100()

    head, entry = shown(board, holdings=[holding("big")], offer=offered(board, whole=True))

    assert head.endswith("[AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA]  0 free of 8")
    assert entry == "  A  the whole GPU  team-a/big"


def test_claims_that_share_a_partition_stand_on_one_line():
    board = a100(0, instance("3g.20gb", 0))
    both = [holding("a", "3g.20gb"), holding("b", "3g.20gb"), holding("a", "3g.20gb")]

    assert shown(board, holdings=both)[1].startswith("  A  3g.20gb  team-a/a, team-a/b  MIG-")


def test_a_partition_that_is_not_created_yet_and_one_that_vanished_are_told_apart():
    gone = instance("2g.10gb", 4, 7)
    on_it = [holding("new", "1g.5gb", 0), holding("old", "2g.10gb", 4, instance=gone)]

    for instances in ([], [instance("2g.10gb", 4, 8)]):
        lines = shown(a100(0, *instances), holdings=on_it)

        assert lines[1] == "  A  1g.5gb   team-a/new  not created yet"
        assert lines[2] == f"  B  2g.10gb  team-a/old  {gone.uuid} vanished"


def test_an_instance_of_a_layout_is_told_from_one_of_somebody_else():
    instances = [instance("1g.5gb", place, place + 1) for place in range(4)]
    board = a100(0, *instances)
    # it was in this place
    another = LayoutInstance(key("1g.5gb", 3), 9, instance("1g.5gb", 3, 9).uuid)
    _, done, begun, _ = instances
    laid = [LayoutInstance(done.key, 2, done.uuid), LayoutInstance(begun.key), another]

    lines = shown(board, laid={board.uuid: laid})

    assert lines[1].endswith("not made by this driver")
    assert lines[2].endswith("made by a layout")
    assert lines[3].endswith("made by a layout")  # it is just being made
    assert lines[4].endswith("not made by this driver")


def test_an_instance_that_is_no_partition_is_in_the_way_and_says_why():
    board = a100(
        unusable=(unusable("3g.20gb", 0), unusable("1g.5gb", 4, 1, 3), unusable("1g.5gb", 5, 2, 4))
    )

    lines = shown(board)

    assert [line.partition("GPU instance ")[2] for line in lines[1:4]] == [
        "9 without a compute instance: offered to nobody",
        "3 with a compute instance that does not fill it: offered to nobody",
        "4 with 2 compute instances: offered to nobody",
    ]
    assert lines[4] == "  .  room for 1 x 1g.5gb"


def test_admin_access_takes_no_unit():
    assert len(shown(a100(), holdings=[holding("monitor", admin=True)])) == 2


def test_a_profile_that_the_board_does_not_know_any_more_is_called_by_its_number():
    board = a100()
    bare = gpu(0, mig=MigInfo(on=True, pending=True, switches=False))

    (block,) = occupied_placements(bare, [holding("a", "1g.5gb")])

    assert block.title == "profile 19"
    assert occupied_placements(board, []) == ()
    assert occupied_placements(gpu(0), [holding("a")]) == ()


def test_there_is_nothing_to_see_of_boards_that_nobody_partitions():
    off = a100(0, on=False, pending=False)

    assert shown(gpu(0), off, offer=Offer((Device(gpu(0)), Device(off)))) == []


def test_a_board_whose_mode_is_off_is_shown_where_its_partitions_are_offered():
    off = a100(0, on=False, pending=False, switches=True)

    assert len(shown(off)) == 2


def test_boards_stand_below_each_other_unit_by_unit():
    lines = shown(a100(0, instance("3g.20gb", 4)), a100(10, instance("1g.5gb", 3)))

    heads = [line for line in lines if line.startswith("gpu-")]
    assert len({line.index("[") for line in heads}) == 1
    assert len({line.index("]") for line in heads}) == 1


def test_a_narrow_terminal_gets_first_smaller_units_then_no_product_then_no_words():
    assert shown(a100(), width=62)[0] == (
        "gpu-0  NVIDIA A100-SXM4-40GB  [.|.|.|.|.|.|.|.]  8 free of 8"
    )
    assert shown(a100(), width=45)[0] == "gpu-0  [..|..|..|..|..|..|..|..]  8 free of 8"
    assert shown(a100(), width=30)[0] == "gpu-0  [.|.|.|.|.|.|.|.]"
    assert shown(a100(), width=10)[0] == "gpu-0  [.|.|.|.|.|.|.|.]"


def test_colour_and_unicode_change_nothing_but_marks():
    board = a100(0, instance("3g.20gb", 0))

    plain = shown(board)
    coloured = shown(board, colour=True)
    drawn = shown(board, unicode=True)

    assert plain != coloured
    assert [COLOUR.sub("", line) for line in coloured] == plain
    assert drawn[0].endswith("[aaaaaaaaaaaaaaaaaaa│····│····│····│····]  4 free of 8")


PLACES = st.builds(Placement, st.integers(0, 7), st.integers(1, 8))


@given(st.lists(PLACES, max_size=8), st.integers(1, 5), st.booleans())
def test_a_row_of_units_is_as_wide_whatever_lies_on_it(places, width, claimed):
    what = [OccupiedPlacement(place, "1g.5gb", "", claimed) for place in sorted(places)]

    drawn = memory_units(what, 8, width, PLAIN)

    assert len(drawn) == 8 * (width + 1) + 1
    taken = {unit for place in places for unit in range(place.start, min(place.end, 8))}
    inside = drawn[1:-1]
    for unit in range(8):
        cell = inside[unit * (width + 1) : unit * (width + 1) + width]
        assert (cell == "." * width) == (unit not in taken)


@given(st.integers(1, 12), st.integers(0, 200))
def test_units_are_never_wider_than_the_room_for_them(number, space):
    width = unit_width(number, space)

    assert width <= 4
    if width > 0:
        assert number * (width + 1) + 1 <= space
    assert unit_width(0, space) == 0


def test_more_blocks_than_letters_begin_again():
    assert placement_letter(26, claimed=True) == "A"


@given(st.data())
def test_as_many_partitions_fit_as_there_is_room_for(data):
    """Compared with every way to place them."""
    board = a100()
    taken = []
    for _ in range(data.draw(st.integers(0, 4))):
        profile = data.draw(st.sampled_from(list(PROFILES.values())))
        free = [
            p for p in profile.placements if not any(p.overlaps(placement) for placement in taken)
        ]
        if free:
            taken.append(data.draw(st.sampled_from(free)))

    available = dict(available_partitions(offered(board), board, taken, ()).partitions)

    for name, profile in PROFILES.items():
        free = [
            p for p in profile.placements if not any(p.overlaps(placement) for placement in taken)
        ]
        assert available.get(name, 0) == _most(free)


def _most(places):
    if not places:
        return 0
    first, *remaining = places
    return max(_most(remaining), 1 + _most([p for p in remaining if not p.overlaps(first)]))
