"""The examples in the package are run."""

import doctest
import importlib
import pkgutil

import pytest

import cdi

MODULES = ["cdi", *(f"cdi.{module.name}" for module in pkgutil.iter_modules(cdi.__path__))]


@pytest.mark.parametrize("name", MODULES)
def test_every_example_prints_what_it_says(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0
