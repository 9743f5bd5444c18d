"""The API server: how to reach it, and one door to it. It knows nothing of GPUs or the kubelet.

* ``access``: a kubeconfig, or the pod's service account, as a value.
* ``client``: ``ApiServer(access)``; the only module that imports the Kubernetes client.
* ``attempts``: which requests are tried again, and when.
* ``watch``: the events of a watch, which another thread may end.
* ``refusals``: what an answer that is no success means, and what mends it.
"""
