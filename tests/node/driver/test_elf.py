"""What an ELF library says of itself."""

import platform
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra_driver.base.errors import NodeError
from dra_driver.node.driver.layout import ElfLibrary, read_elf
from tests.fakes.elf import elf_library


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return tmp_path / "libcuda.so.580.95.05"


@pytest.mark.parametrize(
    ("soname", "machine", "elf"),
    [
        ("libcuda.so.1", "x86_64", ElfLibrary("x86_64", "libcuda.so.1")),
        ("libcuda.so.1", "aarch64", ElfLibrary("aarch64", "libcuda.so.1")),
        (None, "x86_64", ElfLibrary("x86_64", None)),
        ("libcuda.so.1", "i386", None),
    ],
)
def test_the_soname_and_the_machine_are_read_but_of_32_bit_libraries(
    library: Path, soname: str | None, machine: str, elf: ElfLibrary | None
) -> None:
    library.write_bytes(elf_library(soname, machine))
    assert read_elf(str(library)) == elf


def test_the_c_library_of_this_machine_is_read_as_the_linker_does() -> None:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        path = next((line.split()[-1] for line in maps if "/libc.so.6" in line), None)
    if path is None or platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("this Python runs without glibc, or on another machine")
    assert read_elf(path) == ElfLibrary(platform.machine(), "libc.so.6")


def test_a_file_that_is_missing_is_named(library: Path) -> None:
    with pytest.raises(NodeError, match=rf"{library}: No such file"):
        read_elf(str(library))


@given(length=st.integers(0, len(elf_library("libcuda.so.1")) - 1))
def test_a_library_that_is_cut_off_anywhere_is_refused(
    tmp_path_factory: pytest.TempPathFactory, length: int
) -> None:
    library = tmp_path_factory.getbasetemp() / "truncated.so"
    library.write_bytes(elf_library("libcuda.so.1")[:length])
    with pytest.raises(NodeError, match=r"not a whole ELF library .* being installed"):
        read_elf(str(library))


@given(at=st.integers(0, 350), byte=st.integers(0, 255))
def test_a_damaged_library_gives_an_answer_or_a_node_error(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int
) -> None:
    library = tmp_path_factory.getbasetemp() / "damaged.so"
    content = bytearray(elf_library("libcuda.so.1"))
    content[at % len(content)] = byte
    library.write_bytes(content)
    try:
        elf = read_elf(str(library))
    except NodeError:
        return
    assert elf is None or elf.machine in ("x86_64", "aarch64")
