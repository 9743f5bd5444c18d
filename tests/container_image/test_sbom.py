"""The SBOM: what is in the image, with versions, licences and hashes."""

import hashlib
import json
import zipfile

import pytest

from hack.container_image.debian import Package
from hack.container_image.sbom import (
    debian_component,
    debian_licences,
    document,
    wheel_component,
)

DIGEST = f"sha256:{'1' * 64}"


def wheel(tmp_path, metadata):
    path = tmp_path / "some_thing-1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("some_thing-1.2.dist-info/METADATA", metadata)
    return path


def test_a_debian_package_has_its_version_licences_and_hash(tmp_path):
    copyright_file = tmp_path / "usr/share/doc/zlib1g/copyright"
    copyright_file.parent.mkdir(parents=True)
    copyright_file.write_text("Format: 1.0\n\nFiles: *\nLicense: Zlib\n\nLicense: Zlib\n words\n")
    package = Package("arm64", "zlib1g", "1:1.2.13.dfsg-1", "2" * 64, "pool/z.deb")
    purl = "pkg:deb/debian/zlib1g@1%3A1.2.13.dfsg-1?arch=arm64&distro=debian-12"
    assert debian_component(package, tmp_path) == {
        "type": "library",
        "bom-ref": purl,
        "name": "zlib1g",
        "version": "1:1.2.13.dfsg-1",
        "purl": purl,
        "hashes": [{"alg": "SHA-256", "content": "2" * 64}],
        "licenses": [{"license": {"name": "Zlib"}}],
    }


def test_a_copyright_file_in_prose_names_no_licences():
    assert debian_licences("This is GNU libc.\nLicense: some words\n") == []


@pytest.mark.parametrize(
    ("line", "licences"),
    [
        ("License-Expression: MIT OR Apache-2.0", [{"expression": "MIT OR Apache-2.0"}]),
        ("License: MIT", [{"license": {"name": "MIT"}}]),
        (
            "Classifier: License :: OSI Approved :: BSD License",
            [{"license": {"name": "BSD-3-Clause"}}],
        ),
        ("Summary: words", None),
    ],
)
def test_a_wheel_has_the_licence_that_its_metadata_names(tmp_path, line, licences):
    path = wheel(tmp_path, f"Metadata-Version: 2.4\nName: Some_Thing\nVersion: 1.2\n{line}\n")
    component = wheel_component(path)
    assert component["purl"] == "pkg:pypi/some-thing@1.2"
    assert component.get("licenses") == licences
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert component["hashes"] == [{"alg": "SHA-256", "content": sha256}]


def test_the_document_names_the_image_by_its_digest_and_is_the_same_in_any_order():
    components = [{"bom-ref": name, "type": "library", "name": name} for name in "bca"]
    text = document("0.1.0", DIGEST, components[:1], components[1:])
    assert text == document("0.1.0", DIGEST, components[2:], components[:2])
    content = json.loads(text)
    assert content["metadata"]["component"]["hashes"] == [{"alg": "SHA-256", "content": "1" * 64}]
    assert [component["name"] for component in content["components"]] == ["a", "b", "c"]
    assert content["dependencies"] == [{"ref": DIGEST, "dependsOn": ["a", "b", "c"]}]
