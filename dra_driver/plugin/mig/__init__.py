"""Partitions GPUs as layouts say, and switches MIG modes, before claims come.

``start``            connects all of it and runs it on a thread of its own
``reconciler``       one look after another: what is desired, what is done, what is reported
``desired_layouts``  what each GPU should look like: by the label of the Node, else by the profile
``apply``            one GPU gets its layout, or its MIG mode, or stays as it is
``repartition``      the changes of one GPU; after a crash they go on (``node.state.mig_state``)
``idle_gpus``        nothing is done to a GPU that a claim holds or a process uses
``state_label``      the label of the Node that says how far the layouts are; events say the rest
``lost_instances``   claims whose MIG instance somebody removed

The pure decisions are in ``plan.mig.manager``, which does what NVIDIA's MIG manager does.
"""
