"""What failed is tried again after a while, or once something is different."""

from dra_driver.plugin.tries import Tries


def test_what_failed_rests_for_a_while():
    now = [0.0]
    tries = Tries(60.0, lambda: now[0])
    tries.failed("gpu-0", "facts", "in use")

    assert tries.why_not("gpu-0", "facts") == "in use"
    assert tries.why_not("gpu-1", "facts") == ""
    now[0] = 59.9
    assert tries.why_not("gpu-0", "facts") == "in use"
    now[0] = 60.0
    assert tries.why_not("gpu-0", "facts") == ""


def test_with_other_facts_it_is_tried_at_once():
    tries = Tries(60.0, lambda: 0.0)
    tries.failed("gpu-0", "facts", "in use")

    assert tries.why_not("gpu-0", "others") == ""
    assert tries.why_not("gpu-0", "facts") == ""  # by then it was tried
