"""The CRD of NodeProfiles, written from the models of ``api.node_profile``.

The API server refuses what ``decode_profile`` refuses, in the same words: types, words and bounds
by the schema, what a text has to match and what depends on several fields by rules in CEL. The
rules about several fields come from the tables of ``plan.profiles.validation``. Objects are written
as they are documented: the API server takes no word in another case, no ``mig: Dynamic`` and no
number for a quantity. A field that it does not know is refused where the client asks for that, as
kubectl does.

Nothing below ``spec.gpus`` has a default: a revision is what somebody wrote. Lists, maps and texts
have a greatest length in the models, because the API server refuses a CRD whose rules could cost
too much. The chart installs on Kubernetes 1.32, so no rule uses a function that came later.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from api.names import CONFIG_GROUP, CONFIG_VERSION
from api.node_profile import (
    DURATION_PATTERN,
    EMPTY_SPEC,
    GpuSelectorConfig,
    NodeProfileObjectSpec,
    NodeProfileSpec,
)
from dra_driver.plan.profiles import validation
from dra_driver.plan.profiles.validation import Condition
from hack import generated

CRD = (
    generated.REPOSITORY
    / "deploy/helm/dra-driver-gpu/templates/nodeprofiles-customresourcedefinition.yaml"
)
LONGEST_NAME = 63  # of a profile: the value of a label

Schema = dict[str, Any]

_KEPT = (  # of JSON schema
    *("type", "enum", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "required"),
)

_MEBIBYTES = f"quantity(self).asApproximateFloat() / {validation.MIB}.0"


def _at_most_hours(hours: int) -> str:
    """Of a duration, if it is one."""
    return f"!self.matches(r'^({DURATION_PATTERN})$') || duration(self) <= duration('{hours}h')"


_FIELD_RULES = {
    "select": [
        (
            " || ".join(f"has(self.{field})" for field in GpuSelectorConfig.model_fields),
            validation.EMPTY_SELECT,
        )
    ],
    "memory.least": [
        (
            "!isQuantity(self) || "
            f"quantity(self).compareTo(quantity('{validation.CUDA_CONTEXT_BYTES}')) >= 0",
            validation.TOO_LITTLE,
        )
    ],
    "memory.step": [
        (
            # From 2^53 on, every double is a whole number, and soon no int any more.
            f"!isQuantity(self) || [{_MEBIBYTES}].all(n, "
            "n > 9007199254740992.0 || n > 0.0 && double(int(n)) == n)",
            validation.NO_STEP,
        )
    ],
    "memoryGuard.grace": [(_at_most_hours(validation.LONGEST_GRACE_HOURS), validation.TOO_LONG)],
    "health.recovery": [
        (_at_most_hours(validation.LONGEST_RECOVERY_HOURS), validation.RECOVERS_TOO_LATE)
    ],
}
"""By field of an entry: rules about its value, and what is said of one that breaks them."""

_TEMPLATE = """\
{{- /*
Written by hack/update-crd: change api/node_profile.py, plan/profiles/validation.py or hack/crd.py
instead.
*/ -}}
{{- define "dra-driver-gpu.node-profiles.crd" }}
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: nodeprofiles.%(group)s
  labels:
    {{- include "dra-driver-gpu.labels" . | nindent 4 }}
  annotations:
    helm.sh/resource-policy: keep  # with it all NodeProfiles would be deleted
