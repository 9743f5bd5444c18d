"""What is in an archive, read as a container runtime reads it: every digest is checked."""

import gzip
import hashlib
import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ReadImage:
    """The image for one architecture: its configuration and the files of its layers."""

    config: dict[str, Any]
    files: dict[str, tarfile.TarInfo]
    contents: dict[str, bytes]


def content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None
    return file.read()


class Archive:
    """An OCI archive with images by name."""

    def __init__(self, path: Path) -> None:
        with tarfile.open(path) as tar:
            self.members = {member.name: content(tar, member) for member in tar if member.isfile()}

    def blob(self, descriptor: dict[str, Any]) -> bytes:
        blob = self.members[f"blobs/{descriptor['digest'].replace(':', '/')}"]
        assert f"sha256:{hashlib.sha256(blob).hexdigest()}" == descriptor["digest"]
        assert len(blob) == descriptor["size"]
        return blob

    def index(self, name: str) -> dict[str, Any]:
        [index] = [
            entry
            for entry in json.loads(self.members["index.json"])["manifests"]
            if entry["annotations"]["io.containerd.image.name"] == name
        ]
        return index

    def image(self, name: str, architecture: str) -> ReadImage:
        manifests = json.loads(self.blob(self.index(name)))["manifests"]
        [entry] = [m for m in manifests if m["platform"]["architecture"] == architecture]
        manifest = json.loads(self.blob(entry))
        config = json.loads(self.blob(manifest["config"]))
        files: dict[str, tarfile.TarInfo] = {}
        contents: dict[str, bytes] = {}
        for descriptor, diff_id in zip(
            manifest["layers"], config["rootfs"]["diff_ids"], strict=True
        ):
            blob = self.blob(descriptor)
            is_packed = descriptor["mediaType"].endswith("+gzip")
            plain = gzip.decompress(blob) if is_packed else blob
            assert f"sha256:{hashlib.sha256(plain).hexdigest()}" == diff_id
            with tarfile.open(fileobj=io.BytesIO(plain)) as layer:
                for member in layer:
                    files[member.name] = member
                    if member.isfile():
                        contents[member.name] = content(layer, member)
        return ReadImage(config, files, contents)
