"""Partitions of GPUs, decided before anything is cut.

What is offered:

* ``rules``: what a profile says of partitions;
* ``cutting``: whether a GPU is cut for claims, by its rules, its mode and what claims hold;
* ``offered``: the partitions of one GPU, those that exist and those that are cut for claims;
* ``devices``: these as devices, each in its shape;
* ``order``: in which order they are tried;
* ``capacity``: what each has beside its memory;
* ``blocks``, ``engines``: the counters that keep them apart;
* ``warnings``: what of the rules has no effect, and what is not offered;
* ``switches``: the boards that are switched to MIG mode beforehand.

What claims do:

* ``claims``: partitions are cut for the first claim that holds them, and go with the last;
* ``gone``: what is told of instances that prepared claims had, and that are there no more.

Named layouts:

* ``layouts``: which there are, and what each says of a GPU;
* ``placing``: where their partitions go;
* ``identity``: which instances layouts have made;
* ``changes``: what has to be done to a GPU so that it looks like its layout;
* ``previews``: what it looks like then;
* ``news``: what is told of the node, once;
* ``governed``: GPUs with a layout are not cut for claims besides.
"""
