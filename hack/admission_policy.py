"""The admission policy that refuses wrong opaque configurations, written from their models.

``api.claim_configs`` says what a configuration may hold, and a node looks there when it prepares a
claim. The policy says the same in CEL, so that the API server refuses a wrong configuration when it
is applied. What the models say stands in tables; below, a configuration is taken apart into its
objects, level by level; each is compared with the tables, and what is wrong becomes one message.

What CEL lacks shapes the expressions. It has no functions: a list of one element gives a value a
name (``[x].map(v, …)[0]``). It lists the keys of an object in any order, so those that are named
are sorted. Everything compiles on Kubernetes 1.32: no ``lists.range``, no ``sort``, no
comprehension with two variables. Whoever writes a claim decides how much there is to compute. An
expression may cost 1,000,000, all of them 10,000,000; so keys beyond what a model has are counted,
and no more.
"""

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from api.claim_configs import KINDS, QUANTITY_PATTERN
from api.names import CONFIG_VERSION
from dra_driver.plan.profiles.validation import CUDA_CONTEXT_BYTES
from hack import generated

POLICY = (
    generated.REPOSITORY
    / "deploy/helm/dra-driver-gpu/templates/claim-configs-validatingadmissionpolicy.yaml"
)

MOST_CONFIGS = 32  # of a claim or a class (resource.k8s.io: DeviceConfigMaxSize)
MOST_NAMED = 8  # wrong keys of one object
MOST_UNKNOWN = 8  # with more than these, the keys of an object are counted, not named
LONGEST_SHOWN = 80  # characters of a name or a value
LONGEST_MESSAGE = 4800  # characters; the API server drops a message of more than 5 KiB
LONGEST_WIDE_MESSAGE = 1200  # characters, of up to four bytes each

_LEAST_MEMORY = f"{CUDA_CONTEXT_BYTES // 1024**2}Mi"
_ROOT = "Config"  # the model of a configuration whose kind or version is wrong

Schema = Mapping[str, Any]


@dataclass
class Tables:
    """What the models say: by model ("Mps"), or by field ("Mps.mpsConfig").

    Where the objects of a field are of several models, the field itself is the model of those that
    are of none of them. Maps have a model of their own ("Mps.limits[]") with one field, "*".
    """

    fields: dict[str, list[str]] = field(default_factory=dict)  # others are unknown
    required: dict[str, list[str]] = field(default_factory=dict)  # others are not looked at
    words: dict[str, list[str]] = field(default_factory=dict)
    ranges: dict[str, list[int]] = field(default_factory=dict)  # least, most
    booleans: dict[str, bool] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)  # characters of a quantity, at most
    models: dict[str, dict[str, str]] = field(default_factory=dict)  # by word; "": all others
    maps: dict[str, bool] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)  # keys
    remedies: dict[str, str] = field(default_factory=dict)  # how a message ends