%(spec)s
{{- end }}
{{- if include "dra-driver-gpu.node-profiles" . }}
{{- if semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version }}
{{- include "dra-driver-gpu.node-profiles.crd" . }}
{{- else }}
{{- $crd := include "dra-driver-gpu.node-profiles.crd" . | fromYaml }}
{{- include "dra-driver-gpu.without-rules" $crd }}
{{ toYaml $crd }}
{{- end }}
{{- end }}
"""


def crd() -> str:
    """The template of the Helm chart."""
    group, _, version = CONFIG_VERSION.partition("/")
    definition = {
        "group": group,
        "names": {
            "kind": "NodeProfile",
            "listKind": "NodeProfileList",
            "plural": "nodeprofiles",
            "singular": "nodeprofile",
        },
        "scope": "Cluster",
        "versions": [
            {
                "name": version,
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "additionalPrinterColumns": _columns(),
                "schema": {"openAPIV3Schema": _schema()},
            }
        ],
    }
    spec = yaml.safe_dump({"spec": definition}, sort_keys=False, width=120, allow_unicode=True)
    return _TEMPLATE % {"group": CONFIG_GROUP, "spec": spec.rstrip()}


def _columns() -> list[Schema]:
    progress = '.status.conditions[?(@.type=="Progressing")].reason'
    columns = [
        ("Nodes", "integer", ".status.nodes", 0, "The nodes that the profile holds for."),
        ("Updated", "integer", ".status.updated", 0, "The nodes that have the newest revision."),
        ("Pending", "integer", ".status.pending", 0, "The GPUs in use that follow when free."),
        ("Failed", "integer", ".status.failed", 0, "The nodes that refused the newest revision."),
        ("Status", "string", progress, 0, "How far the rollout is."),
        ("Priority", "integer", ".spec.priority", 1, "Which of several profiles holds."),
        ("Revision", "string", ".status.updateRevision", 1, "The newest revision."),
        ("Age", "date", ".metadata.creationTimestamp", 0, "How old the profile is."),
    ]
    keys = ("name", "type", "jsonPath", "priority", "description")
    return [dict(zip(keys, column, strict=True)) for column in columns]


def _schema() -> Schema:
    objects = NodeProfileObjectSpec.model_json_schema()
    entries = NodeProfileSpec.model_json_schema()
    for model in entries["$defs"].values():
        for field in model["properties"].values():
            field.pop("default", None)
    spec = _structural(objects, objects["$defs"])
    gpus = _structural(entries["properties"]["gpus"], entries["$defs"])
    gpus["x-kubernetes-validations"] = [_only_the_last_selects_everything()]
    gpus["items"]["x-kubernetes-validations"] = _entry_rules()
    for field, rules in _FIELD_RULES.items():
        schema = gpus["items"]
        for part in field.split("."):
            schema = schema["properties"][part]
        schema.setdefault("x-kubernetes-validations", []).extend(
            _rule(rule, message) for rule, message in rules
        )
    spec["properties"] |= {"gpus": gpus}
    spec["x-kubernetes-validations"] = [_rule("has(self.gpus) || has(self.api)", EMPTY_SPEC)]
    name = _rule(
        f"size(self.metadata.name) <= {LONGEST_NAME}",
        f"metadata.name: has more than {LONGEST_NAME} characters, and a node's label has to be "
        "able to name the profile; shorten it",
    )
    return {
        "type": "object",
        "description": "How the GPUs of some nodes are offered. docs/profiles.md explains it.",
        "required": ["spec"],
        "x-kubernetes-validations": [name],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": _status(),
        },
    }


def _structural(schema: Mapping[str, Any], models: Mapping[str, Schema]) -> Schema:
    """*schema* of pydantic's as the API server takes it: without references, titles and nulls."""
    variants = schema.get("anyOf", [schema])
    [variant] = [variant for variant in variants if variant.get("type") != "null"]
    if "$ref" in variant:
        variant = models[variant["$ref"].rpartition("/")[2]]
    result: Schema = {key: variant[key] for key in _KEPT if key in variant}
    if isinstance(variant.get("type"), list):
        result = {"x-kubernetes-int-or-string": True}
    description = schema.get("description") or variant.get("description")
    if description:
        result["description"] = description.partition("\n")[0].replace("``", "`")
    if schema.get("default") is not None:
        result["default"] = {} if isinstance(schema["default"], dict) else schema["default"]
    if rules := list(_text_rules(variant)):
        result["x-kubernetes-validations"] = rules
    return result | _inner(variant, models)


def _inner(schema: Mapping[str, Any], models: Mapping[str, Schema]) -> Schema:
    """What *schema* says of the fields of an object, and of what is in a list or in a map."""
    inner: Schema = {}
    if "properties" in schema:
        inner["properties"] = {
            name: _structural(field, models) for name, field in schema["properties"].items()
        }
    for key in ("items", "additionalProperties"):
        if schema.get(key):
            inner[key] = _structural(schema[key], models)
    return inner


def _text_rules(schema: Mapping[str, Any]) -> Iterator[Schema]:
    """What a text, or every key of a map, has to match."""
    match schema:
        case {"matches": pattern, "otherwise": otherwise, "minimum": least, "maximum": most}:
            yield _rule(
                f"type(self) == int ? self >= {least} && self <= {most} : {_full(pattern)}",
                otherwise,
            )
        case {"matches": pattern, "otherwise": otherwise}:
            yield _rule(_full(pattern), otherwise)
        case {"propertyNames": {"matches": pattern, "otherwise": otherwise, "maxLength": longest}}:
            yield _rule(
                f"self.all(key, size(key) <= {longest} && {_full(pattern, 'key')})",
                f"a key {otherwise}",
            )


