"""A spec to text and back, JSON or YAML.

Writing gives the same bytes for the same spec; reading what was written gives the same spec.

Objects of a document are read and written by tables of their fields, one row a field, in the CDI
SPEC's order. Reading goes on behind a mistake, so that one pass finds them all, each with its path.
"""

import functools
import json
import re
from collections.abc import Callable, Hashable
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Final, NoReturn

import yaml

from cdi.errors import CdiSpecError
from cdi.spec import CdiDevice, ContainerEdits, DeviceNode, Hook, IntelRdt, Mount, NetDevice, Spec
from cdi.validate import check, oldest_version, version_problem

Document = dict[str, Any]
"""An object as JSON and YAML know it: of dicts, lists, strings, numbers and booleans."""


@dataclass(frozen=True, slots=True)
class ValueCodec:
    """How one sort of value is written, and read from a document with its path and the problems."""

    write: Callable[[Any], Any]
    read: Callable[[Any, str, list[str]], Any]


@dataclass(frozen=True, slots=True)
class FieldCodec:
    """One row of a table: the name in a file, the attribute of the class, and the sort of value."""

    name: str
    attribute: str
    codec: ValueCodec
    required: bool = False


@dataclass(frozen=True, slots=True)
class ObjectCodec:
    """An object of the format: the class that holds it and its fields in the SPEC's order."""

    cls: type[Any]
    fields: tuple[FieldCodec, ...]

    def write(self, value: Any) -> Document:
        """Give the object; a field that holds its default is left out unless it is required."""
        usual = _defaults(self.cls)
        found = [(f, getattr(value, f.attribute)) for f in self.fields]
        return {
            f.name: f.codec.write(held)
            for f, held in found
            if f.required or held != usual[f.attribute]
        }

    def read(self, document: object, path: str, problems: list[str]) -> Any:
        """Build the value; where ``problems`` grew, it is for the bin."""
        if not isinstance(document, dict):
            problems.append(f"{path}: must be an object")
            return None
        problems.extend(self._unknown(document, path))
        # A runtime reads null as "not there" (Go, encoding/json).
        given = {f.attribute: f for f in self.fields if document.get(f.name) is not None}
        missing = [f for f in self.fields if f.required and f.attribute not in given]
        problems.extend(f"{_join(path, f.name)}: is required" for f in missing)
        held = {
            attribute: f.codec.read(document[f.name], _join(path, f.name), problems)
            for attribute, f in given.items()
        }
        return self.cls(**dict.fromkeys((f.attribute for f in missing), None), **held)

    def _unknown(self, document: dict[Any, Any], path: str) -> list[str]:
        names = {f.name for f in self.fields}
        return [
            f"{_join(path, str(name))}: unknown field{_meant(str(name), names)}"
            for name in document
            if name not in names
        ]

    @property
    def codec(self) -> ValueCodec:
        """Use the record as the value of a field of another."""
        return ValueCodec(self.write, self.read)


def _meant(name: str, names: set[str]) -> str:
    meant = [known for known in names if known.lower() == name.lower()]
    return f", write {meant[0]!r}" if meant else ""


def _defaults(cls: type[Any]) -> dict[str, Any]:
    return {
        f.name: f.default if f.default_factory is MISSING else f.default_factory()
        for f in fields(cls)
    }


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _scalar(of: type[Any], says: str) -> ValueCodec:
    def read(value: object, path: str, problems: list[str]) -> object:
        # Not isinstance: True is an int.
        if type(value) is not of:
            problems.append(f"{path}: must be {says}")
        return value

    return ValueCodec(lambda value: value, read)


def list_codec(item: ValueCodec) -> ValueCodec:
    """Make a codec for lists of what another codec knows."""

    def read(value: object, path: str, problems: list[str]) -> tuple[object, ...]:
        if not isinstance(value, list):
            problems.append(f"{path}: must be a list")
            return ()
        return tuple(item.read(part, f"{path}[{i}]", problems) for i, part in enumerate(value))

    return ValueCodec(lambda values: [item.write(value) for value in values], read)


def _read_pairs(value: object, path: str, problems: list[str]) -> tuple[tuple[Any, Any], ...]:
    if not isinstance(value, dict):
        problems.append(f"{path}: must be an object")
        return ()
    odd = [key for key, held in value.items() if not (type(key) is type(held) is str)]
    problems.extend(f"{_join(path, str(key))}: must be a string" for key in odd)
    return tuple(value.items())


