"""vendor/class=device: what is legal, and that parsing undoes qualifying."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi.errors import CdiNameError
from cdi.spec import LONGEST_FILE_NAME, parse_name, qualify, spec_file_name
from tests.cdi.strategies import device_names, kind_parts


@given(kind_parts, kind_parts, device_names)
def test_parsing_undoes_qualifying(vendor, device_class, device):
    name = qualify(vendor, device_class, device)

    assert parse_name(str(name)) == name


@given(st.text(max_size=30))
def test_any_text_is_a_name_or_refused(text):
    try:
        name = parse_name(text)
    except CdiNameError:
        return
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("aa/bb=c", id="the shortest"),
        pytest.param("vendor.example/gpu=0", id="a device that begins with a digit"),
        pytest.param("vv/cc=a:b.c_d-e", id="all characters of a device"),
        pytest.param("v-1.x_y/c.d=e", id="a dot in the class"),
        pytest.param(f"{'v' * 253}/{'c' * 63}={'d' * 255}", id="the longest"),
    ],
)
def test_a_legal_name_is_taken(text):
    assert str(parse_name(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("gpu-0", id="no kind"),
        pytest.param("vendor=gpu-0", id="no class"),
        pytest.param("/gpu=0", id="an empty vendor"),
        pytest.param("vendor/=0", id="an empty class"),
        pytest.param("vendor/gpu=", id="an empty device"),
        pytest.param("1vendor/gpu=0", id="a vendor that begins with a digit"),
        pytest.param("vendor/1gpu=0", id="a class that begins with a digit"),
        pytest.param("vendor/gpu-=0", id="a class that ends with a dash"),
        pytest.param("vendor/gpu=0:", id="a device that ends with a colon"),
        pytest.param("vendor/gpu=a=b", id="a second equals sign"),
        pytest.param("vendor/gpu/x=a", id="a second slash"),
        pytest.param("vendor/gpu=a\n", id="a line feed at the end"),
        pytest.param("vendör/gpu=a", id="a letter that is not ASCII"),
        pytest.param("v/gpu=0", id="a vendor of one letter, on which the Go library panics"),
        pytest.param("vendor/g=0", id="a class of one letter, on which the Go library panics"),
        pytest.param(f"{'v' * 254}/cc=d", id="a vendor too long"),
        pytest.param(f"vv/{'c' * 64}=d", id="a class too long"),
        pytest.param(f"vv/cc={'d' * 256}", id="a device too long"),
    ],
)
def test_an_illegal_name_is_refused(text):
    with pytest.raises(CdiNameError):
        parse_name(text)


@given(kind_parts, kind_parts, device_names)
def test_a_file_name_stays_in_its_directory_and_says_json(vendor, device_class, transient_id):
    name = spec_file_name(vendor, device_class, transient_id)

    assert name == f"{vendor}-{device_class}_{transient_id}.json"
    assert "/" not in name
    assert not name.startswith(".")


@pytest.mark.parametrize("transient_id", ["", "../x", "a/b", ".a", "a" * LONGEST_FILE_NAME])
def test_an_id_that_makes_no_safe_file_name_is_refused(transient_id):
    with pytest.raises(CdiNameError):
        spec_file_name("vendor.example", "gpu", transient_id)
