"""Resources of the device-plugin API: nodes on which pods ask for devices by a name and a number.

Kubernetes has it since 1.10 (``k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1``).

* ``resources``: its values, and what has to be given to ``server``.
* ``server``: all resources of a node; what is offered, withdrawn, and not yet known to the kubelet.
* ``endpoint``: one resource: its sockets, and when it is registered.
* ``service``: the gRPC calls for one resource; ``list_streams`` and ``device_list`` are behind its
  ListAndWatch.
* ``checkpoint``: which container has which devices, as the kubelet wrote it down.
"""
