"""This machine's driver, wherever it is installed: whole, of one version, under the right names."""

import ctypes
import re
from pathlib import Path

import pytest

from dra_driver.node.driver.root import DRIVER_ROOT_CANDIDATES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_it_is_found_and_is_the_driver_that_nvidia_smi_speaks_of(driver, document):
    files = driver.files()

    assert files.root in DRIVER_ROOT_CANDIDATES or Path(files.root).is_dir()
    assert files.version == document.driver_version
    assert driver.loaded_version() in (None, files.version)


def test_every_file_that_containers_get_is_there(driver):
    files = driver.files()
    paths = [library.host_path for library in files.libraries]
    paths += [file.host_path for file in (*files.tools, *files.firmware, *files.graphics)]

    assert [path for path in paths if not Path(path).is_file()] == []


def test_libraries_are_known_by_the_names_that_programs_ask_for(driver):
    sonames = {library.soname for library in driver.files().libraries}

    required = {"libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1"}
    assert required <= sonames
    assert [name for name in sonames if not re.fullmatch(r"lib[\w.+-]+\.so(\.[\d.]+)?", name)] == []


def test_each_soname_is_the_one_that_the_loader_reads(driver):
    prefixes = ("libcuda.so", "libnvidia-ml.so", "libnvidia-ptxjitcompiler.so")
    libraries = [lib for lib in driver.files().libraries if lib.soname.startswith(prefixes)]

    assert len(libraries) == len(prefixes)
    for library in libraries:
        ctypes.CDLL(library.host_path)
        ctypes.CDLL(library.soname)  # loaded already: the loader finds it by its DT_SONAME


def test_every_device_file_that_containers_get_is_there(node):
    minors = tuple(gpu.minor for gpu in node.inventory().gpus)
    files = node.device_files(minors)

    names = {file.container_path for file in files.common}
    assert {"/dev/nvidiactl", "/dev/nvidia-uvm"} <= names
    assert set(files.gpus) == set(minors)
    every = [*files.common, *files.gpus.values()]
    assert all(Path(file.host_path).is_char_device() for file in every)