@dataclass
class Models:
    """The models, read from the JSON schema of each kind. ValueError: the policy has no words for
    something in it."""

    tables: Tables = field(default_factory=Tables)
    levels: list[dict[str, str]] = field(default_factory=list)
    """By level, the fields that hold objects; and which field of these tells their models apart."""

    def read(self, kinds: Mapping[str, type[BaseModel]]) -> "Models":
        """Those of *kinds*, by the word in their field ``kind``."""
        self._union(_ROOT, "kind", {kind: kind for kind in kinds})
        self._words(f"{_ROOT}.apiVersion", [CONFIG_VERSION])
        self.tables.required[_ROOT] = ["apiVersion", "kind"]
        for kind, model in kinds.items():
            schema = model.model_json_schema()
            self._model(kind, schema, schema.get("$defs", {}), 0)
        return self

    def _model(self, name: str, schema: Schema, parts: Mapping[str, Schema], level: int) -> None:
        if schema.get("additionalProperties") is not False:
            raise ValueError(f"{name} takes fields that it does not name")
        fields = list(schema["properties"])
        self.tables.fields[name] = fields
        self.tables.most[name] = len(fields) + MOST_UNKNOWN
        self.tables.remedies[name] = f"; known {'are' if fields[1:] else 'is'} " + _joined(
            fields, "and"
        )
        for key, value in schema["properties"].items():
            if key in schema.get("required", ()) and "const" not in value:
                raise ValueError(f"{name}.{key} is required")
            self._field(f"{name}.{key}", value, parts, level)

    def _field(self, place: str, schema: Schema, parts: Mapping[str, Schema], level: int) -> None:
        """*place*: the model and the name of the field."""
        variants = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
        if len(variants) != 1:
            raise ValueError(f"{place} has {len(variants)} types")
        match variants[0]:
            case {"$ref": reference}:
                name = _name(reference)
                self._objects(place, {"": name}, "", level)
                self._model(name, parts[name], parts, level + 1)
            case {"oneOf": members}:
                self._one_of(place, [_name(member["$ref"]) for member in members], parts, level)
            case {"type": "object", "additionalProperties": entry, "maxProperties": most}:
                name = f"{place}[]"
                self._objects(place, {"": name}, "", level)
                self.tables.maps[name] = True
                self.tables.most[name] = most
                self.tables.remedies[name] = ", more than a claim has GPUs; write one for each"
                self._field(f"{name}.*", entry, parts, level + 1)
            case value:
                self._value(place, value)

    def _value(self, place: str, schema: Schema) -> None:
        match schema:
            case {"const": word}:
                self._words(place, [word])
            case {"enum": words}:
                self._words(place, words)
            case {"type": "boolean"}:
                self.tables.booleans[place] = True
                self.tables.remedies[place] = "; write true or false"
            case {"type": "integer", "minimum": least, "maximum": most}:
                self.tables.ranges[place] = [least, most]
                self.tables.remedies[place] = f"; write a whole number from {least} to {most}"
            case {"type": "string", "pattern": pattern, "maxLength": longest} if (
                pattern == QUANTITY_PATTERN
            ):
                self.tables.memory[place] = longest
                self.tables.remedies[place] = (
                    f"; write a quantity of {_LEAST_MEMORY} or more, for example 10Gi"
                )
            case _:
                raise ValueError(f"{place} is something unknown: {schema}")

    def _one_of(
        self, place: str, names: Sequence[str], parts: Mapping[str, Schema], level: int
    ) -> None:
        """A union: one field of all members tells them apart, each by its word."""
        members = {name: parts[name]["properties"] for name in names}
        every = {key for fields in members.values() for key in fields}
        [tag] = (key for key in every if all("const" in m.get(key, {}) for m in members.values()))
        words = {fields[tag]["const"]: name for name, fields in members.items()}
        self._objects(place, {}, tag, level)
        self._union(place, tag, words)
        self.tables.remedies[place] = f"; write an object with a {tag}"
        for word, name in words.items():
            self._model(name, parts[name], parts, level + 1)
            for other in sorted(every - members[name].keys()):
                self.tables.remedies[f"{name}.{other}"] = (
                    f" with {tag} {word}; remove it, or change the {tag}"
                )

    def _union(self, place: str, tag: str, members: Mapping[str, str]) -> None:
        self.tables.models[place] = {"": place, **members}
        self.tables.required[place] = [tag]
        self._words(f"{place}.{tag}", list(members))

    def _objects(self, place: str, models: dict[str, str], tag: str, level: int) -> None:
        self.tables.models[place] = models
        self.tables.remedies[place] = "; write an object"
        self.levels += [{} for _ in range(level + 1 - len(self.levels))]
        if self.levels[level].setdefault(place.rpartition(".")[2], tag) != tag:
            raise ValueError(f"objects in {place} are not told apart as in its namesake")

    def _words(self, place: str, words: list[str]) -> None:
        self.tables.words[place] = words
        self.tables.remedies[place] = f"; write {_joined(words, 'or')}"


def _name(reference: str) -> str:
    return reference.rpartition("/")[2]


def _joined(words: Sequence[str], last: str) -> str:
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), words[-1])))


_CONFIGS = """
(request.kind.kind == 'DeviceClass' ? dyn(object).spec :
 request.kind.kind == 'ResourceClaim' ? dyn(object).spec.?devices.orValue({}) :
 dyn(object).spec.spec.?devices.orValue({})).?config.orValue([])
"""

_HAS_CONFIG = """
%(configs)s
.exists(config, config.?opaque.?driver.orValue('') == '{{ .Values.driverName }}')
"""

_PREFIX = """
request.kind.kind == 'DeviceClass' ? 'spec.config' :
request.kind.kind == 'ResourceClaim' ? 'spec.devices.config' : 'spec.spec.devices.config'
"""

