"""What containers use is asked once, about all that are new, and remembered."""

import math

import pytest

from dra_driver.kubeletplugin.claims import ClaimUid, PodUid
from dra_driver.node.container_claims import ContainerClaims, PodClaims

A, B, C = ClaimUid("a"), ClaimUid("b"), ClaimUid("c")
POD = PodClaims(PodUid("pod"), frozenset({A, B}))


class Kubelet:
    """Knows what containers use, and what it was asked."""

    def __init__(self, **uses):
        self.uses = {(POD.pod, name): frozenset(claims) for name, claims in uses.items()}
        self.asked = []
        self.now = 0.0
        self.claims = ContainerClaims(self.ask, lambda: self.now)

    def ask(self, containers):
        self.asked.append([container for _, container in containers])
        return {one: self.uses[one] for one in containers if one in self.uses}

    def learn(self, *containers, pod=POD):
        self.claims.learn(dict.fromkeys(containers, pod))

    def used(self, container, *claims):
        return set(self.claims.used(container, claims or (A, B)))


def test_all_that_are_new_are_asked_about_at_once_and_never_again():
    kubelet = Kubelet(one=[A], two=[B], three=[A, B])
    kubelet.learn("one", "two")
    kubelet.now = 3600.0
    kubelet.learn("one", "two")
    kubelet.learn("one", "two", "three")
    assert kubelet.asked == [["one", "two"], ["three"]]
    assert [kubelet.used(name) for name in ("one", "two", "three")] == [{A}, {B}, {A, B}]
    assert kubelet.claims.ask_at == math.inf


def test_a_container_that_is_known_to_use_nothing_is_not_asked_about_again():
    kubelet = Kubelet(none=[])
    kubelet.learn("none")
    kubelet.now = 3600.0
    kubelet.learn("none")
    assert kubelet.asked == [["none"]]
    assert kubelet.used("none") == set()


def test_what_cannot_be_told_is_asked_again_later():
    kubelet = Kubelet()
    kubelet.learn("one")
    kubelet.now = 29.9
    kubelet.learn("one")
    assert kubelet.asked == [["one"]]
    assert kubelet.claims.ask_at == 30.0
    kubelet.uses[POD.pod, "one"] = frozenset({A})
    kubelet.now = 30.0
    kubelet.learn("one")
    assert kubelet.used("one") == {A}


def test_only_what_it_is_about_is_told():
    kubelet = Kubelet(one=[A, C])
    kubelet.learn("one")
    assert kubelet.used("one", A) == {A}
    assert kubelet.used("one", B) == set()
    assert kubelet.used("stranger", A) == set()


@pytest.mark.parametrize("claims", [[A, B, C], [C]])
def test_nothing_is_known_of_claims_that_the_pod_got_since(claims):
    kubelet = Kubelet(one=[A, C])
    kubelet.learn("one")
    assert kubelet.used("one", *claims) == set()
    kubelet.learn("one", pod=PodClaims(POD.pod, frozenset({A, B, C})))
    assert kubelet.used("one", *claims) == {A, C} & set(claims)
    assert kubelet.asked == [["one"], ["one"]]


def test_containers_that_went_are_forgotten():
    kubelet = Kubelet(one=[A])
    kubelet.learn("one")
    kubelet.learn()
    assert kubelet.used("one") == set()
