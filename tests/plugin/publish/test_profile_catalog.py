"""Profiles by name: those of the user, those that are bundled, and why there is none."""

from pathlib import Path

import pytest
import yaml

import dra_driver
from dra_driver.base.errors import SettingsError
from dra_driver.model.profiles import DEFAULT_PROFILE, MigRules, Rules
from dra_driver.plan.profiles.rules import rules_by_gpu
from dra_driver.plugin.publish.profiles import ProfileCatalog, bundled_names, bundled_profile
from tests.builders import gpu

PROFILES = Path(dra_driver.__file__).parent / "profiles"
HEAD = "apiVersion: resource.nvidia.com/v1beta1\nkind: NodeProfile\n"
SLICED = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: %d}]}}\n"


def replicas(number):
    return f"{HEAD}spec: {{gpus: [{{replicas: {number}}}]}}\n"


def called(name, number):
    return f"{HEAD}metadata: {{name: {name}}}\nspec: {{gpus: [{{replicas: {number}}}]}}\n"


def number(profile):
    return profile.entries[0].rules.replicas


def refused(profiles, name):
    with pytest.raises(SettingsError) as caught:
        profiles.named(name)
    return str(caught.value)


def bundled(name):
    profile = bundled_profile(name)
    assert profile is not None
    return profile


def test_three_profiles_come_with_the_driver():
    assert bundled_names() == ("default", "exclusive", "mig")
    for name in bundled_names():
        document = yaml.safe_load((PROFILES / f"{name}.yaml").read_text())
        assert document["metadata"]["name"] == name
    gpus = [gpu(0), gpu(1)]

    usual, idle = rules_by_gpu(bundled("default"), gpus)
    assert usual == rules_by_gpu(DEFAULT_PROFILE, gpus)[0]
    assert idle == ()
    assert set(rules_by_gpu(bundled("exclusive"), gpus)[0].values()) == {Rules(fractions=False)}
    dynamic = {Rules(mig=MigRules(dynamic=True))}
    assert set(rules_by_gpu(bundled("mig"), gpus)[0].values()) == dynamic


def test_without_files_there_are_the_bundled_ones():
    profiles = ProfileCatalog(None)

    assert profiles.named("exclusive").name == "exclusive"
    assert refused(profiles, "fast") == (
        "no profile 'fast' and no --profiles to look for it; there are: default, exclusive, mig"
    )


def test_a_profile_is_called_as_it_says_or_like_its_file(tmp_path):
    (tmp_path / "a.yaml").write_text(called("b", 2))
    (tmp_path / "c.yml").write_text(replicas(3))
    (tmp_path / "d").write_text(SLICED % 4)
    profiles = ProfileCatalog(tmp_path)

    assert [number(profiles.named(name)) for name in "bcd"] == [2, 3, 4]
    assert refused(profiles, "a") == (
        f"no profile 'a' in {tmp_path}; there are: b, c, d, default, exclusive, mig"
    )


def test_the_whole_name_of_a_file_will_do_too(tmp_path):
    (tmp_path / "a100.yaml").write_text(SLICED % 4)

    assert number(ProfileCatalog(tmp_path).named("a100.yaml")) == 4


def test_one_file_may_have_them_all(tmp_path):
    file = tmp_path / "profiles.yaml"
    file.write_text(f"{called('a', 2)}---\n{called('b', 3)}")
    profiles = ProfileCatalog(file)

    assert [number(profiles.named(name)) for name in "ab"] == [2, 3]


def test_a_profile_of_ones_own_counts_instead_of_a_bundled_one(tmp_path):
    (tmp_path / "default").write_text(replicas(2))

    assert number(ProfileCatalog(tmp_path).named("default")) == 2


def test_two_profiles_of_one_name_are_refused_and_others_are_not(tmp_path):
    (tmp_path / "a").write_text(replicas(2))
    (tmp_path / "b").write_text(f"{called('a', 3)}---\n{called('c', 4)}")
    profiles = ProfileCatalog(tmp_path)

    assert refused(profiles, "a") == (
        f"profile 'a' is in {tmp_path}/a and {tmp_path}/b (document 1); remove one, or rename it"
    )
    assert number(profiles.named("c")) == 4


def test_everything_that_is_wrong_with_a_profile_is_said_with_its_file_and_path(tmp_path):
    (tmp_path / "a.yaml").write_text(f"{HEAD}spec: {{gpus: [{{replicas: 0, fraction: never}}]}}")
    (tmp_path / "b").write_text(replicas(2))
    profiles = ProfileCatalog(tmp_path)

    assert refused(profiles, "a") == (
        f"profile 'a': {tmp_path}/a.yaml: spec.gpus[0].replicas: 0 should be greater than or "
        "equal to 1; spec.gpus[0].fraction: unknown field; did you mean fractions?"
    )
    assert number(profiles.named("b")) == 2


@pytest.mark.parametrize("name", ["default", "a"])
def test_nothing_stands_in_for_a_profile_that_is_wrong(tmp_path, name):
    (tmp_path / name).write_text("")

    assert refused(ProfileCatalog(tmp_path), name) == (
        f"profile {name!r}: {tmp_path}/{name}: is empty; write a NodeProfile"
    )


def test_a_file_that_cannot_be_read_might_have_been_the_one(tmp_path):
    (tmp_path / "a").write_text(replicas(2))
    (tmp_path / "b").write_text("spec: [")
    profiles = ProfileCatalog(tmp_path)

    assert number(profiles.named("a")) == 2
    problem = refused(profiles, "c")
    assert problem.startswith(f"profile 'c' may be in a file that cannot be read: {tmp_path}/b: ")


@pytest.mark.parametrize("name", ["default", "exclusive", "mig"])
@pytest.mark.parametrize(
    "text", ["spec: [", "{renameByDefault: default, mig: [", "name: default-2\n["]
)
def test_a_file_that_cannot_be_read_refuses_no_bundled_profile(tmp_path, name, text):
    (tmp_path / "broken.yaml").write_text(text)

    assert ProfileCatalog(tmp_path).named(name) is bundled_profile(name)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("default", "spec: ["),
        ("default.yaml", "spec: ["),
        ("all", "metadata: {name: default}\nspec: ["),
        ("all.yaml", '{"metadata": {"name": "default"}, "spec": ['),
    ],
)
def test_a_bundled_profile_does_not_stand_in_for_a_file_that_seems_to_have_it(tmp_path, file, text):
    (tmp_path / file).write_text(text)
    (tmp_path / "other.yaml").write_text("spec: {")

    problem = refused(ProfileCatalog(tmp_path), "default")

    start = f"profile 'default' may be in a file that cannot be read: {tmp_path}/{file}: "
    assert problem.startswith(start)
    assert "other.yaml" not in problem


def test_a_change_counts_at_once_and_without_one_it_is_the_same_object(tmp_path):
    file = tmp_path / "a"
    file.write_text(replicas(2))
    profiles = ProfileCatalog(tmp_path)
    before = profiles.named("a")
    assert profiles.named("a") is before

    file.write_text(replicas(33))

    assert number(profiles.named("a")) == 33


def test_files_that_are_gone_are_said(tmp_path):
    profiles = ProfileCatalog(tmp_path / "none")

    assert f"--profiles {tmp_path}/none cannot be read" in refused(profiles, "default")
