"""Layouts come from files of mig-parted among those of profiles, else from the boards."""

import pytest

from dra_driver.base.errors import SettingsError
from dra_driver.model.mig_layouts import MigLayoutEntry
from dra_driver.plugin.mig.desired_layouts import LayoutCatalog
from dra_driver.plugin.publish.profiles import ProfileCatalog
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

    layout = LayoutCatalog(tmp_path).named("few", GPUS)

    assert layout.entries == (MigLayoutEntry(True, (("1g.5gb", 2),)),)
    assert layout.where == f"{tmp_path}/mig.yaml"
    assert ProfileCatalog(tmp_path).named("p").name == "p"
    with pytest.raises(SettingsError, match="no profile 'few'"):
        ProfileCatalog(tmp_path).named("few")


def test_a_file_is_read_again_when_it_changed(tmp_path):
    file = tmp_path / "mig.yaml"
    file.write_text(FILE.format("few", 2))
    layouts = LayoutCatalog(file)
    assert layouts.named("few", GPUS) is layouts.named("few", GPUS)

    file.write_text(FILE.format("few", 33))

    assert layouts.named("few", GPUS).entries[0].counts == (("1g.5gb", 33),)


def test_without_files_there_are_those_of_the_boards():
    assert LayoutCatalog(None).named("all-1g.5gb", GPUS).where == "built in"


def test_an_unknown_name_is_refused_with_those_that_there_are(tmp_path):
    (tmp_path / "mig.yaml").write_text(FILE.format("few", 2))

    assert refused(LayoutCatalog(tmp_path), "fwe") == (
        "there is no layout 'fwe'; there are: all-1g.10gb, all-1g.5gb, all-1g.5gb.me, "
        "all-2g.10gb, all-3g.20gb, all-4g.20gb, all-7g.40gb, all-balanced, all-disabled, "
        "all-enabled, broken, few"
    )


def test_what_is_wrong_with_a_layout_is_said_when_it_is_chosen(tmp_path):
    (tmp_path / "mig.yaml").write_text(FILE.format("few", 2))

    assert refused(LayoutCatalog(tmp_path), "broken") == (
        f"layout 'broken': {tmp_path}/mig.yaml: mig-configs.broken[0].devices: 'some' should be "
        "all, or a list of the numbers of GPUs"
    )


def test_the_same_name_in_two_files_is_refused(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(FILE.format("few", 2).replace("broken", name))

    assert refused(LayoutCatalog(tmp_path), "few") == (
        f"layout 'few' is in {tmp_path}/a and {tmp_path}/b; remove one, or rename it"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("version: v2\nmig-configs: {NAME: []}\n", "version: 'v2' should be 'v1'"),
        ("version: v1\nmig-configs: {NAME: [], 1.5: []}\n", "the key 1.5 is a number to YAML"),
        ("version: v1\nmig-configs: [{NAME: []}]\n", "should be a valid dictionary"),
        ("version: v1\nmig-configs:\n  'NAME': [\n", "while parsing"),
        ("version: v1\nmig-configs:\n  NAME\n    - devices: all\n  x:\n", "not allowed here"),
        ("version: v1\nmig-configs:\n  NAME: []\n  NAME: []\n", "is there twice"),
        ("version: v1\nmig-configs: &a {NAME: [*a]}\n", "stands for what it is in"),
        ("mig-configs: {NAME: " + 1000 * "[", "is nested too deeply"),
        ("a: 1\n---\nversion: v2\nmig-configs: {NAME: []}\n", "(document 2): version: 'v2'"),
    ],
)
def test_a_broken_file_that_seems_to_have_a_layout_spoils_no_other(tmp_path, caplog, text, words):
    bad = tmp_path / "bad.yaml"
    (tmp_path / "good.yaml").write_text(FILE.format("few", 2))
    layouts = LayoutCatalog(tmp_path)

    for name in ("all-1g.5gb", "all-balanced"):
        bad.write_text(text.replace("NAME", name))
        message = refused(layouts, name)
        assert message.startswith(f"layout '{name}' may be in a file that cannot be read: {bad}")
        assert words in message
        assert refused(layouts, "fwe").startswith(
            "layout 'fwe' may be in a file that cannot be read: "
        )
        assert layouts.named("few", GPUS).name == "few"
        for unaffected in ("all-disabled", "all-1g.10gb"):
            assert layouts.named(unaffected, GPUS) == LayoutCatalog(None).named(unaffected, GPUS)
        (warning,) = caplog.records
        assert warning.getMessage() == "no layout of a file can be read"
        assert warning.reason.startswith(str(bad))
        assert words in warning.reason
        caplog.clear()


def test_a_broken_file_has_not_what_is_only_the_beginning_of_a_name_in_it(tmp_path):
    (tmp_path / "bad.yaml").write_text(
        "mig-configs: {all-1g.5gb.me: [], of-all-balanced: [], 1.5: 1}"
    )

    for name in ("all-1g.5gb", "all-balanced"):
        assert LayoutCatalog(tmp_path).named(name, GPUS).where == "built in"
    assert "1.5" in refused(LayoutCatalog(tmp_path), "all-1g.5gb.me")


def test_a_broken_file_in_utf_16_is_searched_as_well(tmp_path):
    (tmp_path / "bad.yaml").write_bytes("mig-configs: {all-balanced: [".encode("utf-16"))

    assert "in a file that cannot be read" in refused(LayoutCatalog(tmp_path), "all-balanced")
    assert LayoutCatalog(tmp_path).named("all-disabled", GPUS).where == "built in"


def test_a_file_that_is_mended_has_its_layout_again_and_the_boards_never_stood_in(tmp_path):
    file = tmp_path / "mig.yaml"
    whole = FILE.format("all-balanced", 2)
    layouts = LayoutCatalog(file)

    for text in (whole, whole.replace("v1", "v2"), whole.replace("]", "[").replace("{", "[")):
        file.write_text(text)
        if text is whole:
            assert layouts.named("all-balanced", GPUS).where == str(file)
        else:
            assert "in a file that cannot be read" in refused(layouts, "all-balanced")
    file.write_text(whole)
    assert layouts.named("all-balanced", GPUS).where == str(file)


def test_a_layout_may_be_called_by_a_number(tmp_path):
    (tmp_path / "mig.yaml").write_text(FILE.format(1, 2))

    assert LayoutCatalog(tmp_path).named("1", GPUS).entries[0].counts == (("1g.5gb", 2),)


def test_a_path_that_cannot_be_read_is_told(tmp_path):
    assert "cannot be read" in refused(LayoutCatalog(tmp_path / "none"), "all-1g.5gb")
