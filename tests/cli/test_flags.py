"""Every command takes the flags that it uses, and no others."""

import argparse
import ast
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

import dra_driver
from dra_driver import __main__ as commands
from dra_driver import settings as settings_module
from dra_driver.base.errors import SettingsError
from dra_driver.settings import (
    AgentSettings,
    ClaimsSettings,
    ControllerSettings,
    DevicesSettings,
    DoctorSettings,
    HostSettings,
    PluginSettings,
)

COMMANDS: dict[str, type[HostSettings | ControllerSettings]] = {
    "kubelet-plugin": PluginSettings,
    "mps-agent": AgentSettings,
    "controller": ControllerSettings,
    "claims": ClaimsSettings,
    "devices": DevicesSettings,
    "doctor": DoctorSettings,
}
OF_THE_DEVICE_PLUGIN_API = {  # read by what serves it
    "device_plugin_dir",
    "kubelet_cdi",
    "extended_resource_name",
    "shared_extended_resource_name",
    "mig_extended_resource_prefix",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_that_a_command_takes_is_read_by_it(command):
    settings = COMMANDS[command]

    assert settings.model_fields.keys() - fields_read(command) - OF_THE_DEVICE_PLUGIN_API == set()


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("mps-agent", "--mps-socket"),  # its socket is in --mps-dir
        ("mps-agent", "--kubelet-dir"),
        ("mps-agent", "--profile"),
        ("controller", "--node-name"),
        ("controller", "--sim"),
        ("claims", "--profile"),
        ("claims", "--cdi-dir"),
        ("devices", "--nvidia-cdi-hook"),
        ("devices", "--log-level"),
        ("doctor", "--look-interval"),
        ("doctor", "--http-address"),
    ],
)
def test_a_flag_that_a_command_does_not_use_is_refused(type_in, command, flag):
    answer = type_in(command, flag, "x")

    assert answer.code == 2
    assert f"unrecognized arguments: {flag} x" in answer.err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_variable_that_is_another_commands_is_no_error(command):
    settings = COMMANDS[command]
    fields = {name for each in COMMANDS.values() for name in each.model_fields}
    others_variables = {
        name.upper(): "relative/../No Name" for name in fields - settings.model_fields.keys()
    }

    nothing = argparse.Namespace()
    needed = {"NODE_NAME": "n", "REVISION_NAMESPACE": "gpus", "IDENTITY": "a"}
    assert settings.read(nothing, others_variables | needed) == settings.read(nothing, needed)


def test_a_plugins_pod_can_be_asked_with_the_plugins_variables(type_in, monkeypatch):
    monkeypatch.setenv("LOG_LEVEL", "nonsense")
    monkeypatch.setenv("LOOK_INTERVAL", "never")

    assert type_in("devices", "--sim", "t4x1").code == 0


def fields_read(command: str) -> set[str]:
    """What the command reads of its settings, by the source of all modules that it can reach.

    mypy sees to it that what is read is there; this is the other direction."""
    starts = functions_reached(f"_{command.replace('-', '_')}")
    modules, unread = set[str](), set[str]().union(*map(imports, starts))
    while unread:
        name = unread.pop()
        modules.add(name)
        unread |= imports(tree_of(name)) - modules
    trees = [*starts, *(tree_of(name) for name in modules)]
    return expanded({name for tree in trees for name in attributes(tree)}, COMMANDS[command])


def functions_reached(name: str) -> list[ast.AST]:
    """The function *name* of the module of commands, and those of the module that it uses."""
    functions = {
        node.name: node
        for node in tree_of(commands.__name__).body
        if isinstance(node, ast.FunctionDef)
    }
    reached, unread = dict[str, ast.AST](), {name}
    while unread:
        function = unread.pop()
        reached[function] = functions[function]
        names = {node.id for node in ast.walk(functions[function]) if isinstance(node, ast.Name)}
        unread |= (names & functions.keys()) - reached.keys()
    return list(reached.values())


