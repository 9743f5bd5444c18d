"""What any DRA driver needs to work with the kubelet and the scheduler; it knows nothing of GPUs.

* ``serve``: the sockets and gRPC services that the kubelet calls, and rolling updates.
* ``device_plugin``: the same by the device-plugin API, where devices are asked for by a number.
* ``slices``: which ResourceSlices the node has, and the publisher that keeps them so.
* ``device_metadata``: the documents that containers read about their devices.

Another driver's author could lift this package out, with ``dra_driver.k8s`` and
``dra_driver.base``.
"""
