"""Documents that people write: what holds for all of their classes."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from api import claim_configs, device_plugin, mig_parted, node_profile
from api.strict import StrictModel, all_defaults
from tests.driver_process import ROOT

MODULES = (claim_configs, device_plugin, mig_parted, node_profile)


def classes(base: type[StrictModel] = StrictModel) -> Iterator[type[StrictModel]]:
    for each in base.__subclasses__():
        if each.__module__ in {module.__name__ for module in MODULES}:
            yield each
        yield from classes(each)


DEFAULTS = [
    pytest.param(field.default, id=f"{model.__name__}.{name}")
    for model in sorted(classes(), key=lambda model: model.__name__)
    for name, field in model.model_fields.items()
    if isinstance(field.default, StrictModel)
]


def run(program: str) -> str:
    """What a process of its own prints: here, other tests have built the classes."""
    command = [sys.executable, "-W", "error", "-c", program]
    answer = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    return answer.stdout.strip()


@pytest.mark.parametrize("default", DEFAULTS)
def test_a_default_is_what_an_empty_section_says(default):
    assert default == type(default)()
    assert not default.model_fields_set


def test_there_are_defaults_to_look_at():
    assert len(DEFAULTS) > 10
    assert all_defaults(claim_configs.MpsConfig) == claim_configs.MpsConfig()


def test_the_plugin_builds_no_class_of_documents_while_it_is_imported():
    program = (
        "import dra_driver.__main__, dra_driver.plugin.run\n"
        "from tests.api.test_strict import classes\n"
        "print([each.__name__ for each in classes() if each.__pydantic_complete__])"
    )
    assert run(program) == "[]"


@pytest.mark.parametrize(
    ("model", "typed", "meant"),
    [
        ("device_plugin.DevicePluginConfig", "flag", "flags"),
        ("node_profile.NodeProfile", "metadat", "metadata"),
        ("claim_configs.GpuConfig", "sharin", "sharing"),
    ],
)
def test_a_field_is_suggested_where_no_class_was_built_yet(model, typed, meant):
    module, name = model.split(".")
    program = (
        "from api.strict import suggestion\n"
        f"from api.{module} import {name}\n"
        f"print(suggestion({typed!r}, {name}))"
    )
    assert run(program) == f"did you mean {meant}?"
