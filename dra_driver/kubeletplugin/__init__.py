"""What any DRA driver needs to speak with the kubelet and the scheduler; it knows nothing of GPUs.

* ``claims``: what we read from a ResourceClaim, as values.
* ``service``: kubelet gRPC in, one answer per claim out. ``registration``, ``sockets``: how the kubelet finds us.
* ``handover``: two processes during a rolling update, one of them in charge.
* ``slices``: which writes bring the API server from what it has to what we want (pure); ``shapes``: API versions.
* ``publisher``: looks, decides with ``slices``, writes; again whenever somebody changed something.

Another driver author could lift this package out together with ``dra_driver.cluster`` and ``dra_driver.errors``.
"""
