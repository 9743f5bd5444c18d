"""The API that gives this node's GPUs out now, for everybody who serves or uses one."""

import threading
from collections.abc import Callable

from dra_driver.model.profiles import AllocationApi
from dra_driver.plan.node_api import ApiChoice, ApiState, api_state


class NodeApi:
    """Knows the choice. Any thread may read it; one thread changes it."""

    def __init__(self) -> None:
        self._choice = ApiChoice()
        self._known = threading.Event()
        # Called in the thread that changes the choice, in their order, when an API is in another
        # state. What one raises is logged, and all are called again soon: they do what is missing.
        # Who comes later looks by himself once he is among them.
        self.listeners: list[Callable[[], None]] = []

    @property
    def choice(self) -> ApiChoice:
        return self._choice

    @property
    def serving(self) -> AllocationApi | None:
        """None: it is not known yet; nothing is given out."""
        return self._choice.serving

    def wait(self, seconds: float) -> AllocationApi | None:
        """As ``serving``; waits for at most so long until it is known for the first time."""
        self._known.wait(seconds)
        return self.serving

    def state(self, api: AllocationApi) -> ApiState:
        """What becomes of *api*, ``DRA`` or ``DEVICE_PLUGIN``."""
        return api_state(self._choice, api)

    def refusal(self, api: AllocationApi) -> str | None:
        """Why nothing more is given out by *api* now; None: it is."""
        choice = self._choice
        if self.state(api) is ApiState.ON:
            return None
        if choice.other_plugin:
            return choice.other_plugin
        if choice.serving is None:
            return f"it is not known yet by which API this node gives GPUs out: {choice.why}"
        if choice.serving is api:
            return f"this node is about to give its GPUs out by {choice.wanted}: {choice.why}"
        return f"this node gives its GPUs out by {choice.serving}: {choice.why}"

    def set(self, choice: ApiChoice) -> bool:
        """From now on *choice* holds. Whether an API is in another state now."""
        before, self._choice = self._choice, choice
        if choice.serving is not None:
            self._known.set()
        apis = (AllocationApi.DRA, AllocationApi.DEVICE_PLUGIN)
        return any(api_state(before, api) is not api_state(choice, api) for api in apis)
