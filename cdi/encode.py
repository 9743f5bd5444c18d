"""A spec to text and back, JSON or YAML.

Writing gives the same bytes for the same spec; reading what was written gives the same spec.
"""

import functools
import json
import re
from collections.abc import Hashable
from typing import Any, Final, NoReturn

import yaml

from cdi.document import (
    FIELD_NAMES,
    edits_document,
    from_document,
    head_document,
    to_document,
)
from cdi.errors import CdiSpecError
from cdi.records import Document
from cdi.spec import ContainerEdits, Spec

# Runtimes read JSON files with a YAML parser (Go library, ParseSpec). YAML refuses these characters
# or takes them for ends of lines, so they are written as \uXXXX; all others must not be, since YAML
# does not join the two halves that JSON would write for characters beyond U+FFFF.
_NOT_IN_YAML: Final = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def to_json(spec: Spec) -> str:
    """Give the text of a ``.json`` file.

    >>> from cdi import ContainerEdits, Device
    >>> edits = ContainerEdits(env=("A=1",))
    >>> print(to_json(Spec("vendor.example/gpu", devices=(Device("gpu-0", (), edits),))), end="")
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
    return yaml.dump(to_document(spec), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


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
        return yaml.load(text, Loader=_Loader)  # safe: _Loader is a SafeLoader


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document = dict(pairs)
    if len(document) < len(pairs):
        _refuse_twice([name for name, _ in pairs])
    return document


def _refuse_twice(names: list[str]) -> NoReturn:
    twice = sorted({name for name in names if names.count(name) > 1})
    raise CdiSpecError([f"{name}: is there twice in one object" for name in twice])


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice, as the Go library does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [str(key.value) for key, _ in node.value]
        if len(set(names)) < len(names):
            _refuse_twice(names)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """YAML whose strings no reader takes for something else.

    PyYAML writes the device names ``y`` and ``1e3`` plain, which Go's YAML reads as true and 1000.
    """


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if text in FIELD_NAMES else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _quoted)