# The first level: the configurations themselves. Nothing more is said of those of another version.
_PARAMETERS = """
%(numbers)s
.filter(i, i < size(variables.configs) &&
  variables.configs[i].?opaque.?driver.orValue('') == '{{ .Values.driverName }}')
.map(i, [variables.configs[i].opaque.?parameters.orValue({})].map(value, {
  'config': dyn(i),
  'path': dyn(variables.prefix + '[' + string(i) + '].opaque.parameters'),
  'model': dyn(value.?apiVersion.orValue('') == '%(version)s' ?
    [variables.models['%(root)s']].map(models, [value.?kind.orValue('')].map(word,
      models[type(word) == string && word in models ? word : ''])[0])[0] : '%(root)s'),
  'value': dyn(value),
  'keys': dyn(value.filter(key, value[key] != null))
})[0])
"""

_OBJECTS = """
variables.%(outer)s
.filter(o, o.model + '.%(key)s' in variables.models && type(o.value.?%(key)s.orValue(0)) == map)
.map(o, [o.value.%(key)s].map(value, {
  'config': o.config,
  'path': dyn(o.path + '.%(key)s'),
  'model': dyn(%(model)s),
  'value': dyn(value),
  'keys': dyn(value.filter(key, value[key] != null))
})[0])
"""

_ONE_MODEL = "variables.models[o.model + '.%(key)s']['']"

_MODEL_BY_WORD = """\
[variables.models[o.model + '.%(key)s']].map(models, [value.?%(tag)s.orValue('')].map(word,
    models[type(word) == string && word in models ? word : ''])[0])[0]"""

_WRONG = """
variables.objects.map(o, [size(o.keys) > variables.most[?o.model].orValue(size(o.keys))].map(many, {
  'object': dyn(o),
  'many': dyn(many),
  'keys': dyn(
    variables.required[?o.model].orValue(many ? [] : o.keys)
    .filter(key, [o.model + '.' + (o.model in variables.maps ? '*' : key)].exists(field,
      [o.value[?key].orValue(dyn(null))].exists(value,
        value == null ||
        (field in variables.words ? !(value in variables.words[field]) :
         field in variables.ranges ? !(type(value) == int &&
           value >= variables.ranges[field][0] && value <= variables.ranges[field][1]) :
         field in variables.booleans ? type(value) != bool :
         field in variables.memory ? !(type(value) == string &&
           size(value) <= variables.memory[field] &&
           value.matches(r'%(pattern)s') &&
           (!isQuantity(value) || quantity(value).compareTo(quantity('%(least)s')) >= 0)) :
         field in variables.models ? type(value) != map :
         true)))))
})[0])
.filter(w, w.many || size(w.keys) > 0)
"""

# A key stands where as many are before it.
_TEXTS = """
variables.wrong.map(w, [w.object].map(o, {
  'config': o.config,
  'text': dyn(w.many ?
    o.path + ': has ' + string(size(o.keys)) + ' keys' + variables.remedies[o.model] :
    (size(w.keys) > %(named)s ? [w.keys.min()] :
     [w.keys.map(key, w.keys.filter(other, other < key).size())].map(order,
       %(numbers)s.filter(i, i < size(order)).map(i, w.keys[order.indexOf(i)]))[0])
    .map(key, [o.model + '.' + (o.model in variables.maps ? '*' : key)].map(field,
      [o.value[?key].orValue(dyn(null))].map(value,
        o.path + '.' +
        [strings.quote(size(key) > %(shown)s ? key.substring(0, %(shown)s) + '…' : key)].map(name,
          name.substring(1, size(name) - 1))[0] +
        (o.model in variables.fields && !(key in variables.fields[o.model]) ? ': unknown field' :
         value == null ? ': missing' :
         ': ' + (type(value) == string ?
            strings.quote(size(value) > %(shown)s ? value.substring(0, %(shown)s) + '…' : value) :
          type(value) == map ? 'an object' :
          type(value) == list ? 'a list' : string(value)) + ' is wrong') +
        variables.remedies[field in variables.remedies ? field : o.model])[0])[0])
    .join('; ') +
    (size(w.keys) > %(named)s ? '; and ' + string(size(w.keys) - 1) + ' more in ' + o.path : ''))
})[0])
"""

_PROBLEMS = """
variables.level1.map(o, o.config)
.map(i, variables.texts.filter(text, text.config == i).map(text, text.text).join('; '))
.filter(text, text != '').join('; ')
"""

_MESSAGE = """
[size(variables.problems) <= %(longest)s ? variables.problems :
 variables.problems.substring(0, %(longest)s) + '… and more'].map(text,
   size(bytes(text)) <= 5000 ? text : text.substring(0, %(wide)s) + '… and more')[0]
"""

