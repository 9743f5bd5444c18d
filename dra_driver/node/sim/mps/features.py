"""What a daemon of protocol 3 can switch: memory accounting and the sharing of contexts."""

from dra_driver.node.sim.mps.options import Words, boolean
from dra_driver.node.sim.mps.refusals import Refused


class Features:
    """Both are on at first, and the audit log is off."""

    def __init__(self) -> None:
        self._on = {"memacct": True, "context-share": True}
        self._audit_log = False

    def enable(self, words: Words) -> str:
        self._on[self._known(words)] = True
        return ""

    def disable(self, words: Words) -> str:
        self._on[self._known(words)] = False
        return ""

    def describe(self, words: Words) -> str:
        name = self._known(words)
        return f"{name}: {'enabled' if self._on[name] else 'disabled'}"

    def set_accounting(self, words: Words) -> str:
        words.allow(1)
        key, _, value = words.need(0, "audit_log=true|false").partition("=")
        if key != "audit_log":
            raise Refused(f"Unknown setting '{key}'")
        self._audit_log = boolean(value)
        return ""

    def describe_accounting(self, words: Words) -> str:
        words.allow(0)
        on = "enabled" if self._on["memacct"] else "disabled"
        return f"memacct: {on}\naudit_log: {str(self._audit_log).lower()}"

    def _known(self, words: Words) -> str:
        words.allow(1)
        name = words.need(0, "feature")
        if name not in self._on:
            raise Refused(f"Unknown feature '{name}'; there are context-share, memacct")
        return name
