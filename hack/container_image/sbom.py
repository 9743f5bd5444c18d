"""The list of what is in an image (SBOM), as CycloneDX JSON: packages with licences and hashes."""

import hashlib
import json
import re
import zipfile
from collections.abc import Iterable, Sequence
from email.message import Message
from email.parser import BytesParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hack.container_image.debian import Package

_SPDX_OF_CLASSIFIERS = {
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: BSD License": "BSD-3-Clause",
    "License :: OSI Approved :: MIT License": "MIT",
}


def document(
    version: str, digest: str, packages: Iterable[dict[str, Any]], wheels: Iterable[dict[str, Any]]
) -> str:
    """The whole document for the image of one architecture, whose manifest has this digest."""
    image = {
        "type": "container",
        "bom-ref": digest,
        "name": "dra-driver-gpu",
        "version": version,
        "hashes": [_sha256(digest.removeprefix("sha256:"))],
    }
    components = sorted([*packages, *wheels], key=lambda component: str(component["bom-ref"]))
    content = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": image},
        "components": components,
        "dependencies": [{"ref": digest, "dependsOn": [c["bom-ref"] for c in components]}],
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def debian_component(package: Package, tree: Path) -> dict[str, Any]:
    """A Debian package; its licences are those that its copyright file in *tree* names."""
    release = f"arch={package.architecture}&distro=debian-12"
    purl = f"pkg:deb/debian/{quote(package.name)}@{quote(package.version)}?{release}"
    copyright_file = tree / "usr/share/doc" / package.name / "copyright"
    names = debian_licences(copyright_file.read_text(errors="replace"))
    licences = [{"license": {"name": name}} for name in names]
    return _component(package.name, package.version, purl, package.sha256, licences)


def debian_licences(text: str) -> Sequence[str]:
    """The names in a machine-readable copyright file, sorted; none in any other."""
    if not text.startswith("Format:"):
        return []
    return sorted(set(re.findall(r"^License: *(\S.*?) *$", text, re.MULTILINE)))


def wheel_component(wheel: Path) -> dict[str, Any]:
    """A wheel, by its own description."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)]
        facts = BytesParser().parsebytes(archive.read(name))
    purl = f"pkg:pypi/{quote(facts['Name'].lower().replace('_', '-'))}@{quote(facts['Version'])}"
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return _component(facts["Name"], facts["Version"], purl, sha256, _licences(facts))


def _licences(facts: Message) -> list[dict[str, Any]]:
    if expression := facts["License-Expression"]:
        return [{"expression": expression}]
    if (name := facts["License"]) and "\n" not in name:
        return [{"license": {"name": name}}]
    known = _SPDX_OF_CLASSIFIERS
    found = [known[c] for c in facts.get_all("Classifier", []) if c in known]
    return [{"license": {"name": name}} for name in found]


def _component(
    name: str, version: str, purl: str, sha256: str, licences: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        "hashes": [_sha256(sha256)],
        **({"licenses": licences} if licences else {}),
    }


def _sha256(content: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": content}
