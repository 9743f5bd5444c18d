"""The table of how boards can be partitioned is consistent, and says what was never seen."""

import doctest
import itertools
import re

import pynvml
import pytest

from dra_driver.sim.mig import identifiers
from dra_driver.sim.mig.geometry import (
    COLUMNS,
    COMPUTE_SLICES,
    ENGINES,
    board_geometry,
    compute_instance_placements,
    geometry_documents,
)
from dra_driver.sim.mig.identifiers import MigUuidParts, mig_uuid, parse_mig_uuid, uuid_tag
from dra_driver.sim.node_spec import board_specs

FAMILIES = sorted(geometry_documents())
NUMBERS = {
    getattr(pynvml, name): name.removeprefix("NVML_GPU_INSTANCE_PROFILE_")
    for name in dir(pynvml)
    if name.startswith("NVML_GPU_INSTANCE_PROFILE_") and not name.endswith("_COUNT")
}
SUFFIXES = {"": "", "REV1": "+me", "GFX": "+gfx", "ALL_ME": "+me.all", "NO_ME": "-me", "REV2": ""}


def board(family):
    geometry = board_geometry(geometry_documents()[family]["products"][0])
    assert geometry is not None
    return geometry


def rows(family):
    """Its profiles as columns by name."""
    return {
        name: dict(zip(COLUMNS, row, strict=True))
        for name, row in geometry_documents()[family]["profiles"].items()
    }


def assumed(family):
    """Which cells of a family nobody has seen."""
    for column, names in geometry_documents()[family].get("assumed", {}).items():
        for name in rows(family) if names == "all" else names:
            yield column, name


def largest(family):
    return max(rows(family).values(), key=lambda row: row["size"] * 100 + row["slices"])


def test_every_product_with_a_mig_mode_has_a_geometry_and_no_other():
    with_mode = {product for product, spec in board_specs().items() if spec.mig}
    products = [product for entry in geometry_documents().values() for product in entry["products"]]
    assert sorted(products) == sorted(with_mode)
    assert board_geometry("T4") is None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_placement_lies_on_the_board_and_the_largest_covers_it(family):
    geometry = board(family)
    places = [place for profile in geometry.profiles for place in profile.placements]
    assert all(place.start >= 0 and place.end <= geometry.units for place in places)
    assert max(place.size for place in places) == geometry.units
    assert max(profile.slices for profile in geometry.profiles) == geometry.slices


@pytest.mark.parametrize("family", FAMILIES)
def test_the_most_instances_of_a_profile_are_the_largest_set_that_does_not_overlap(family):
    geometry = board(family)
    for profile in geometry.profiles:
        apart = max(
            len(chosen)
            for count in range(len(profile.placements) + 1)
            for chosen in itertools.combinations(profile.placements, count)
            if not any(a.overlaps(b) for a, b in itertools.combinations(chosen, 2))
        )
        with_media = "+me" in profile.name
        assert profile.most == (1 if with_media else apart), profile.name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_most_instances_of_a_profile_fit_into_the_boards_engines_slices_and_memory(family):
    geometry = board(family)
    memory = max(profile.memory_bytes for profile in geometry.profiles)
    assert memory <= board_specs()[geometry_documents()[family]["products"][0]].memory_bytes
    for profile in geometry.profiles:
        assert profile.most * profile.slices <= geometry.slices
        assert profile.most * profile.memory_bytes <= memory
        for name in ENGINES:
            used = profile.most * getattr(profile.engines, name)
            assert used <= getattr(geometry.engines, name), (profile.name, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_nvmls_and_ids_are_told_apart(family):
    geometry = board(family)
    assert len({profile.id for profile in geometry.profiles}) == len(geometry.profiles)
    assert len({profile.number for profile in geometry.profiles}) == len(geometry.profiles)
    for profile in geometry.profiles:
        slices, _, kind = NUMBERS[profile.number].partition("_SLICE")
        assert int(slices) == profile.slices
        suffix = re.escape(SUFFIXES[kind.removeprefix("_")])
        assert re.fullmatch(rf"{profile.slices}g\.\d+gb{suffix}", profile.name)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_guessed_is_of_the_board_and_nowhere_said_to_be_the_sisters(family):
    guessed = geometry_documents()[family].get("guessed", {})
    cells = {(column, name) for column, names in guessed.items() for name in names}
    assert not cells & set(assumed(family))
    for column, name in cells:
        row = rows(family)[name]
        alike = [each for each in rows(family).values() if each["size"] == row["size"]]
        if column == "memory_mib":  # as much as others of as many units
            assert {each[column] for each in alike} == {row[column]}
        else:
            assert column == "id"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_nobody_has_seen_is_what_the_sister_board_has(family):
    entry = geometry_documents()[family]
    cells = list(assumed(family))
    if not cells:
        return
    sister = {row["number"]: row for row in rows(entry["sister"]).values()}
    plain = {row["slices"]: row for row in rows(entry["sister"]).values() if row["number"] < 7}
    own_memory, her_memory = (largest(each)["memory_mib"] for each in (family, entry["sister"]))
    own_board, her_board = (
        board_specs()[geometry_documents()[each]["products"][0]].memory_bytes
        for each in (family, entry["sister"])
    )
    for column, name in cells:
        row = rows(family)[name]
        hers = sister.get(row["number"]) or plain[row["slices"]]
        if column != "memory_mib":
            assert row[column] == hers[column], (name, column)
        elif row["size"] == entry["units"]:
            assert abs(row[column] - hers[column] * own_board / her_board) < 1
        else:
            assert abs(row[column] - hers[column] * own_memory / her_memory) < 1, name


def test_the_profile_that_creates_is_not_asked_for_by_its_id():
    geometry = board("A100-40")
    assert geometry.profile(19) == geometry.numbered(0) == geometry.named("1g.5gb")
    assert geometry.profile(4) is geometry.numbered(5) is geometry.named("8g") is None


@pytest.mark.parametrize("slices", COMPUTE_SLICES)
def test_a_gpu_instance_can_be_filled_by_one_compute_instance(slices):
    (place,) = compute_instance_placements(slices, slices)
    assert (place.start, place.size) == (0, slices)
    assert compute_instance_placements(4, 3) == compute_instance_placements(slices, 8) == ()


def test_a_uuid_says_what_it_is_and_nothing_else_is_taken_for_one():
    parts = MigUuidParts(minor=300, number=17, start=11, gi=14, ci=7, tag=uuid_tag("GPU-a"))
    uuid = mig_uuid(parts)
    assert parse_mig_uuid(uuid) == parts
    assert parts.is_of("GPU-a")
    assert not parts.is_of("GPU-b")
    changed = uuid[:-1] + ("0" if uuid[-1] != "0" else "1")
    unusable = uuid.replace("-8", "-8 ", 1)[: len(uuid)]
    real = "MIG-ecec8837-aaaa-5002-8401-00000001fd68"
    for text in ("", "GPU-a", uuid.upper(), changed, unusable, "MIG-" + "x" * 36, real):
        assert parse_mig_uuid(text) is None


def test_the_documentation_is_true():
    assert doctest.testmod(identifiers).failed == 0
