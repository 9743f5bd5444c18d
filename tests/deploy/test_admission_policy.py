"""The admission policy on configurations is written from their models, and prepare agrees with it.

What the API server makes of it: tests/e2e/test_admission.py.
"""

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from api.strict import StrictModel
from dra_driver.base.errors import ClaimError
from dra_driver.k8s.claims import OpaqueConfig
from dra_driver.plan.prepare.sharing import decode_configs
from hack.admission_policy import POLICY, Models, policy
from tests.builders import claim
from tests.deploy.chart import CONFIGS_POLICY, GOLDEN, objects
from tests.fakes.judged_configs import RIGHT, WRONG

CHART = objects(GOLDEN.read_text())


def test_the_policy_is_fresh() -> None:
    assert POLICY.read_text() == policy(), "run hack/update-policy"


def test_the_policy_is_bound_and_what_it_cannot_judge_is_let_through() -> None:
    policy, binding = CHART[CONFIGS_POLICY], CHART[f"{CONFIGS_POLICY}Binding"]["spec"]
    assert binding == {
        "policyName": policy["metadata"]["name"],
        "validationActions": ["Deny"],
    }
    assert policy["spec"]["failurePolicy"] == "Ignore"


def decoded(parameters: Any) -> Any:
    """As when a claim is prepared."""
    return decode_configs(claim("gpu-0", configs=(OpaqueConfig("FromClaim", (), parameters, "p"),)))


@pytest.mark.parametrize("parameters", [wrong for wrong, _ in WRONG.values()], ids=WRONG)
def test_what_the_policy_refuses_is_refused_at_prepare(parameters: Any) -> None:
    with pytest.raises(ClaimError, match=r": p\."):
        decoded(parameters)


@pytest.mark.parametrize("parameters", RIGHT.values(), ids=RIGHT)
def test_what_the_policy_lets_through_is_decoded(parameters: Any) -> None:
    [config] = decoded(parameters)
    assert config.config.kind == parameters["kind"]


class Inner(StrictModel):
    colour: Literal["Red", "Green", "Blue"] = "Red"


class Outer(StrictModel):
    api_version: Literal["resource.nvidia.com/v1beta1"]
    kind: Literal["Outer"]
    inner: Inner = Inner()
    loud: bool | None = None


def test_a_field_of_a_model_is_known_to_the_policy() -> None:
    models = Models().read({"Outer": Outer})

    assert models.tables.fields["Outer"] == ["apiVersion", "kind", "inner", "loud"]
    assert models.tables.models["Outer.inner"] == {"": "Inner"}
    assert models.tables.words["Inner.colour"] == ["Red", "Green", "Blue"]
    assert models.tables.remedies["Inner.colour"] == "; write Red, Green or Blue"
    assert models.tables.booleans == {"Outer.loud": True}
    assert models.levels == [{"inner": ""}]


class Red(StrictModel):
    colour: Literal["Red"]


class Blue(StrictModel):
    colour: Literal["Blue"]


class Either(StrictModel):
    inner: Annotated[Red | Blue, Field(discriminator="colour")] = Red(colour="Red")


def test_a_name_stands_for_one_of_several_models_or_for_one() -> None:
    with pytest.raises(ValueError, match="are not told apart as in its namesake"):
        Models().read({"Either": Either, "Outer": Outer})


class AnyText(StrictModel):
    name: str = ""


class TwoTypes(StrictModel):
    size: int | bool = 0


class Demanding(StrictModel):
    loud: bool


class Open(BaseModel):
    loud: bool


@pytest.mark.parametrize(
    ("model", "message"),
    [
        pytest.param(AnyText, "AnyText.name is something unknown", id="text of any kind"),
        pytest.param(TwoTypes, "TwoTypes.size has 2 types", id="two types"),
        pytest.param(Demanding, "Demanding.loud is required", id="a field that has to be there"),
        pytest.param(Open, "Open takes fields that it does not name", id="unknown fields"),
    ],
)
def test_a_model_that_the_policy_cannot_express_is_refused(
    model: type[BaseModel], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Models().read({model.__name__: model})
