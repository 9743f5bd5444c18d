"""A Dynamic Resource Allocation driver for NVIDIA GPUs. This is the map.

``dra-driver kubelet-plugin`` runs on every node with GPUs. It does four things:

*Publish.* ``plugin.rounds`` looks at the node (``node.gpus``, through ``node.nvml``),
``plan.offer`` says what is offered of each GPU, and in which shape (``plan.shapes``; by the node's
profile, ``plugin.profile_choice``), ``plan.publish`` how the scheduler should see it, and
``kubeletplugin.publisher`` keeps the ResourceSlices so.

*Prepare.* One claim, from gRPC request to CDI file:

1. ``kubeletplugin.service``     one answer per claim; a bad claim never fails its neighbours
2. ``plugin.prepare``            the order of effects; recovers what a crash cut short
3. ``kubeletplugin.claim_reader`` reads the claim, live
4. ``plan.prepare``              decides or refuses, before anything is touched (``plan.configs``,
                                 ``plan.sharing``, ``plan.amounts``, ``plan.mps``)
5. ``node.ledger``               records *started*: from here on a crash can be undone
6. ``node.node``                 carries out the steps (``node.time_slices``,
                                 ``node.memory_limits``, ``node.compute_modes``, ``node.mig``,
                                 ``node.mps.agent``)
7. ``plan.edits``                what the container gets, as a ``cdi.Spec`` (``plan.mps_edits``);
                                 ``node.claim_files``
8. ``node.ledger``               records *completed*; the kubelet gets the CDI names

Unprepare is the same road back (``plan.undo``), not while a process of the claim's pods uses it
(``plugin.claim_users``; which ones do, ``plan.claim_users`` says; for their end
``plugin.ended_claims`` waits). ``plugin.reconcile`` looks after claims that the kubelet forgot.

*Cut.* Where a profile says so, a GPU is offered in partitions of MIG besides: ``plan.mig.cutting``
says when, ``plan.mig.offered`` which, ``plan.mig.blocks`` what keeps them apart for the scheduler,
``plan.mig.claims`` what a claim does to the GPU, and ``node.mig`` does it. ``plugin.mig`` sees to
GPUs that are cut by a named layout, and to those that have to be switched before a claim comes.
Words: ``model.mig``.

*Enforce.* ``plugin.enforcement``: claims use no more memory than they were given. The GPU's driver
limits pods where it can (``plugin.pod_limits``); ``plugin.guard`` looks at what processes use. Who
uses a claim, and how that is known: ``plan.claim_pods``.
``plugin.mps_watch``: what a claim has of MPS goes on as it was granted. ``plugin.gone_instances``
tells pods whose MIG instance somebody removed.

``dra-driver mps-agent`` runs beside the plugin and outlives it: ``agent.service`` is asked by the
plugin (``node.mps.agent``), ``agent.supervisor`` keeps a server of CUDA's Multi-Process Service for
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
