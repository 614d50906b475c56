"""Options of the public functions are typed: as keyword arguments they are the fields of the records they become."""

import inspect
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Unpack, get_args, get_origin, get_type_hints

import pytest

from kvcellar import BadRequest, Engine, RequestOptions, RetentionOptions, SamplingParams, Session, Settings
from kvcellar.engine.load.settings import EngineOptions
from kvcellar.engine.request_options import RequestReading
from kvcellar.sampling_params import SamplingOptions

SAMPLING = [Engine.params, Session.send, Session.stream]
REQUESTS = [Engine.generate, Engine.stream, Engine.chat]


def accepted(kind: Any) -> Any:
    """The type of an option for a field of type `kind`: any sequence becomes a tuple, nothing else is converted."""
    parts = get_args(kind)
    if get_origin(kind) is tuple and parts[-1] is ...:
        return Sequence[accepted(parts[0])]
    return kind


@pytest.mark.parametrize(("options", "record"), [(SamplingOptions, SamplingParams), (EngineOptions, Settings)])
def test_options_are_the_fields_of_the_record(options: Any, record: Any) -> None:
    hints = get_type_hints(record)
    expected = {field.name: accepted(hints[field.name]) for field in fields(record)}
    if record is SamplingParams:
        expected["stop"] = str | expected["stop"]
    assert get_type_hints(options) == expected
    assert list(get_type_hints(options)) == list(expected), "in another order"
    assert not options.__required_keys__


@pytest.mark.parametrize("function", SAMPLING, ids=lambda function: function.__qualname__)
def test_functions_that_sample_say_which_options_there_are(function: Any) -> None:
    assert inspect.signature(function).parameters["sampling"].annotation == Unpack[SamplingOptions]


@pytest.mark.parametrize("function", REQUESTS, ids=lambda function: function.__qualname__)
def test_functions_that_submit_requests_also_take_how_they_are_kept_and_read(function: Any) -> None:
    assert inspect.signature(function).parameters["options"].annotation == Unpack[RequestOptions]
    own = {"retention": RetentionOptions | None, "adapter": str | None, "reading": RequestReading | None}
    assert get_type_hints(RequestOptions) == get_type_hints(SamplingOptions) | own


def test_the_error_of_an_engine_lists_its_options() -> None:
    assert inspect.signature(Engine).parameters["settings"].annotation == Unpack[EngineOptions]


def test_an_unknown_option_of_an_engine_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(BadRequest, match=r"no engine setting 'max_sequence'; there are .*'max_sequences'"):
        Engine("nowhere", max_sequence=1)  # pyright: ignore[reportCallIssue]
