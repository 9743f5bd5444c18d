"""Archives of images as the OCI specifies them, which also `docker load` of any version reads."""

import hashlib
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hack.container_image.layers import add_file

_OCI = "application/vnd.oci.image"
_CREATED = "1970-01-01T00:00:00Z"  # the same whenever it is built
_VARIANTS = {"arm64": {"variant": "v8"}}


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer, packed or not: *diff_id* is the digest of the tar archive in it."""

    content: bytes
    diff_id: str
    origin: str = ""  # what is in it, for `docker history`
    unpacked_bytes: int = 0

    @property
    def is_packed(self) -> bool:
        return digest_of(self.content) != self.diff_id


@dataclass(frozen=True, slots=True)
class Platform:
    """What runs on one architecture."""

    architecture: str  # as Go calls it: amd64, arm64
    layers: Sequence[Layer]


@dataclass(frozen=True, slots=True)
class Image:
    """An image with a name and a tag, for one or more architectures."""

    name: str
    platforms: Sequence[Platform]
    config: Mapping[str, Any] = field(default_factory=dict)  # Entrypoint, Cmd, Env, Labels


@dataclass(frozen=True, slots=True)
class Digests:
    """By which a registry knows an image: as a whole, and for each architecture."""

    image: str
    platforms: Mapping[str, str]


def write_archive(archive: Path, images: Iterable[Image]) -> list[Digests]:
    """Write an archive of these images; the same images give the same bytes."""
    blobs: dict[str, bytes] = {}
    indexes = []
    docker_images = []
    for image in images:
        manifests = [_add_manifest(image, platform, blobs) for platform in image.platforms]
        index = {"schemaVersion": 2, "mediaType": f"{_OCI}.index.v1+json", "manifests": manifests}
        tag = image.name.rpartition(":")[2]
        names = {"io.containerd.image.name": image.name, "org.opencontainers.image.ref.name": tag}
        indexes.append({**_add(blobs, "index.v1+json", _json(index)), "annotations": names})
        docker_images.append(_docker_image(image, json.loads(blobs[manifests[0]["digest"]])))
    with tarfile.open(archive, "w", format=tarfile.GNU_FORMAT) as tar:
        add_file(tar, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        add_file(tar, "index.json", _json({"schemaVersion": 2, "manifests": indexes}))
        add_file(tar, "manifest.json", _json(docker_images))
        for digest, content in sorted(blobs.items()):
            add_file(tar, _blob_path(digest), content)
    return [_digests(index["digest"], blobs) for index in indexes]


def _digests(digest: str, blobs: Mapping[str, bytes]) -> Digests:
    manifests = json.loads(blobs[digest])["manifests"]
    return Digests(digest, {m["platform"]["architecture"]: m["digest"] for m in manifests})


def _add_manifest(image: Image, platform: Platform, blobs: dict[str, bytes]) -> dict[str, Any]:
    which = {
        "architecture": platform.architecture,
        "os": "linux",
        **_VARIANTS.get(platform.architecture, {}),
    }
    config = {
        **which,
        "created": _CREATED,
        "config": image.config,
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in platform.layers]},
        "history": [{"created": _CREATED, "created_by": each.origin} for each in platform.layers],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_OCI}.manifest.v1+json",
        "config": _add(blobs, "config.v1+json", _json(config)),
        "layers": [
            _add(blobs, f"layer.v1.tar{'+gzip' * layer.is_packed}", layer.content)
            for layer in platform.layers
        ],
    }
    return {**_add(blobs, "manifest.v1+json", _json(manifest)), "platform": which}


def _docker_image(image: Image, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What a Docker without containerd's image store reads: one architecture, the first."""
    return {
        "Config": _blob_path(manifest["config"]["digest"]),
        "RepoTags": [image.name],
        "Layers": [_blob_path(layer["digest"]) for layer in manifest["layers"]],
    }


def _add(blobs: dict[str, bytes], media_type: str, content: bytes) -> dict[str, Any]:
    digest = digest_of(content)
    blobs[digest] = content
    return {"mediaType": f"{_OCI}.{media_type}", "digest": digest, "size": len(content)}


def digest_of(content: bytes) -> str:
    """As `sha256:` and hexadecimal digits."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _blob_path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _json(document: object) -> bytes:
    return json.dumps(document, sort_keys=True).encode()