TEXT: Final = _scalar(str, "a string")
NUMBER: Final = _scalar(int, "a whole number")
FLAG: Final = _scalar(bool, "true or false")
TEXTS: Final = list_codec(TEXT)
PAIRS: Final = ValueCodec(dict, _read_pairs)


_DEVICE_NODE: Final = ObjectCodec(
    DeviceNode,
    (
        FieldCodec("path", "path", TEXT, required=True),
        FieldCodec("hostPath", "host_path", TEXT),
        FieldCodec("type", "type", TEXT),
        FieldCodec("major", "major", NUMBER),
        FieldCodec("minor", "minor", NUMBER),
        FieldCodec("fileMode", "file_mode", NUMBER),
        FieldCodec("permissions", "permissions", TEXT),
        FieldCodec("uid", "uid", NUMBER),
        FieldCodec("gid", "gid", NUMBER),
    ),
)
_MOUNT: Final = ObjectCodec(
    Mount,
    (
        FieldCodec("hostPath", "host_path", TEXT, required=True),
        FieldCodec("containerPath", "container_path", TEXT, required=True),
        FieldCodec("type", "type", TEXT),
        FieldCodec("options", "options", TEXTS),
    ),
)
_HOOK: Final = ObjectCodec(
    Hook,
    (
        FieldCodec("hookName", "hook_name", TEXT, required=True),
        FieldCodec("path", "path", TEXT, required=True),
        FieldCodec("args", "args", TEXTS),
        FieldCodec("env", "env", TEXTS),
        FieldCodec("timeout", "timeout", NUMBER),
    ),
)
_INTEL_RDT: Final = ObjectCodec(
    IntelRdt,
    (
        FieldCodec("closID", "clos_id", TEXT),
        FieldCodec("l3CacheSchema", "l3_cache_schema", TEXT),
        FieldCodec("memBwSchema", "mem_bw_schema", TEXT),
        FieldCodec("schemata", "schemata", TEXTS),
        FieldCodec("enableMonitoring", "enable_monitoring", FLAG),
    ),
)
_NET_DEVICE: Final = ObjectCodec(
    NetDevice,
    (
        FieldCodec("hostInterfaceName", "host_interface_name", TEXT, required=True),
        FieldCodec("name", "name", TEXT, required=True),
    ),
)
_CONTAINER_EDITS: Final = ObjectCodec(
    ContainerEdits,
    (
        FieldCodec("env", "env", TEXTS),
        FieldCodec("deviceNodes", "device_nodes", list_codec(_DEVICE_NODE.codec)),
        FieldCodec("mounts", "mounts", list_codec(_MOUNT.codec)),
        FieldCodec("hooks", "hooks", list_codec(_HOOK.codec)),
        FieldCodec("additionalGids", "additional_gids", list_codec(NUMBER)),
        FieldCodec("intelRdt", "intel_rdt", _INTEL_RDT.codec),
        FieldCodec("netDevices", "net_devices", list_codec(_NET_DEVICE.codec)),
    ),
)
_DEVICE: Final = ObjectCodec(
    CdiDevice,
    (
        FieldCodec("name", "name", TEXT, required=True),
        FieldCodec("annotations", "annotations", PAIRS),
        FieldCodec("containerEdits", "container_edits", _CONTAINER_EDITS.codec, required=True),
    ),
)
_SPEC: Final = ObjectCodec(
    Spec,
    (
        FieldCodec("kind", "kind", TEXT, required=True),
        FieldCodec("annotations", "annotations", PAIRS),
        FieldCodec("devices", "devices", list_codec(_DEVICE.codec), required=True),
        FieldCodec("containerEdits", "container_edits", _CONTAINER_EDITS.codec),
    ),
)

_RECORDS: Final = (
    _SPEC,
    _DEVICE,
    _CONTAINER_EDITS,
    _DEVICE_NODE,
    _MOUNT,
    _HOOK,
    _INTEL_RDT,
    _NET_DEVICE,
)
FIELD_NAMES: Final = frozenset(
    {"cdiVersion", *(field.name for record in _RECORDS for field in record.fields)}
)
"""Every name the format has, wherever it may stand."""


def to_document(spec: Spec) -> Document:
    """Give the document of a legal spec, at the oldest version that can say it."""
    edits = spec.container_edits
    own = {} if edits.is_empty else {"containerEdits": edits_document(edits)}
    return head_document(spec) | own


