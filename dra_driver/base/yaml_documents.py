"""YAML that administrators write: read strictly, and in a time that its length bounds."""

from typing import Any

import yaml

# What PyYAML raises besides its own error, of tags (!!bool 7), dates and very long numbers.
_VALUE_ERRORS = (ValueError, ArithmeticError, LookupError, AttributeError, TypeError)


_MAX_ALIASED_NODES = 10_000  # nodes that aliases stand for; nine lines can stand for a billion


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that is there twice: which of them counts is nothing to guess. Refuses aliases
    that stand for more than anybody means, or for what they are in."""

    def __init__(self, content: str | bytes) -> None:
        super().__init__(content)
        self.name = "this file"  # so it is called in errors, which stand behind its path
        self._seen = 0  # nodes, those counted again that an alias stands for
        self._repeated = 0
        self._sizes: dict[yaml.Node | None, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        is_alias, before = self.check_event(yaml.AliasEvent), self._seen
        node = super().compose_node(parent, index)
        if not is_alias:
            self._seen += 1
            self._sizes[node] = self._seen - before
        elif node in self._sizes:
            self._seen += self._sizes[node]
            self._repeated += self._sizes[node]
        else:
            raise _yaml_error("an alias stands for what it is in", node)
        if self._repeated > _MAX_ALIASED_NODES:
            raise _yaml_error(f"aliases stand for more than {_MAX_ALIASED_NODES} values", node)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in keys:
                raise _yaml_error(f"{key.value!r} is there twice", key)
            keys.add(key.value)
        return super().construct_mapping(node, deep)


def _yaml_error(problem: str, node: yaml.Node | None) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(None, None, problem, node.start_mark if node else None)


def load_documents(content: str | bytes) -> list[Any]:
    """All documents in *content*. ValueError: the reason, in one line, why it cannot be read."""
    try:
        return list(yaml.load_all(content, _StrictLoader))
    except yaml.YAMLError as e:
        raise ValueError(" ".join(str(e).split())) from e
    except RecursionError as e:
        raise ValueError("is nested too deeply") from e
    except _VALUE_ERRORS as e:
        why = str(e).partition(";")[0]  # of long numbers: what a programmer could do besides
        raise ValueError(f"has a value that is no YAML: {why}") from e


def load_document(content: str | bytes) -> Any:
    """The one document in *content*; None: it is empty. ValueError: as ``load_documents``."""
    documents = load_documents(content)
    if len(documents) > 1:
        raise ValueError(f"has {len(documents)} documents; write one")
    return documents[0] if documents else None
