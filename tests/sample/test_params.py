"""Sampling parameters: every bound holds, the error has the name of the field, and the record is immutable."""

import dataclasses
import math

import pytest

from kvcellar.errors import BadRequest
from kvcellar.sampling_params import STOPS, SamplingParams, check_ids

WRONG = {
    "max_tokens": [0, -1, 2**31, 2**63, 1.5, "5", True],
    "min_tokens": [-1, 2**31, None],
    "temperature": [-1, math.nan, math.inf, -math.inf, 1e308, 100.1, "1", None, True],
    "top_k": [-1, 2**31, 1.0],
    "top_p": [0.0, -0.1, 1.1, math.nan],
    "min_p": [-0.1, 1.1, math.nan],
    "typical_p": [0.0, 1.1, math.inf],
    "repetition_penalty": [0.0, -1.0, 101, math.nan],
    "presence_penalty": [-2.1, 2.1, math.nan],
    "frequency_penalty": [-2.1, 2.1, math.inf],
    "repeat_last_n": [-2, 2**31, 1.0, None, True],
    "logit_bias": [{-1: 0.0}, {2**31: 0.0}, {1: math.nan}, {1: 101.0}, {"1": 1.0}, [(1, 1.0)], None],
    "seed": [2**64, -(2**63) - 1, 1.0],
    "n": [0, -1, 10**9, 129],
    "logprobs": [-1, 21, 10**6, 1.0],
    "stop": [("",), ("a" * 4097,), ("a", "\ud800"), ("a",) * (STOPS.most + 1), (1,), 3, None, {"a": 1}],
    "stop_token_ids": [(-1,), (2**31,), (1.0,), 5, None],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_out_of_bounds_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(BadRequest) as refused:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert refused.value.param == name


def test_extremes_within_the_bounds_are_accepted() -> None:
    SamplingParams(max_tokens=2**31 - 1, temperature=1e-45, top_p=1e-9, seed=2**64 - 1, n=128, logprobs=0)
    SamplingParams(temperature=0, seed=-(2**63), presence_penalty=-2, frequency_penalty=2, logit_bias={0: -100})


def test_no_more_can_be_demanded_than_allowed() -> None:
    with pytest.raises(BadRequest, match="min_tokens 5 is more than max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_the_record_keeps_its_own_copies() -> None:
    bias, stop = {3: 1.0}, ["a", "b"]
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=[7])  # type: ignore[arg-type]
    bias[4] = math.nan
    stop.append("")
    assert dict(params.logit_bias) == {3: 1.0}
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == (7,)
    with pytest.raises(TypeError):
        params.logit_bias[3] = math.nan  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = -1  # type: ignore[misc]


def test_one_stop_string_is_not_taken_apart() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]


def test_a_record_can_be_changed_into_another() -> None:
    changed = dataclasses.replace(SamplingParams(logit_bias={3: 1.0}, stop=("a",)), top_k=4)
    assert (dict(changed.logit_bias), changed.stop, changed.top_k) == ({3: 1.0}, ("a",), 4)


@pytest.mark.parametrize("params", [SamplingParams(logit_bias={99: 1.0}), SamplingParams(stop_token_ids=(99,))])
def test_ids_are_checked_against_the_vocabulary(params: SamplingParams) -> None:
    check_ids(params, 100)
    with pytest.raises(BadRequest, match=r"names token 99; this model's tokens are 0 to 98"):
        check_ids(params, 99)