_TEMPLATE = """\
{{- if and (include "dra-driver-gpu.admission-policies" .) \
(include "dra-driver-gpu.resource-api" .) -}}
# Written by hack/update-policy: change api/claim_configs.py or hack/admission_policy.py instead.
#
# Refuses, when they are applied, opaque configurations that no node would accept. The spec of a
# claim never changes: it is judged once. Templates and classes are judged again when their spec
# changes; the finalizers of older, wrong ones stay writable. Where the policy itself fails, the
# object is let through: the nodes will refuse it.
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata:
  name: {{ include "dra-driver-gpu.fullname" . }}-claim-configs
  labels:
    {{- include "dra-driver-gpu.labels" . | nindent 4 }}
spec:
  failurePolicy: Ignore
  matchConstraints:
    # Configurations stand at the same place in these versions; objects of later ones are converted.
    matchPolicy: Equivalent
    resourceRules:
      - apiGroups: [resource.k8s.io]
        apiVersions: [v1, v1beta2, v1beta1]
        operations: [CREATE]
        resources: [resourceclaims]
      - apiGroups: [resource.k8s.io]
        apiVersions: [v1, v1beta2, v1beta1]
        operations: [CREATE, UPDATE]
        resources: [resourceclaimtemplates, deviceclasses]
  matchConditions:
    - name: has-a-configuration-for-this-driver
      expression: |-
%(has_config)s
    - name: is-new-or-has-another-spec
      expression: request.operation == 'CREATE' || dyn(object).spec != dyn(oldObject).spec
  variables:
%(variables)s
  validations:
    # One, because the API server tells what the first one says and no more.
    - expression: variables.problems == ''
      message: an opaque configuration for driver {{ .Values.driverName }} is wrong
      messageExpression: |-
%(message)s
{{- end }}
"""


def policy() -> str:
    """The template of the Helm chart."""
    longest = {"longest": LONGEST_MESSAGE, "wide": LONGEST_WIDE_MESSAGE}
    return _TEMPLATE % {
        "has_config": _indented(_HAS_CONFIG % {"configs": _CONFIGS.strip()}),
        "variables": "\n".join(
            f"    - name: {name}\n      expression: |-\n{_indented(expression)}"
            for name, expression in _variables(Models().read(KINDS)).items()
        ),
        "message": _indented(_MESSAGE % longest),
    }


def _variables(models: Models) -> dict[str, str]:
    """Their expressions, by name; each uses those before it."""
    tables = {name: _table(table) for name, table in vars(models.tables).items()}
    first = {"numbers": _numbers(MOST_CONFIGS), "version": CONFIG_VERSION, "root": _ROOT}
    levels = {"level1": _PARAMETERS % first}
    for number, fields in enumerate(models.levels, 1):
        parts = [_objects(f"level{number}", key, tag) for key, tag in fields.items()]
        levels[f"level{number + 1}"] = "\n+\n".join(parts)
    shown = {"numbers": _numbers(MOST_NAMED), "named": MOST_NAMED, "shown": LONGEST_SHOWN}
    return {
        **tables,
        "configs": _CONFIGS,
        "prefix": _PREFIX,
        **levels,
        "objects": " + ".join(f"variables.{level}" for level in levels),
        "wrong": _WRONG % {"pattern": QUANTITY_PATTERN, "least": _LEAST_MEMORY},
        "texts": _TEXTS % shown,
        "problems": _PROBLEMS,
    }


def _objects(outer: str, key: str, tag: str) -> str:
    model = (_MODEL_BY_WORD if tag else _ONE_MODEL) % {"key": key, "tag": tag}
    return _OBJECTS.strip() % {"outer": outer, "key": key, "model": model}


def _numbers(count: int) -> str:
    return f"[{', '.join(map(str, range(count)))}]"


def _table(table: Mapping[str, Any]) -> str:
    rows = [f"  {_literal(key)}: {_literal(value)}" for key, value in table.items()]
    return "{\n" + ",\n".join(rows) + "\n}"


def _literal(value: Any) -> str:
    """*value* in CEL."""
    match value:
        case str() if "'" in value or "\\" in value:
            raise ValueError(f"{value!r} would need escapes in CEL")
        case str():
            return f"'{value}'"
        case list():
            return f"[{', '.join(map(_literal, value))}]"
        case dict():
            return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
        case _:
            return json.dumps(value)


def _indented(expression: str) -> str:
    return textwrap.indent(expression.strip("\n"), " " * 8)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the policy, or say that it is stale. 1: it is."""
    return generated.update("hack/update-policy", __doc__, {POLICY: policy()}, arguments)


if __name__ == "__main__":
    sys.exit(main())