def _full(pattern: str, text: str = "self") -> str:
    return f"{text}.matches(r'^({pattern})$')"


def _entry_rules() -> list[Schema]:
    """Of an entry: fields without effect, and a default strategy that may not be chosen."""
    rules = []
    for number, no_effect in enumerate(validation.NO_EFFECT):
        for field in no_effect.fields:
            told_before = [
                f"!({_all(other.when)})"
                for other in validation.NO_EFFECT[:number]
                if {field, field.partition(".")[0]} & set(other.fields)
            ]
            wrong = " && ".join([_given(field), _all(no_effect.when), *told_before])
            rules.append({**_rule(f"!({wrong})", no_effect.text), "fieldPath": f".{field}"})
    strategy = "!has(self.strategies) || !has(self.defaultStrategy) || "
    rules.append(
        {
            "rule": f"{strategy}self.defaultStrategy in self.strategies",
            "messageExpression": "self.defaultStrategy + ' is not among strategies: ' + "
            "self.strategies.join(', ')",
            "fieldPath": ".defaultStrategy",
        }
    )
    return rules


def _only_the_last_selects_everything() -> Schema:
    return _rule(
        "size(self) == 0 || self.filter(entry, !has(entry.select)).size() == "
        "(has(self[size(self) - 1].select) ? 0 : 1)",
        "an entry without select holds for every GPU, so that those behind it are never reached; "
        "put it last",
    )


def _all(conditions: Sequence[Condition]) -> str:
    return " && ".join(map(_condition, conditions))


def _condition(condition: Condition) -> str:
    field, value = f"self.{condition.field}", json.dumps(condition.value).replace('"', "'")
    relations = {"is": f"{field} == {value}", "over": f"{field} > {value}"}
    relations["lacks"] = f"!({value} in {field})"
    text = _given(condition.field)
    if condition.relation != "given":
        text = f"{text} && {relations[condition.relation]}"
    return text if condition.holds else f"!({text})"


def _given(field: str) -> str:
    parts = field.split(".")
    return " && ".join(f"has(self.{'.'.join(parts[: number + 1])})" for number in range(len(parts)))


def _rule(rule: str, message: str) -> Schema:
    return {"rule": rule, "message": message}


def _status() -> Schema:
    text: Schema = {"type": "string"}
    condition = {
        "type": text,
        "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
        "reason": text,
        "message": text,
        "lastTransitionTime": {"type": "string", "format": "date-time"},
        "observedGeneration": _number("The generation that it is about."),
    }
    required = ["type", "status", "reason", "message", "lastTransitionTime"]
    return {
        "type": "object",
        "description": "How far the rollout is, as the controller has seen it.",
        "properties": {
            "observedGeneration": _number("The generation that all of this is about."),
            "currentRevision": {
                **text,
                "description": "The last revision that was rolled out everywhere.",
            },
            "updateRevision": {**text, "description": "The revision of the spec."},
            "nodes": _number("The nodes that the profile holds for."),
            "updated": _number("The nodes that have the update revision in force."),
            "pending": _number("The GPUs in use that follow when no claim holds them."),
            "failed": _number("The nodes that refused the update revision, or did not answer."),
            "updating": {
                "type": "array",
                "description": "The nodes that are being given the update revision.",
                "items": text,
                "x-kubernetes-list-type": "set",
            },
            "failures": {
                "type": "array",
                "description": "Nodes that failed, and why; the first ones.",
                "items": {
                    "type": "object",
                    "required": ["node", "reason"],
                    "properties": {"node": text, "reason": text},
                },
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["node"],
            },
            "conditions": {
                "type": "array",
                "description": "Complete, Progressing, Tied and SlowsScheduler.",
                "items": {"type": "object", "required": required, "properties": condition},
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
            },
        },
    }


def _number(description: str) -> Schema:
    return {"type": "integer", "format": "int64", "description": description}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the CRD, or say that it is stale. 1: it is."""
    return generated.update("hack/update-crd", __doc__, {CRD: crd()}, arguments)


if __name__ == "__main__":
    sys.exit(main())
