"""The reference pages in docs/reference, written from the code that they describe."""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from pydantic.alias_generators import to_camel

from api.node_profile import HealthEffectsConfig, NodeProfile, NodeProfileObjectSpec
from dra_driver.__main__ import command_line
from dra_driver.agent.metrics import metrics_registry
from dra_driver.controller.metrics import ControllerMetrics
from dra_driver.model.mps import MpsStatus
from dra_driver.plan.health.problems import OTHER_XID, PROBLEMS, XIDS, XidEntry
from dra_driver.plugin.metrics import HealthMetrics, Metrics, MpsMetrics
from hack import generated

REFERENCE = generated.REPOSITORY / "docs/reference"
VALUES = generated.REPOSITORY / "deploy/helm/dra-driver-gpu/values.yaml"
NVIDIA_VALUES = generated.REPOSITORY / "deploy/helm/dra-driver-gpu/nvidia-values.yaml"
LONGEST_DEFAULT = 60  # characters of a chart value that are shown

_HELP = re.compile(
    r"(?P<meaning>.*?) \((?:\$(?P<variable>\w+))?(?:, )?(?:default (?P<default>.+))?\)"
)
_DEFAULT = re.compile(r"(?P<meaning>.*) Default: (?P<default>.+)\.")

Row = tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or say which are stale. 1: there are stale ones, printed."""
    return generated.update("hack/update-docs", __doc__, files(), arguments)


def files() -> Mapping[Path, str]:
    """Every page by its path."""
    return {REFERENCE / name: text for name, text in pages().items()}


def pages() -> Mapping[str, str]:
    """Every page by its file name."""
    return {
        "profile.md": _page(
            "Profile fields",
            "The fields below `spec.gpus[]` of a `NodeProfile` ([Profiles](../profiles.md)), in a "
            "file and in an object of the API server. Files may write words in any case, and "
            "`mig: Dynamic` for `mig: {mode: Dynamic}`. In a manifest for kubectl, write `Off` in "
            'quotes: `"Off"`.',
            _table(("field", "value", "default", "meaning"), profile_rows()),
            "The fields below `spec` that a file has, too:",
            _table(("field", "value", "default", "meaning"), spec_rows()),
            "The fields below `spec` that only an object has:",
            _table(("field", "value", "default", "meaning"), object_rows()),
        ),
        "health.md": _page(
            "Problems of GPUs",
            "What the driver watches of GPUs, and what it does by default "
            "([Health](../health.md)). The field of the profile is below "
            "`spec.gpus[].health.effects`. The problem lasts until a look at the GPU says that it "
            "is over, or, where *until* says so, until the GPU is reset. A reboot of the node and "
            "an administrator end it, too.",
            _table(
                ("problem", "field", "effect", "until", "meaning", "what to do", "source"),
                problem_rows(),
            ),
            "An Xid is an error number of NVIDIA's driver. A number that is not listed has the "
            f"effect `{OTHER_XID.effect}`. `spec.gpus[].health.xids` of a profile changes what "
            "follows from a number.",
            _table(("Xid", "effect", "meaning", "what to do"), xid_rows()),
        ),
        "metrics.md": _page(
            "Metrics",
            "What the kubelet plugin, the MPS agent and the controller serve at `/metrics` "
            "([Operate](../operate.md)), beside the usual `process_…` and `python_…`.",
            _table(("metric", "type", "from", "meaning"), metric_rows()),
        ),
        "command-line.md": _page(
            "Command line",
            "The commands and flags of `dra-driver` ([Operate](../operate.md)). A flag overrides "
            "its environment variable.",
            _table(("command", "what it does"), command_rows()),
            _table(("flag", "variable", "default", "commands", "meaning"), flag_rows()),
        ),
        "chart-values.md": _page(
            "Chart values",
            "The values of the Helm chart ([Install](../install.md)), from "
            "[values.yaml](../../deploy/helm/dra-driver-gpu/values.yaml). A name or a type that "
            "the chart does not know is refused.",
            _table(("value", "default", "when to change it"), value_rows(VALUES.read_text())),
        ),
        "nvidia-chart-values.md": _page(
            "Values of NVIDIA's chart",
            "What the values of the Helm chart of NVIDIA's DRA driver are in this one "
            "([Chart values](chart-values.md)). `helm install` refuses a values file that was "
            "written for that chart, and says for each value in it what stands here.",
            _table(("value of NVIDIA's chart", "here"), nvidia_value_rows()),
        ),
    }


def profile_rows() -> list[Row]:
    """A row for each field below ``spec.gpus[]``, nested ones with their path."""
    schema = NodeProfile.model_json_schema()
    return list(_field_rows(schema["$defs"]["GpuRules"], schema["$defs"], ""))


def spec_rows() -> list[Row]:
    """A row for each field beside ``spec.gpus`` that files and objects have."""
    models = NodeProfile.model_json_schema()["$defs"]
    fields = dict(models["NodeProfileSpec"]["properties"])
    del fields["gpus"]
    return list(_field_rows({"properties": fields}, models, ""))


def object_rows() -> list[Row]:
    """A row for each field below ``spec`` that a file has not."""
    schema = NodeProfileObjectSpec.model_json_schema()
    for field in NodeProfile.model_json_schema()["$defs"]["NodeProfileSpec"]["properties"]:
        del schema["properties"][field]
    return list(_field_rows(schema, schema["$defs"], ""))


def _field_rows(model: Mapping[str, Any], models: Mapping[str, Any], path: str) -> Iterator[Row]:
    for name, field in model["properties"].items():
        reference = next(
            (variant["$ref"] for variant in _variants(field) if "$ref" in variant), None
        )
        if reference:
            nested = models[reference.rpartition("/")[2]]
            yield from _field_rows(nested, models, f"{path}{name}.")
            continue
        match = _DEFAULT.fullmatch(field["description"])
        meaning = match["meaning"] if match else field["description"]
        yield f"`{path}{name}`", _value(field), match["default"] if match else "", meaning


def _variants(field: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a field can be, but null."""
    variants = field.get("anyOf") or field.get("allOf") or [field]
    return [variant for variant in variants if variant.get("type") != "null"]


