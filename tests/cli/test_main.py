"""Settings and the command line: what counts, what is said about it, and how it ends."""

import argparse
from pathlib import Path

import pytest

from dra_driver.base.errors import SettingsError
from dra_driver.node.driver.config import NodeConfig
from dra_driver.settings import (
    AgentSettings,
    ClaimsSettings,
    ControllerSettings,
    DevicesSettings,
    DoctorSettings,
    PluginSettings,
)

SETTINGS = [
    *(ClaimsSettings, DevicesSettings, DoctorSettings),
    *(PluginSettings, AgentSettings, ControllerSettings),
]


def read(settings, *words, **environment):
    parser = argparse.ArgumentParser()
    settings.add_flags(parser)
    return settings.read(parser.parse_args(words), environment)


def test_a_flag_beats_the_environment_and_that_beats_the_default():
    assert read(ClaimsSettings).driver_name == "gpu.nvidia.com"
    assert read(ClaimsSettings, DRIVER_NAME="a.example").driver_name == "a.example"
    both = read(ClaimsSettings, "--driver-name", "b.example", DRIVER_NAME="a.example")
    assert both.driver_name == "b.example"


def test_an_empty_variable_is_as_good_as_none():
    assert read(ClaimsSettings, DRIVER_NAME="").driver_name == "gpu.nvidia.com"


def test_no_mps_can_be_said_by_an_empty_flag_or_variable():
    assert read(ClaimsSettings).mps_socket == "/run/dra-driver-gpu/mps/agent.sock"
    assert read(ClaimsSettings, MPS_SOCKET="").mps_socket == ""
    plugin = read(PluginSettings, "--node-name", "n", "--mps-socket", "")
    assert plugin.node_config.mps_socket == ""


def test_the_plugin_prepares_with_the_agent_and_the_runtime_that_it_was_told_of():
    words = ("--node-name", "n", "--mps-socket", "/m/agent.sock", "--runtime-dir", "/run/c")

    assert read(PluginSettings, *words).node_config == NodeConfig(
        mps_socket="/m/agent.sock", runtime_dir="/run/c"
    )


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_setting_has_a_flag_whose_help_says_what_it_is_and_its_variable(settings):
    parser = argparse.ArgumentParser()
    settings.add_flags(parser)
    helps = {action.dest: action.help or "" for action in parser._actions}

    for name, field in settings.model_fields.items():
        assert field.description
        assert helps[name].startswith(field.description)
        assert f"${name.upper()}" in helps[name]


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_default_is_told(settings):
    parser = argparse.ArgumentParser()
    settings.add_flags(parser)
    helps = {action.dest: action.help or "" for action in parser._actions}

    for name, field in settings.model_fields.items():
        if not field.is_required() and field.default not in (None, ""):
            text = str(field.default).lower()
            assert text in helps[name].lower() or "default" in field.description, (name, text)


@pytest.mark.parametrize("command", ["kubelet-plugin", "mps-agent", "devices", "claims", "doctor"])
def test_help_is_printed_and_ends_well(type_in, command):
    answer = type_in(command, "--help")

    assert answer.code == 0
    assert "--host-root" in answer.out


def test_the_controller_has_to_be_told_its_namespace_and_is_called_differently_each_time(type_in):
    answer = type_in("controller")
    assert answer.code == 2
    assert "--revision-namespace ($REVISION_NAMESPACE) is missing" in answer.err
    assert type_in("controller", "--revision-namespace", "No.Label").code == 2

    one, other = (read(ControllerSettings, "--revision-namespace", "gpus") for _ in range(2))
    assert one.identity != other.identity


@pytest.mark.parametrize(
    ("flag", "value", "problem"),
    [
        ("--node-name", "Bad_Name!", "write lower-case letters"),
        ("--pod-uid", "../../x", "write letters, digits and dashes"),
        ("--cdi-dir", "relative", "give an absolute path"),
        ("--profile", "a/b", "write letters, digits, dashes, dots and underscores"),
    ],
)
def test_a_setting_that_could_never_work_is_refused_with_its_flag(type_in, flag, value, problem):
    answer = type_in("kubelet-plugin", "--node-name", "n", flag, value)

    assert answer.code == 2
    assert flag in answer.err
    assert problem in answer.err


@pytest.mark.parametrize("settings", [DevicesSettings, DoctorSettings, PluginSettings])
def test_profiles_and_their_choice_are_flags_and_variables(settings):
    words = ("--node-name", "n") if settings is PluginSettings else ()

    assert (read(settings, *words).profiles, read(settings, *words).profile) == (None, "")
    parsed = read(settings, *words, "--profiles", "here/all.yaml", PROFILE="a100.v2")
    assert (parsed.profiles, parsed.profile) == (Path("here/all.yaml"), "a100.v2")


def test_a_simulated_node_with_an_endless_name_is_one_clear_line(type_in):
    assert type_in("devices", "--sim", "x" * 300).code == 2


def test_a_missing_node_name_is_one_clear_line(type_in, monkeypatch):
    monkeypatch.delenv("NODE_NAME", raising=False)

    answer = type_in("kubelet-plugin")

    assert answer.code == 2
    assert answer.err == "dra-driver: --node-name ($NODE_NAME) is missing\n"
    assert answer.out == ""


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(SettingsError) as caught:
        read(PluginSettings, "--driver-name", "No Name", "--look-interval", "0")

    for flag in ("--node-name", "--driver-name", "--look-interval"):
        assert flag in str(caught.value)


def test_an_unknown_simulated_node_is_answered_with_the_known_ones(type_in):
    answer = type_in("devices", "--sim", "h100x9")

    assert answer.code == 2
    assert "h100x9" in answer.err
    assert "h100x8" in answer.err
    assert answer.err.count("\n") == 1


def test_without_a_command_the_usage_is_said(type_in):
    answer = type_in()

    assert answer.code == 2
    assert "COMMAND" in answer.err


def test_the_state_lies_with_the_kubelet_unless_it_is_said_where():
    settings = read(ClaimsSettings, "--kubelet-dir", "/k", "--driver-name", "gpu.example.com")

    assert str(settings.state) == "/k/plugins/gpu.example.com/state"
    assert str(read(ClaimsSettings, "--state-dir", "/s").ledger_dir) == "/s/claims"
