"""Files of profiles are read as they are now, whoever changes them and however."""

import os
from pathlib import Path

import pytest

from dra_driver.base.errors import SettingsError
from dra_driver.node.state.profile_files import ProfileDocument, ProfileFiles, profile_stem


@pytest.fixture
def mount(tmp_path):
    return ConfigMapMount(tmp_path / "profiles")


class ConfigMapMount:
    """A directory as the kubelet mounts a ConfigMap: links to files behind one link."""

    def __init__(self, path: Path):
        self.path = path
        self.path.mkdir()
        self.number = 0

    def fill(self, **files):
        """Put *files* in place of those that are there, as the kubelet does: all at once."""
        self.number += 1
        version = self.path / f"..2026_08_27_{self.number}"
        version.mkdir()
        for name, text in files.items():
            (version / name).write_text(text)
        (self.path / "..data_tmp").symlink_to(version.name)
        old = os.path.realpath(self.path / "..data")
        (self.path / "..data_tmp").rename(self.path / "..data")
        for name in files:
            if not (self.path / name).is_symlink():
                (self.path / name).symlink_to(f"..data/{name}")
        for link in self.path.iterdir():
            if not link.name.startswith("..") and link.name not in files:
                link.unlink()
        if self.number > 1:
            for file in Path(old).iterdir():
                file.unlink()
            Path(old).rmdir()


def contents(files):
    return [each.content for each in files.read().documents]


def test_a_file_may_have_several_documents(tmp_path):
    file = tmp_path / "all.yaml"
    file.write_text("a: 1\n---\nb: 2\n---\n")

    assert ProfileFiles(file).read().documents == (
        ProfileDocument(f"{file} (document 1)", "all", {"a": 1}),
        ProfileDocument(f"{file} (document 2)", "all", {"b": 2}),
    )


def test_a_directory_has_a_document_for_each_key_of_a_config_map(mount):
    mount.fill(**{"b.yml": "b: 1", "any": "a: 1", "c.v2.yaml": "c: 1"})

    assert ProfileFiles(mount.path).read().documents == (
        ProfileDocument(f"{mount.path}/any", "any", {"a": 1}),
        ProfileDocument(f"{mount.path}/b.yml", "b", {"b": 1}),
        ProfileDocument(f"{mount.path}/c.v2.yaml", "c.v2", {"c": 1}),
    )


def test_a_plain_directory_is_as_good_and_what_no_config_map_has_is_passed_over(tmp_path):
    (tmp_path / "a.yaml").write_text("a: 1")
    (tmp_path / ".b.yaml.swp").write_text("b: 1")
    (tmp_path / "a.yaml~").write_text("a: 2")
    (tmp_path / "sub").mkdir()

    assert contents(ProfileFiles(tmp_path)) == [{"a": 1}]


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n---\n"])
def test_a_file_without_a_document_is_told_from_one_that_is_not_there(tmp_path, text):
    (tmp_path / "a").write_text(text)

    assert ProfileFiles(tmp_path).read().documents == (ProfileDocument(f"{tmp_path}/a", "a", None),)


def test_nothing_is_read_again_before_it_changes(mount):
    mount.fill(a="a: 1")
    files = ProfileFiles(mount.path)

    assert files.read() is files.read()


def test_a_config_map_that_changed_is_read_again(mount):
    mount.fill(a="a: 1", b="b: 1")
    files = ProfileFiles(mount.path)
    files.read()

    mount.fill(b="b: 2", c="c: 1")

    assert contents(files) == [{"b": 2}, {"c": 1}]


@pytest.mark.parametrize("text", ["a: 2", "a: 12"])
def test_a_file_that_was_written_anew_is_read_again(tmp_path, text):
    file = tmp_path / "a.yaml"
    file.write_text("a: 1")
    files = ProfileFiles(file)
    files.read()
    fresh = tmp_path / "fresh"
    fresh.write_text(text)

    fresh.rename(file)

    assert contents(files) == [{"a": int(text[3:])}]


def test_a_link_that_leads_elsewhere_is_followed(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"a: {name}")
    link = tmp_path / "link"
    link.symlink_to("one")
    files = ProfileFiles(link)
    files.read()

    link.unlink()
    link.symlink_to("two")

    assert contents(files) == [{"a": "two"}]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param(b"a: [", "while parsing", id="not YAML"),
        pytest.param(b"\xff\xfe\xff", "", id="not text"),
        pytest.param(b"a: 2026-99-99", "month", id="no such day"),
        pytest.param(b"a: 1\na: 2", "'a' is there twice", id="a field twice"),
        pytest.param(b"a: {b: 1, b: 1}", "'b' is there twice", id="a field twice, further in"),
        pytest.param(b"? [1]\n: 1", "unhashable", id="a list as a field"),
        pytest.param(b"[" * 5000, "nested too deeply", id="too deep"),
        pytest.param(b"a: &a [*a]", "stands for what it is in", id="an alias without end"),
        pytest.param(b"a: " + b"1" * 5000, "no YAML", id="thousands of digits"),
        pytest.param(b"a: 1\n---\nb: [", "while parsing", id="half a file"),
        pytest.param(b"!!python/object:os.system {}", "could not determine", id="a program"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_in_one_line_and_spoils_no_other(
    tmp_path, text, problem
):
    (tmp_path / "bad").write_bytes(text)
    (tmp_path / "good").write_text("a: 1")

    files = ProfileFiles(tmp_path).read()

    assert [document.stem for document in files.documents] == ["good"]
    (reason,) = (file.why for file in files.unreadable)
    assert reason.startswith(f"{tmp_path}/bad: ")
    assert problem in reason
    assert "\n" not in reason


def test_mappings_may_be_merged(tmp_path):
    (tmp_path / "a").write_text("base: &b {x: 1}\nit: {<<: *b, x: 2}")

    assert contents(ProfileFiles(tmp_path)) == [{"base": {"x": 1}, "it": {"x": 2}}]


def test_a_path_where_nothing_is_is_refused_until_something_is_there(tmp_path):
    files = ProfileFiles(tmp_path / "profiles")

    with pytest.raises(SettingsError, match=f"--profiles {tmp_path}/profiles cannot be read"):
        files.read()

    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles/a").write_text("a: 1")
    assert contents(files) == [{"a": 1}]


def test_a_pipe_that_nobody_writes_to_is_refused(tmp_path):
    os.mkfifo(tmp_path / "profiles")

    with pytest.raises(SettingsError, match="profiles is neither a file nor a directory"):
        ProfileFiles(tmp_path / "profiles").read()


def test_a_directory_that_is_empty_has_nothing(tmp_path):
    assert ProfileFiles(tmp_path).read().documents == ()


@pytest.mark.parametrize(
    ("name", "short"),
    [("a.yaml", "a"), ("a.yml", "a"), ("a.json", "a.json"), ("a.yaml.yaml", "a.yaml"), ("a", "a")],
)
def test_the_ending_of_a_yaml_file_is_no_part_of_its_name(name, short):
    assert profile_stem(name) == short
