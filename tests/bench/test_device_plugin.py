"""What the benchmark of the device-plugin API reads in the plugin's log."""

import json

from hack.benchmark.device_plugin import call_seconds

LOG = [
    json.dumps({"message": "devices given", "method": "Allocate", "seconds": 0.004}),
    "a library of C complains",
    json.dumps({"message": "devices given", "method": "PreStartContainer", "seconds": 0.02}),
    json.dumps({"message": "devices not given: why", "method": "Allocate"}),
    json.dumps({"message": "devices given", "method": "Allocate", "seconds": 0.003}),
]


def test_calls_that_gave_devices_are_counted_by_their_method():
    log = "\n".join(LOG)

    assert list(call_seconds(log, "Allocate")) == [0.004, 0.003]
    assert list(call_seconds(log, "PreStartContainer")) == [0.02]
