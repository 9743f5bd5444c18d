"""What any DRA driver needs to speak with the kubelet and the scheduler; it knows nothing of GPUs.

* ``claims``: what we read from a ResourceClaim, as values; ``claim_reader`` fetches them.
* ``service``: kubelet gRPC in, one answer per claim out. ``plugin``, ``registration``,
  ``listener``, ``sockets``, ``liveness``: how the kubelet finds us, and goes on finding us.
* ``instances``, ``turns``: two processes during a rolling update, one of them in charge.
* ``slices``: which writes bring the API server from what it has to what we want (pure);
  ``slice_content``, ``slice_limits``: what counts as the same, and what the API server takes.
* ``publisher``: looks, decides with ``slices``, writes; again whenever somebody changed something.
* ``resource_api``, ``shapes``: ``resource.k8s.io`` in whichever version is served, v1 inside.

Another driver author could lift this package out, with ``dra_driver.cluster`` and
``dra_driver.base.errors``.
"""
