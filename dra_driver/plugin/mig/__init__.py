"""GPUs are cut as layouts say, and boards switched, before claims come. This is the map.

``keeper``         one look after another: what is wanted, what is done, what is told of it
``wishes``         what each GPU should look like: by the label of the Node, else by the profile
``layouts``        one GPU becomes what its layout says, or stays what it is
``boards``         boards that need a reset for it are switched while their profile cuts them
``work``           the changes, so that no crash leaves one half done (``node.state.mig_state``)
``idle``           nothing is done to a GPU that a claim has or a process uses
``failures``       what failed is not tried again at once
``state``          the label of the Node that says how far it is; events tell the rest
``governed``       what layouts govern is not cut for claims
``start``          connects them; a thread of its own, so that nobody waits for a board

Layouts come from files (``plugin.mig.desired_layouts``), else from the boards
(``plan.mig.manager.layouts``).
"""