def imports(tree: ast.AST) -> set[str]:
    """The modules of ours, wherever in the source they are imported; settings is everybody's."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    ours = {name for name in names if name.startswith("dra_driver.") and source_of(name)}
    return ours - {settings_module.__name__, commands.__name__}


@cache
def source_of(name: str) -> Path | None:
    below = Path(dra_driver.__file__).parents[1].joinpath(*name.split("."))
    files = (below.with_suffix(".py"), below / "__init__.py")
    return next((file for file in files if file.is_file()), None)


@cache
def tree_of(name: str) -> ast.Module:
    source = source_of(name)
    assert source is not None
    return ast.parse(source.read_text())


def attributes(tree: ast.AST) -> set[str]:
    """The x of every ``settings.x``, ``self._settings.x`` and ``parts.settings.x``."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value).rpartition(".")[2].lstrip("_") == "settings"
    }


def expanded(names: set[str], settings: type) -> set[str]:
    """*names*, and what those of them that are properties read in turn."""
    attributes, unread = set[str](), set(names)
    while unread:
        name = unread.pop()
        attributes.add(name)
        for each in settings.__mro__:
            prop = vars(each).get(name)
            if isinstance(prop, property) and prop.fget:
                body = ast.parse(inspect.getsource(prop.fget).replace("\n    ", "\n").strip())
                unread |= {
                    node.attr
                    for node in ast.walk(body)
                    if isinstance(node, ast.Attribute)
                    and ast.unparse(node.value) in ("self", "super()")
                } - attributes
    return attributes


def test_the_size_of_shared_memory_is_a_quantity():
    def read(size):
        return AgentSettings.read(argparse.Namespace(), {"MPS_SHARED_MEMORY": size})

    assert read("512Mi").shared_memory_bytes == 512 << 20
    assert read("").shared_memory_bytes == 4 << 30
    for wrong in ("much", "-1Gi", "100"):
        with pytest.raises(
            SettingsError, match=r"--mps-shared-memory .* at least 1Mi, such as 4Gi"
        ):
            read(wrong)


@pytest.mark.parametrize(
    ("variable", "wrong", "what_to_write"),
    [
        ("EXTENDED_RESOURCE_NAME", "gpu", "write a domain in lowercase, a slash and a name"),
        (
            "EXTENDED_RESOURCE_NAME",
            "NVIDIA.com/gpu",
            "write a domain in lowercase, a slash and a name",
        ),
        ("EXTENDED_RESOURCE_NAME", "nvidia.com/", "write at most 63 letters, digits"),
        ("EXTENDED_RESOURCE_NAME", "nvidia.com/gpu-", "write at most 63 letters, digits"),
        ("EXTENDED_RESOURCE_NAME", f"nvidia.com/{64 * 'g'}", "write at most 63 letters"),
        ("EXTENDED_RESOURCE_NAME", "requests.nvidia.com/gpu", "Kubernetes keeps the domain"),
        ("SHARED_EXTENDED_RESOURCE_NAME", "gpus.kubernetes.io/gpu", "Kubernetes keeps the domain"),
        ("SHARED_EXTENDED_RESOURCE_NAME", "nvidia.com/gpu", "--extended-resource-name is the same"),
        ("MIG_EXTENDED_RESOURCE_PREFIX", "nvidia.com/-", "write at most 40 letters"),
        ("MIG_EXTENDED_RESOURCE_PREFIX", f"nvidia.com/{41 * 'm'}", "write at most 40 letters"),
    ],
)
def test_a_resource_name_that_kubernetes_would_refuse_is_refused(variable, wrong, what_to_write):
    with pytest.raises(SettingsError, match=re.escape(what_to_write)) as refused:
        DevicesSettings.read(argparse.Namespace(), {variable: wrong})

    assert f"--{variable.lower().replace('_', '-')} (${variable})" in str(refused.value)


def test_gpus_may_not_have_the_name_that_replicas_have_by_default():
    with pytest.raises(SettingsError, match=r"--shared-extended-resource-name .* is the same"):
        DevicesSettings.read(
            argparse.Namespace(), {"EXTENDED_RESOURCE_NAME": "nvidia.com/gpu.shared"}
        )


def test_an_empty_resource_name_is_no_name_whatever_the_default():
    variables = ("EXTENDED_RESOURCE_NAME", "SHARED_EXTENDED_RESOURCE_NAME")
    settings = DevicesSettings.read(argparse.Namespace(), dict.fromkeys(variables, ""))

    assert settings.extended_resource_name == settings.shared_extended_resource_name == ""
    assert settings.mig_extended_resource_prefix == "nvidia.com/mig-"
