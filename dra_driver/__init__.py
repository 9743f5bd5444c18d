"""A Dynamic Resource Allocation driver for NVIDIA GPUs. This is the map.

``dra-driver kubelet-plugin`` runs on every node with GPUs. It does four things:

*Publish.* ``plugin.publish.loops`` looks at the node (``node.inventory.gpus``, through
``node.nvml.client``),
``plan.offer.devices`` says what is offered of each GPU, and in which shape (``plan.offer.shapes``;
by the node's
profile, ``plugin.publish.profiles``), ``plan.offer.publish`` how the scheduler should see it, and
``kubeletplugin.slices.publisher`` keeps the ResourceSlices so.

*Prepare.* One claim, from gRPC request to CDI file:

1. ``kubeletplugin.serve.services``     one answer per claim; a bad claim never fails its neighbours
2. ``plugin.claims.preparer``            the order of effects; recovers what a crash cut short
3. ``k8s.claims`` reads the claim, live
4. ``plan.prepare.claim``              decides or refuses, before anything is touched
(``plan.prepare.sharing``,
                                 ``plan.prepare.sharing``, ``plan.prepare.amounts``,
                                 ``plan.mps.namespaces``)
5. ``node.state.ledger``               records *started*: from here on a crash can be undone
6. ``node.gpu_node``                 carries out the steps (``node.driver.time_slices``,
                                 ``node.memory.limits``, ``node.nvml.compute_modes``, ``node.mig``,
                                 ``node.mps.agent_client``)
7. ``plan.prepare.cdi_spec``                what the container gets, as a ``cdi.Spec``
(``plan.prepare.cdi_spec``);
                                 ``node.state.claim_files``
8. ``node.state.ledger``               records *completed*; the kubelet gets the CDI names

Unprepare is the same road back (``plan.prepare.claim``), not while a process of the claim's pods
uses it
(``plugin.claims.in_use``; which ones do, ``plan.prepare.claim_users`` says; for their end
``plugin.claims.in_use`` waits). ``plugin.claims.reconciler`` looks after claims that the kubelet
forgot.

*Cut.* Where a profile says so, a GPU is offered in partitions of MIG besides: ``plan.mig.dynamic``
says when, ``plan.mig.partitions`` which, ``plan.mig.counters`` what keeps them apart for the
scheduler,
``plan.mig.claims`` what a claim does to the GPU, and ``node.mig`` does it. ``plugin.mig`` sees to
GPUs that are cut by a named layout, and to those that have to be switched before a claim comes.
Words: ``model.gpus``.

*Enforce.* ``plugin.memory.start``: claims use no more memory than they were given. The GPU's driver
limits pods where it can (``plugin.memory.pod_limits``); ``plugin.memory.guard`` looks at what
processes use. Who
uses a claim, and how that is known: ``plan.prepare.claim_users``.
``plugin.mps.watch``: what a claim has of MPS goes on as it was granted.
``plugin.mig.lost_instances``
tells pods whose MIG instance somebody removed.

``dra-driver mps-agent`` runs beside the plugin and outlives it: ``agent.service`` is asked by the
plugin (``node.mps.agent_client``), ``agent.supervisor`` keeps a server of CUDA's Multi-Process
Service for
each GPU that claims share by MPS, and ``node.mps.daemons`` runs them. Its words are in
``model.mps``.

Words: a *Claim* was allocated *Devices* of what the node *Offers*; a *Plan* lists the *Steps* that
make them usable; a *Spec* is what the container sees; the *Ledger* remembers; *Slices* are
published.

Layers, checked by a machine (``pyproject.toml``): ``cli``, ``plugin`` and ``agent`` connect;
``process`` is what every process has; ``plan`` decides (no input, no output, no clock); ``node``
acts on this machine; ``model`` holds the values;
``kubeletplugin`` and ``cluster`` know Kubernetes but no GPU. ``api`` and ``cdi`` are words shared
with users, Kubernetes and container runtimes.
"""
