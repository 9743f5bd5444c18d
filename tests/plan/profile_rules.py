"""Rules of profiles as hypothesis makes them up."""

from hypothesis import strategies as st

from dra_driver.model.profiles import Rules, SharingStrategy

_MIB = 1024 * 1024


@st.composite
def any_rules(draw: st.DrawFn) -> Rules:
    """Everything that a profile can say of what is published."""
    allowed = draw(st.lists(st.sampled_from(SharingStrategy), min_size=1, unique=True))
    return draw(
        st.builds(
            Rules,
            fractions=st.booleans(),
            replicas=st.integers(1, 8) | st.integers(1, 200),
            rename=st.booleans(),
            limited=st.booleans(),
            shares=st.none() | st.integers(1, 100),
            memory_least=st.integers(1, 100 * 1024).map(lambda mib: mib * _MIB),
            memory_step=st.integers(1, 1024).map(lambda mib: mib * _MIB),
            strategies=st.just(tuple(allowed)),
            default_strategy=st.sampled_from(allowed),
        )
    )