def head_document(spec: Spec) -> Document:
    """Give the document of a legal spec as far as its own edits, which stand last."""
    check(spec)
    head = replace(spec, container_edits=ContainerEdits())
    return {"cdiVersion": oldest_version(spec), **_SPEC.write(head)}


def edits_document(edits: ContainerEdits) -> Document:
    """Give the object of a spec's own edits, which were checked with the spec."""
    return _CONTAINER_EDITS.write(edits)


def from_document(document: object) -> Spec:
    """Read a document; problems of shape are reported before problems of content."""
    if not isinstance(document, dict):
        raise CdiSpecError(["a spec must be an object"])
    body = dict(document)
    version = body.pop("cdiVersion", None)
    problems: list[str] = []
    if not isinstance(version, str):
        problems.append("cdiVersion: must be a string")
    spec: Spec = _SPEC.read(body, "", problems)
    if problems:
        raise CdiSpecError(problems)
    if problem := version_problem(version, spec):
        raise CdiSpecError([f"cdiVersion: {problem}"])
    check(spec)
    return spec


# Runtimes read JSON files with a YAML parser (Go library, ParseSpec). YAML refuses these characters
# or takes them for ends of lines, so they are written as \uXXXX; all others must not be, since YAML
# does not join the two halves that JSON would write for characters beyond U+FFFF.
_NOT_IN_YAML: Final = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def to_json(spec: Spec) -> str:
    """Give the text of a ``.json`` file.

    >>> from cdi import ContainerEdits, CdiDevice
    >>> edits = ContainerEdits(env=("A=1",))
    >>> print(to_json(Spec("vendor.example/gpu", devices=(CdiDevice("gpu-0", (), edits),))), end="")
    {
      "cdiVersion": "0.3.0",
      "kind": "vendor.example/gpu",
      "devices": [
        {
          "name": "gpu-0",
          "containerEdits": {
            "env": [
              "A=1"
            ]
          }
        }
      ]
    }
    """
    head = _text(head_document(spec))
    if spec.container_edits.is_empty:
        return f"{head}\n"
    return f'{head[:-2]},\n  "containerEdits": {_own_edits(spec.container_edits)}\n}}\n'


@functools.lru_cache(maxsize=8)
def _own_edits(edits: ContainerEdits) -> str:
    """The text of a spec's own edits: most of a spec, and often the same for all of a vendor."""
    return _text(edits_document(edits)).replace("\n", "\n  ")  # in strings it is written as \\n


def _text(document: Document) -> str:
    text = json.dumps(document, indent=2, ensure_ascii=False)
    return _NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def to_yaml(spec: Spec) -> str:
    """Give the text of a ``.yaml`` file."""
    return yaml.dump(
        to_document(spec), Dumper=_QuotingYamlDumper, sort_keys=False, allow_unicode=True
    )


def from_text(text: str) -> Spec:
    """Read a file's text, JSON or YAML, as strictly as a runtime does, or raise ``CdiSpecError``.

    >>> from_text('{"cdiVersion": "0.3.0", "kind": "vendor.example/gpu", "device": []}')
    Traceback (most recent call last):
    cdi.errors.CdiSpecError: device: unknown field; devices: is required
    """
    return from_document(parse_text(text))


def parse_text(text: str) -> object:
    """Read JSON or YAML whose objects have no key twice; the content is not looked at."""
    try:
        return _parse(text)
    # ValueError: YAML's dates and very long numbers. RecursionError: nesting without end.
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise CdiSpecError([f"neither JSON nor YAML: {e}"]) from e


def _parse(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError:
        return yaml.load(text, Loader=_StrictYamlLoader)  # safe: _Loader is a SafeLoader


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document = dict(pairs)
    if len(document) < len(pairs):
        _refuse_twice([name for name, _ in pairs])
    return document


def _refuse_twice(names: list[str]) -> NoReturn:
    twice = sorted({name for name in names if names.count(name) > 1})
    raise CdiSpecError([f"{name}: is there twice in one object" for name in twice])


class _StrictYamlLoader(yaml.SafeLoader):
    """YAML that refuses a key given twice, as the Go library does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [str(key.value) for key, _ in node.value]
        if len(set(names)) < len(names):
            _refuse_twice(names)
        return super().construct_mapping(node, deep)


class _QuotingYamlDumper(yaml.SafeDumper):
    """YAML whose strings no reader takes for something else.

    PyYAML writes the device names ``y`` and ``1e3`` plain, which Go's YAML reads as true and 1000.
    """


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if text in FIELD_NAMES else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_QuotingYamlDumper.add_representer(str, _quoted)
