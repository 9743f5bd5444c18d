"""Usage of GPUs as text: whose cells are how many, and what is said beside them."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.cli.claims.bars import bar, cells, usage_bars, usage_summary
from dra_driver.cli.terminal import Terminal, bar_style, terminal
from dra_driver.cli.usage import gpu_usages
from dra_driver.model.gpus import DeviceName
from dra_driver.model.offer import AdminAccess, Exclusive, Fractional, Replica
from dra_driver.model.profiles import GuardPolicy, GuardRules
from dra_driver.model.records import ClaimMemoryLimit
from dra_driver.model.steps import SetTimeSlice, TimeSliceInterval
from tests import builders
from tests.builders import gpu, holding, ref

GIB = 1024**3
MIB = 1024**2
GPU = gpu(0)
TOTAL = 81559 * MIB
SLICEABLE = Fractional(TOTAL, GIB, MIB, shares=48)
PLAIN = Terminal(width=100)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def part(name, gib=10, pods=(), steps=(), limit=None, completed=True, **fields):
    """A claim with some of gpu-0."""
    consumed = (("cores", fields.pop("cores", "0")), ("memory", f"{gib}Gi"), ("shares", "1"))
    values = {"device": DeviceName("gpu-0"), "consumed": consumed, "shape": SLICEABLE}
    return record(name, completed, pods, steps, limit=limit, **values | fields)


def record(name, completed=True, pods=(), steps=(), **fields):
    claim = ref(name, namespace="team-a")
    return builders.record(
        claim, holding(claim, **fields), completed=completed, pods=pods, steps=tuple(steps)
    )


def shown(*records, width=100, gpus=(GPU,), **terminal_fields):
    return usage_bars(
        gpu_usages(records, gpus), Terminal(width=width, **terminal_fields)
    ).splitlines()


def bar_in(line):
    return line[line.index("[") + 1 : line.index("]")]


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=60), st.integers(1, 200))
def test_cells_add_up_to_the_width_and_nobody_vanishes_while_there_is_room(parts, width):
    number = cells(parts, width)

    something = [n for n, p in zip(number, parts, strict=True) if p]
    assert sum(number) == (width if any(parts) else 0)
    assert all(n == 0 for n, p in zip(number, parts, strict=True) if not p)
    assert all(n >= 0 for n in number)
    if len(something) <= width:
        assert all(n >= 1 for n in something)


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=20), st.integers(40, 200))
def test_who_has_more_never_has_fewer_cells(parts, width):
    number = cells(parts, width)

    for part, cells_of_part in zip(parts, number, strict=True):
        for other, cells_of_other in zip(parts, number, strict=True):
            if part > other:
                assert cells_of_part >= cells_of_other - 1
            if part >= other * 2 and part * width >= 4 * sum(parts):
                assert cells_of_part >= cells_of_other


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(1, 3000), st.integers(10, 120))
def test_a_bar_is_as_wide_as_it_should_be_even_where_too_much_is_held(amounts, total, width):
    for unicode in (False, True):
        assert len(bar(amounts, total, width, bar_style(Terminal(unicode=unicode)))) in (width,)


@given(st.lists(st.integers(1, 8), max_size=8), st.integers(0, 300))
def test_no_line_of_a_gpu_is_longer_than_the_terminal_while_its_words_fit(gibs, width):
    records = [part(f"claim-{index}", gib) for index, gib in enumerate(gibs)]
    (usage,) = gpu_usages(records, [GPU])
    words = len(f"gpu-0  {usage_summary(usage, detailed=False)}")

    first = usage_bars((usage,), Terminal(width=width)).splitlines()[0]

    assert len(first) <= max(width, words)


def test_colour_adds_nothing_that_is_seen():
    records = [part("a"), part("b", 20), part("c", 0.5)]

    plain = shown(*records, unicode=True)
    coloured = shown(*records, unicode=True, colour=True)

    assert plain != coloured
    assert [COLOUR.sub("", line) for line in coloured] == plain


def test_a_gpu_in_parts_shows_each_claim_and_what_is_free():
    head, first, second = shown(part("training", 40, pods=["train-0"]), part("notebook", 10))

    assert head.startswith("gpu-0  NVIDIA H100 80GB HBM3  [")
    assert head.endswith("]  50.0 of 79.6 GiB held, 29.6 free, 2 of 48 shares")
    drawn = bar_in(head)
    assert drawn == "#" * drawn.count("#") + "=" * drawn.count("=") + "." * drawn.count(".")
    assert drawn.count("=") > drawn.count("."), "claims by name: training has more than is free"
    assert first == "  # team-a/notebook  10.0 GiB  no limit"
    assert second == "  = team-a/training  40.0 GiB  no limit, pod train-0"


KILL, WARN = (
    ClaimMemoryLimit(10 * GIB, GuardRules(policy, 10.0))
    for policy in (GuardPolicy.KILL, GuardPolicy.WARN)
)
LONG = SetTimeSlice(GPU.uuid, TimeSliceInterval.LONG)


@pytest.mark.parametrize(
    ("claim", "details"),
    [
        pytest.param(
            part("a", cores="25", limit=replace(KILL, strict=True), steps=[LONG], pods=["x", "y"]),
            "25 % of the cores, interval Long, guard Kill after 10 s, strict, pods x, y",
            id="all of it",
        ),
        pytest.param(
            part("a", limit=WARN), "guard Warn", id="a policy that ends nobody has no grace period"
        ),
        pytest.param(
            part("a", consumed=(("memory", "10Gi"), ("shares", "2"))),
            "2 shares, no limit",
            id="more than one share",
        ),
        pytest.param(
            part("a", completed=False), "no limit, not yet prepared", id="not yet prepared"
        ),
    ],
)
def test_what_a_claim_was_promised_is_told(claim, details):
    head, line = shown(claim, width=150)

    assert line == f"  # team-a/a  10.0 GiB  {details}"
    assert head.endswith("2 of 48 shares" if "2 shares" in details else "1 of 48 shares")


def test_a_whole_gpu_is_one_full_bar_however_it_was_offered():
    exclusive = record("a", device=DeviceName("gpu-0"))
    all_of_it = part("a", consumed=(("memory", "81559Mi"),))

    for claim in (exclusive, all_of_it):
        head, line = shown(claim)
        assert set(bar_in(head)) == {"#"}
        assert head.endswith("all 79.6 GiB held")
        assert line == "  # team-a/a  all of it"


MONITOR = record("a-dcgm", device=DeviceName("gpu-0-mon"), admin=True, shape=AdminAccess())


def test_admin_access_is_told_and_takes_nothing():
    head, line = shown(MONITOR)

    assert set(bar_in(head)) == {"."}
    assert head.endswith("all 79.6 GiB free")
    assert line == "  o team-a/a-dcgm  admin access  gpu-0-mon"


def test_replicas_that_are_devices_of_their_own_share_the_bar_of_their_gpu():
    quarter = TOTAL // 4
    records = [
        record(f"r{n}", device=DeviceName(f"gpu-0-{n}"), shape=Replica(n, 4, quarter))
        for n in (1, 3)
    ]

    head, *lines = shown(*records)

    assert head.endswith("39.8 of 79.6 GiB held, 39.8 free, 2 of 4 shares")
    assert lines == [
        "  # team-a/r1  19.9 GiB  gpu-0-1, no limit",
        "  = team-a/r3  19.9 GiB  gpu-0-3, no limit",
    ]


def test_admin_access_stands_below_those_who_compute_and_takes_no_mark():
    _, first, second = shown(MONITOR, part("b"))

    assert (first.split()[:2], second.split()[:2]) == (["#", "team-a/b"], ["o", "team-a/a-dcgm"])


def test_a_gpu_that_was_not_looked_at_is_told_of_as_far_as_the_ledger_knows():
    (divided, _) = shown(part("a", 20), gpus=())
    (whole, _) = shown(record("a", device=DeviceName("gpu-0")), gpus=())

    assert divided.endswith("20.0 of 79.6 GiB held, 59.6 free, 1 of 48 shares")
    assert whole.endswith("all of it held")


def test_memory_that_nobody_reports_is_not_guessed():
    unknown = gpu(0, memory_bytes=None)
    half = record("a", device=DeviceName("gpu-0-0"), shape=Replica(0, 2, None))

    head, line = shown(half, gpus=(unknown,))

    assert "?" in bar_in(head)
    assert "one part" in line
    assert shown(gpus=(unknown,))[0].endswith("all of it free")


def test_gpus_stand_by_their_number_and_below_each_other():
    heads = shown(gpus=(gpu(10), gpu(2), gpu(0)))

    assert [head.split()[0] for head in heads] == ["gpu-0", "gpu-2", "gpu-10"]
    assert len({head.index("[") for head in heads}) == 1


def test_a_narrow_terminal_loses_products_then_shares_and_then_bars():
    widths = (120, 80, 70, 40)

    wide, middle, small, least = (shown(part("a"), width=width)[0] for width in widths)

    assert all(word in wide for word in ("H100", "[", "shares"))
    assert "H100" not in middle and "[" in middle and "shares" in middle
    assert "[" in small and "shares" not in small
    assert least == "gpu-0  10.0 of 79.6 GiB held, 69.6 free"


def test_more_claims_than_marks_are_still_all_there():
    head, *lines = shown(*(part(f"c{n}", 1) for n in range(12)))

    assert len(lines) == 12
    assert bar_in(head).count(".") > 0


class Stream:
    """A standard output."""

    def __init__(self, encoding="utf-8", tty=False):
        self.encoding = encoding
        self._tty = tty

    def isatty(self):
        return self._tty

    def fileno(self):
        raise ValueError("no file")


@pytest.mark.parametrize(
    ("stream", "environment", "expected"),
    [
        pytest.param(Stream(), {}, Terminal(100, True, False), id="a pipe has no colour"),
        pytest.param(Stream(tty=True), {}, Terminal(100, True, True), id="a terminal has"),
        pytest.param(
            Stream(tty=True), {"NO_COLOR": "1"}, Terminal(100, True, False), id="nobody wants it"
        ),
        pytest.param(
            Stream(tty=True), {"TERM": "dumb"}, Terminal(100, True, False), id="it cannot"
        ),
        pytest.param(Stream("ascii"), {}, Terminal(100, False, False), id="plain letters"),
        pytest.param(Stream(None), {}, Terminal(100, False, False), id="no encoding"),
        pytest.param(Stream("UTF-8"), {"COLUMNS": "72"}, Terminal(72, True, False), id="72"),
        pytest.param(Stream(), {"COLUMNS": "wide"}, Terminal(100, True, False), id="no number"),
        pytest.param(Stream(), {"COLUMNS": "0"}, Terminal(100, True, False), id="nothing"),
    ],
)
def test_what_a_terminal_can_is_found_out(stream, environment, expected):
    assert terminal(stream, environment) == expected


def test_the_shape_without_shares_is_the_exclusive_one():
    (usage,) = gpu_usages([record("a", device=DeviceName("gpu-0"), shape=Exclusive())], [GPU])

    assert usage.shares is None


def test_a_gpu_that_got_another_name_keeps_its_claims_under_the_new_one():
    renamed, newcomer = replace(GPU, minor=1), replace(gpu(1), minor=0)

    first, second = gpu_usages([part("a")], [renamed, newcomer])

    assert (first.name, first.held.shares) == ("gpu-0", 0)
    assert (second.name, second.held.shares) == ("gpu-1", 1)


def test_a_gpu_that_is_gone_is_not_taken_for_the_one_that_has_its_name_now():
    by_name = {usage.name: usage for usage in gpu_usages([part("a")], [replace(gpu(1), minor=0)])}

    assert by_name.keys() == {"gpu-0", GPU.uuid}
    assert by_name["gpu-0"].held.shares == 0
    assert (by_name[GPU.uuid].gpu, by_name[GPU.uuid].held.shares) == (None, 1)


def test_a_gpu_that_was_not_looked_at_is_called_as_it_was_allocated():
    (only,) = gpu_usages([part("a")], [])

    assert (only.name, only.gpu) == ("gpu-0", None)