def _value(field: Mapping[str, Any]) -> str:
    """The values that a field takes, in words."""
    [variant] = _variants(field)
    if "enum" in variant:
        return ", ".join(f"`{word}`" for word in variant["enum"])
    match variant["type"]:
        case "array" if "enum" in variant["items"]:
            return f"list of {_value(variant['items'])}"
        case "array":
            return f"list of {_value(variant['items'])}s"
        case "object":
            key = variant["propertyNames"]["format"]
            return f"{_value(variant['additionalProperties'])}, by {key}"
        case "integer" if "maximum" in variant:
            return f"{variant['minimum']} to {variant['maximum']}"
        case "integer":
            return "number"
        case "boolean":
            return "`true`, `false`"
        case _:
            return str(variant.get("format", "text"))


def problem_rows() -> list[Row]:
    """A row for each problem that a GPU can have."""
    fields = {field.replace("_", "-"): field for field in HealthEffectsConfig.model_fields}
    return [
        (
            f"`{problem}`",
            f"`{to_camel(fields[problem])}`" if problem in fields else "",
            f"`{entry.effect}`",
            "a reset" if entry.lasts else "it is over",
            entry.meaning,
            entry.action,
            entry.source,
        )
        for problem, entry in PROBLEMS.items()
    ]


def xid_rows() -> list[Row]:
    """A row for all Xids of which the same is said."""
    numbers: dict[XidEntry, list[int]] = {}
    for number, entry in sorted(XIDS.items()):
        numbers.setdefault(entry, []).append(number)
    return [
        (", ".join(map(str, same)), f"`{entry.effect}`", entry.meaning, entry.action)
        for entry, same in numbers.items()
    ]


def metric_rows() -> list[Row]:
    """A row for each metric of ours, by process."""
    metrics = Metrics()
    MpsMetrics(metrics)
    HealthMetrics(metrics)
    plugin = metrics.registry
    agent = metrics_registry(MpsStatus)
    controller = ControllerMetrics().registry
    return [
        *_metric_rows(plugin, "plugin"),
        *_metric_rows(agent, "agent"),
        *_metric_rows(controller, "controller"),
    ]


