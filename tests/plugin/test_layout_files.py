"""Layouts come from files of mig-parted among those of profiles, else from the boards."""

import pytest

from dra_driver.errors import SettingsError
from dra_driver.model.layouts import LayoutEntry
from dra_driver.plugin.layout_files import Layouts
from dra_driver.plugin.profiles import Profiles
from tests.fakes.boards import AMPERE, Board

GPUS = (Board(AMPERE).gpu,)
FILE = """
version: v1
mig-configs:
  {}:
    - devices: all
      mig-enabled: true
      mig-devices: {{"1g.5gb": {}}}
  broken:
    - devices: some
      mig-enabled: false
"""
PROFILE = """
apiVersion: resource.nvidia.com/v1beta1
kind: NodeProfile
spec: {gpus: [{replicas: 2}]}
"""


def refused(layouts, name):
    with pytest.raises(SettingsError) as error:
        layouts.named(name, GPUS)
    return str(error.value)


def test_a_file_gives_layouts_and_is_no_profile(tmp_path):
    (tmp_path / "mig.yaml").write_text(FILE.format("few", 2))
    (tmp_path / "p.yaml").write_text(PROFILE)

    layout = Layouts(tmp_path).named("few", GPUS)

    assert layout.entries == (LayoutEntry(True, (("1g.5gb", 2),)),)
    assert layout.where == f"{tmp_path}/mig.yaml"
    assert Profiles(tmp_path).named("p").name == "p"
    with pytest.raises(SettingsError, match="no profile 'few'"):
        Profiles(tmp_path).named("few")


def test_a_file_is_read_again_when_it_changed(tmp_path):
    file = tmp_path / "mig.yaml"
    file.write_text(FILE.format("few", 2))
    layouts = Layouts(file)
    assert layouts.named("few", GPUS) is layouts.named("few", GPUS)

    file.write_text(FILE.format("few", 33))

    assert layouts.named("few", GPUS).entries[0].counts == (("1g.5gb", 33),)


def test_without_files_there_are_those_of_the_boards():
    assert Layouts(None).named("all-1g.5gb", GPUS).where == "built in"


def test_a_users_own_layout_of_the_same_name_counts(tmp_path):
    (tmp_path / "mig.yaml").write_text(FILE.format("all-1g.5gb", 2))

    assert Layouts(tmp_path).named("all-1g.5gb", GPUS).entries[0].counts == (("1g.5gb", 2),)


def test_an_unknown_name_is_refused_with_those_that_there_are(tmp_path):
    (tmp_path / "mig.yaml").write_text(FILE.format("few", 2))

    assert refused(Layouts(tmp_path), "fwe") == (
        "there is no layout 'fwe'; there are: all-1g.10gb, all-1g.5gb, all-1g.5gb.me, "
        "all-2g.10gb, all-3g.20gb, all-4g.20gb, all-7g.40gb, all-balanced, all-disabled, "
        "all-enabled, broken, few"
    )


def test_what_is_wrong_with_a_layout_is_said_when_it_is_chosen(tmp_path):
    (tmp_path / "mig.yaml").write_text(FILE.format("few", 2))

    assert refused(Layouts(tmp_path), "broken") == (
        f"layout 'broken': {tmp_path}/mig.yaml: mig-configs.broken[0].devices: 'some' should be "
        "all, or a list of the numbers of GPUs"
    )


def test_the_same_name_in_two_files_is_refused(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(FILE.format("few", 2).replace("broken", name))

    assert refused(Layouts(tmp_path), "few") == (
        f"layout 'few' is in {tmp_path}/a and {tmp_path}/b; remove one, or rename it"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("version: v2\nmig-configs: {x: []}\n", "version: 'v2' should be 'v1'"),
        ("version: v1\nmig-configs: [\n", "while parsing"),
        ("version: v1\nmig-configs: &a {x: [*a]}\n", "cannot be read"),
    ],
)
def test_a_broken_file_is_told_where_a_name_is_in_no_other_and_no_board_stands_in(
    tmp_path, text, words
):
    (tmp_path / "bad.yaml").write_text(text)
    (tmp_path / "good.yaml").write_text(FILE.format("few", 2))
    layouts = Layouts(tmp_path)

    message = refused(layouts, "all-1g.5gb")
    assert message.startswith("layout 'all-1g.5gb' is in no file that can be read: ")
    assert words in message
    assert layouts.named("few", GPUS).name == "few"


def test_a_path_that_cannot_be_read_is_told(tmp_path):
    assert "cannot be read" in refused(Layouts(tmp_path / "none"), "all-1g.5gb")
