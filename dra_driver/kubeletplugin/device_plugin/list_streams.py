"""The kubelet's ListAndWatch calls for one resource: each is sent the list whenever it changes."""

import threading
from collections.abc import Callable, Iterator
from typing import Final

import grpc

from api.kubelet import device_plugin_v1beta1_pb2 as messages
from dra_driver.base.deadlines import Deadline
from dra_driver.kubeletplugin.device_plugin.device_list import DeviceList

MAX_STREAMS: Final = 4  # the kubelet has one; each keeps a thread
_LEAST_SECONDS: Final = 0.5  # between two lists: the kubelet writes its checkpoint after each
_END_SECONDS: Final = 1.0  # for a stream to end by itself: the kubelet may read nothing


class _ListStream:
    """One call of the kubelet."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self.context = context
        self.wake = threading.Event()
        self.ended = threading.Event()
        self.sent: bytes | None = None

    def end(self) -> None:
        self.ended.set()
        self.wake.set()


class ListStreams:
    """All streams of one resource.

    When any stream ends, the kubelet closes its newest connection for the resource, whatever that
    is, and takes all devices for unhealthy. So it knows of us only while no stream has ended.
    *on_change* is called when a stream begins, has sent a list, or ends.

    The kubelet asks for the options while it answers Register, and keeps them for five minutes
    after the last stream has ended. If they say that PreStartContainer is required, it starts no
    container meanwhile that asks for the resource and has none of its devices, also where the
    scheduler has made a claim for that. So where the list is empty they do not say so.
    """

    def __init__(self, devices: DeviceList, on_change: Callable[[], None]) -> None:
        self._devices = devices
        self._on_change = on_change
        self._condition = threading.Condition()
        self._streams: list[_ListStream] = []  # oldest first
        self._broken = False
        self._closed = False
        self._pre_start = True  # as the kubelet has it, perhaps from an earlier process

    @property
    def options(self) -> messages.DevicePluginOptions:
        """Those of the list as it is now."""
        return messages.DevicePluginOptions(
            pre_start_required=bool(self._devices.encoded()),
            get_preferred_allocation_available=True,
        )

    def tell_options(self) -> messages.DevicePluginOptions:
        """The kubelet asks for them."""
        options = self.options
        self._pre_start = options.pre_start_required
        return options

    def forget_options(self) -> None:
        """The kubelet is another one, which knows none yet."""
        self._pre_start = False

    @property
    def has_other_options(self) -> bool:
        """Whether the kubelet has other options than it would be told now."""
        return self._pre_start != self.options.pre_start_required

    @property
    def established(self) -> bool:
        """Whether the kubelet has a stream, and none has ended since ``end``."""
        return bool(self._streams) and not self._broken

    @property
    def broken(self) -> bool:
        """Whether a stream has ended since ``end``."""
        return self._broken

    @property
    def has_sent(self) -> bool:
        """Whether the newest stream was sent a list. Changes are on their way for half a second."""
        return self._newest_list() is not None

    @property
    def up_to_date(self) -> bool:
        """Whether the newest stream was sent the list as it is now."""
        return self._newest_list() == self._devices.encoded()

    def changed(self) -> None:
        """The list may be another one: have it sent. Never waits."""
        with self._condition:
            streams = tuple(self._streams)
        for stream in streams:
            stream.wake.set()

    def end(self, closing: bool = False) -> bool:
        """End all streams, and wait until they have; whether there were any.

        *closing*: those to come are refused.
        """
        with self._condition:
            self._closed = self._closed or closing
            streams = tuple(self._streams)
        for stream in streams:
            stream.end()
        if streams and not self._all_end():
            for stream in streams:
                stream.context.cancel()
            self._all_end()
        self._broken = False
        return bool(streams)

    def wait_for_stream(self, seconds: float) -> bool:
        """Whether there is a stream, or there is one before so many seconds are over."""
        with self._condition:
            return self._condition.wait_for(lambda: bool(self._streams), seconds)

    def serve(self, context: grpc.ServicerContext) -> Iterator[bytes]:
        """The lists for one call, until it ends."""
        stream = _ListStream(context)
        with self._condition:
            if not self._closed and len(self._streams) < MAX_STREAMS:
                self._streams.append(stream)
                self._condition.notify_all()
        if stream not in self._streams:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams, or it ends")
        try:
            if not context.add_callback(stream.end):
                stream.end()
            self._on_change()
            yield from self._lists(stream)
        finally:
            with self._condition:
                self._streams.remove(stream)
                self._broken = True
                self._condition.notify_all()
            self._on_change()

    def _lists(self, stream: _ListStream) -> Iterator[bytes]:
        while not stream.ended.is_set():
            stream.wake.clear()
            if stream.ended.is_set():  # between the two lines before
                return
            encoded = self._devices.encoded()
            if encoded and not self._pre_start:  # no device before PreStartContainer is required
                return
            if encoded == stream.sent:
                stream.wake.wait(self._devices.seconds_to_change())
                continue
            yield encoded
            stream.sent = encoded
            self._on_change()
            stream.ended.wait(_LEAST_SECONDS)

    def _newest_list(self) -> bytes | None:
        with self._condition:
            return self._streams[-1].sent if self._streams else None

    def _all_end(self) -> bool:
        deadline = Deadline(_END_SECONDS)
        with self._condition:
            return self._condition.wait_for(lambda: not self._streams, deadline.remaining)
