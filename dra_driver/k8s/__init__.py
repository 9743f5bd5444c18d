"""The API server: one client for it, and its objects as values. Nothing here knows GPUs.

* ``access``: a kubeconfig, or the pod's service account, as a value.
* ``client``: the requests; ``api``: what others use of it. No other module but ``leader`` imports
  the Kubernetes client.
* ``responses``: what responses and errors of the API server mean.
* ``watch``: one watch, and the Watcher that follows objects whatever happens.
* ``collection``: all objects of a kind, followed; of each only what is kept.
* ``leader``: which of several processes leads.
* ``events``, ``node_labels``, ``pods``, ``claims``: what the driver reads and writes.
* ``resource_api``, ``resource_versions``: ``resource.k8s.io`` in the served version, v1 inside.
* ``quantity``: quantities like ``1.5Gi``.
"""
