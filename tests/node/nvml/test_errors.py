"""Whatever NVML raises becomes an error of ours at its one door."""

import ctypes.util
import re
import subprocess
import sys
from typing import Any, cast

import pynvml
import pytest

from dra_driver.base.errors import NodeError
from dra_driver.node.mig.geometry import GeometryCache
from dra_driver.node.nvml.client import Nvml
from dra_driver.node.nvml.library import load_nvml, nvml_errors
from dra_driver.sim.host.libraries import shared_object

EVERY = sorted(pynvml.NVMLError.__subclasses__(), key=lambda error: error.__name__)


@pytest.fixture
def pynvml_as_it_was():
    """pynvml keeps its library in the module; whatever a test loads goes with the test."""
    library = pynvml.nvmlLib
    pynvml._nvmlGetFunctionPointer_cache.clear()
    yield
    pynvml.nvmlLib = library
    pynvml._nvmlGetFunctionPointer_cache.clear()


@pytest.fixture
def library(tmp_path):
    """A library that can be loaded and has no functions."""
    path = tmp_path / "libnvidia-ml.so.580.95.05"
    path.write_bytes(shared_object("libnvidia-ml.so.1"))
    return path


def test_there_are_errors_to_map():
    assert {"NVMLError_GpuIsLost", "NVMLError_DriverNotLoaded"} <= {
        error.__name__ for error in EVERY
    }


@pytest.mark.parametrize("error", EVERY, ids=lambda error: error.__name__)
def test_every_nvml_error_becomes_a_node_error_with_its_cause_and_message(error):
    with pytest.raises(NodeError) as caught, nvml_errors("reading the name"):
        raise error()
    assert isinstance(caught.value.__cause__, error)
    assert str(caught.value).startswith(f"reading the name: NVML says {error()}")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (pynvml.NVMLError(4711), "NVML Error with code 4711"),  # without a class of its own
        (pynvml.NVMLLibraryMismatchError("Unversioned function called"), "reboot the node"),
        (pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST), r"GPU is lost; .*reboot the node$"),
    ],
)
def test_an_error_says_what_to_do_about_it(error, message):
    with pytest.raises(NodeError, match=message), nvml_errors("x"):
        raise error


def test_other_errors_are_bugs_and_pass_as_they_are():
    with pytest.raises(KeyError), nvml_errors("x"):
        raise KeyError("ours")


@pytest.mark.usefixtures("pynvml_as_it_was")
def test_nvml_is_loaded_from_the_path_that_is_given(library):
    link = library.with_name("libnvidia-ml.so.1")
    link.symlink_to(library.name)
    functions = load_nvml(link)
    assert functions is cast(Any, pynvml)
    assert pynvml.nvmlLib._name == str(library)


@pytest.mark.usefixtures("pynvml_as_it_was")
def test_a_newer_library_is_loaded_over_the_one_in_use(library):
    load_nvml(library)
    newer = library.with_name("libnvidia-ml.so.590.48.01")
    newer.write_bytes(shared_object("libnvidia-ml.so.1"))
    load_nvml(newer)
    assert pynvml.nvmlLib._name == str(newer)


@pytest.mark.usefixtures("pynvml_as_it_was")
def test_the_library_in_use_is_not_loaded_again(library):
    load_nvml(library)
    loaded = pynvml.nvmlLib
    load_nvml(library)
    assert pynvml.nvmlLib is loaded


def test_without_a_path_it_is_pynvml_with_what_the_linker_finds():
    assert load_nvml(None) is pynvml


@pytest.mark.usefixtures("pynvml_as_it_was")
@pytest.mark.parametrize("content", [None, b"", b"not a library"])
def test_a_library_that_cannot_be_loaded_is_named(tmp_path, content):
    path = tmp_path / "libnvidia-ml.so.1"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(NodeError, match=f"cannot load NVML from {path}"):
        load_nvml(path)


@pytest.mark.usefixtures("pynvml_as_it_was")
def test_a_library_that_lacks_functions_says_so_and_does_not_crash(library):
    nvml = Nvml(lambda: load_nvml(library), GeometryCache)
    with pytest.raises(NodeError, match="starting NVML: NVML says Function Not Found"):
        nvml.system()
    nvml.stop()


@pytest.mark.skipif(
    ctypes.util.find_library("nvidia-ml") is not None, reason="this machine has the driver"
)
def test_a_machine_without_the_driver_says_that_its_library_is_missing():
    # In a process of its own: a library that was loaded once stays findable by its soname.
    program = (
        "from dra_driver.node.mig.geometry import GeometryCache\n"
        "from dra_driver.node.nvml.client import Nvml\n"
        "from dra_driver.node.nvml.library import load_nvml\n"
        "try: Nvml(lambda: load_nvml(None), GeometryCache).system()\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30
    )
    assert re.match("NodeError .*Library Not Found; install the NVIDIA driver", done.stdout)