def _metric_rows(registry: CollectorRegistry, origin: str) -> Iterator[Row]:
    labels = {
        collector._name: collector._labelnames
        for collector in registry._collector_to_names
        if isinstance(collector, MetricWrapperBase)
    }
    for family in registry.collect():
        if not family.name.startswith("dra_driver_"):
            continue
        named = labels.get(family.name) or getattr(family, "_labelnames", ())
        named = named or tuple(
            dict.fromkeys(label for sample in family.samples for label in sample.labels)
        )
        name = family.name + ("_total" if family.type == "counter" else "")
        shown = name + (f"{{{', '.join(named)}}}" if named else "")
        yield f"`{shown}`", family.type, origin, family.documentation


def command_rows() -> list[Row]:
    """A row for each command, with its arguments."""
    return [
        (f"`{' '.join([command, *_arguments(parser)])}`", meaning)
        for command, (parser, meaning) in _commands(command_line()).items()
    ]


def flag_rows() -> list[Row]:
    """A row for each flag and meaning, with the commands that have it."""
    commands: dict[Row, list[str]] = {}
    for command, (parser, _) in _commands(command_line()).items():
        for action in parser._actions:
            if action.option_strings and not isinstance(action, argparse._HelpAction):
                commands.setdefault(_flag(action), []).append(f"`{command}`")
    return [
        (flag, variable, default, ", ".join(names), meaning)
        for (flag, variable, default, meaning), names in commands.items()
    ]


def _commands(
    parser: argparse.ArgumentParser, path: Row = ()
) -> Mapping[str, tuple[argparse.ArgumentParser, str]]:
    """The parser and the meaning of each command, by its words; those of a group one by one."""
    found: dict[str, tuple[argparse.ArgumentParser, str]] = {}
    for group in parser._actions:
        if not isinstance(group, argparse._SubParsersAction):
            continue
        for entry in group._choices_actions:
            words = (*path, entry.dest)
            command = group.choices[entry.dest]
            found |= _commands(command, words) or {" ".join(words): (command, entry.help or "")}
    return found


def _arguments(parser: argparse.ArgumentParser) -> list[str]:
    """What follows the command's words."""
    return [str(action.metavar) for action in parser._actions if not action.option_strings]


def _flag(action: argparse.Action) -> Row:
    values = "|".join(action.choices) if action.choices else action.metavar
    flag = ", ".join(action.option_strings) + (f" {values}" if values else "")
    shown = f"`{flag}`".replace("|", "\\|")
    match = _HELP.fullmatch(action.help or "")
    if match is None:
        return shown, "", "", action.help or ""
    return shown, _code(match["variable"]), _code(match["default"]), match["meaning"]


def _code(text: str | None) -> str:
    return f"`{text}`" if text else ""


def value_rows(text: str) -> list[Row]:
    """A row for each value of a values.yaml that a comment stands above, with its path."""
    values = yaml.safe_load(text)
    rows: list[Row] = []
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        match = re.match(r"( *)([A-Za-z]+):", line)
        if line.lstrip().startswith("#"):
            comment.append(line.strip("# "))
        elif match:
            path[len(match[1]) // 2 :] = [match[2]]
            if comment:
                rows.append((f"`{'.'.join(path)}`", _shown(values, path), " ".join(comment)))
            comment = []
        else:
            comment = []
    return rows


def nvidia_value_rows() -> list[Row]:
    """A row for each value of the chart of NVIDIA's DRA driver."""
    values = yaml.safe_load(NVIDIA_VALUES.read_text())
    return [(f"`{value['value']}`", value["here"]) for value in values]


def _shown(values: Any, path: Iterable[str]) -> str:
    for key in path:
        values = values[key]
    text = yaml.safe_dump(values, default_flow_style=True, width=1000).removesuffix("...\n").strip()
    return f"`{text}`" if len(text) <= LONGEST_DEFAULT else ""


def _page(title: str, opening: str, *tables: str) -> str:
    note = "This page is written by `hack/update-docs`. Change the code, not the page."
    return "\n\n".join([f"# {title}", opening, note, *tables]) + "\n"


def _table(heads: Row, rows: Sequence[Row]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join("|".join(["", *map(_cell, cells), ""]) for cells in lines)


def _cell(text: str) -> str:
    """*text* as Markdown, with no tags outside of code."""
    parts = text.split("`")
    parts[::2] = [part.replace("<", "\\<") for part in parts[::2]]
    return f" {'`'.join(parts)} " if text else " "


if __name__ == "__main__":
    sys.exit(main())
