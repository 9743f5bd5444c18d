"""Whatever is created and removed, in whatever order: what was asked for exists, and no more."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dra_driver.base.errors import NodeError
from dra_driver.model.gpus import is_free
from tests.fakes.mig_node import MigNode, board

THEIRS = (("1g.10gb", 2), ("2g.20gb", 4))  # the second is not whole
MEDIA = "1g.10gb+me"  # there is one at most
PARTITIONS = [
    ("1g.10gb", 0),
    ("1g.10gb", 1),
    (MEDIA, 0),
    (MEDIA, 3),
    ("1g.10gb", 6),
    ("1g.20gb", 6),
    ("2g.20gb", 0),
    ("3g.40gb", 4),
    ("3g.40gb", 0),
    ("7g.80gb", 0),
]
STEPS = st.lists(st.tuples(st.booleans(), st.sampled_from(PARTITIONS)), max_size=12)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=STEPS, unmanaged=st.booleans())
def test_nothing_exists_that_was_not_asked_for_and_unmanaged_instances_stay(
    tmp_path, steps, unmanaged
):
    instances = [
        {"profile": name, "start": start, "compute": [1]} for name, start in THEIRS if unmanaged
    ]
    node = MigNode(tmp_path, board(mig=True, instances=instances))
    theirs = {node.key(*place) for place in THEIRS if unmanaged}
    ours = set()
    for create, partition in steps:
        key = node.key(*partition)
        if create:
            try:
                node.partitions.create(node.gpu, key)
            except NodeError:
                # It overlaps another one, or takes the engines that another one has.
                media = partition[0] == MEDIA and key.profile_id in [our.profile_id for our in ours]
                assert media or not is_free(key.placement, ours | theirs)
            else:
                ours.add(key)
        else:
            node.partitions.remove(node.gpu, key)
            ours.discard(key)
        state = node.dynamic
        whole = {instance.key for instance in state.instances}
        assert whole | {instance.key for instance in state.unusable} == ours | theirs
        assert ours <= whole
