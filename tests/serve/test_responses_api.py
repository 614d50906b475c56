"""The Responses API: what its input becomes, its objects and events, and responses that are continued."""

import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcellar.serve import Server, ServeSettings, key_digest
from kvcellar.serve.http.api_errors import ApiError
from kvcellar.serve.responses import routes
from kvcellar.serve.responses.items import messages_of
from kvcellar.serve.responses.routes import page
from kvcellar.text.pieces import CallArguments, CallClosed, CallOpened, Content, Piece, Reasoning
from kvcellar.text.replies.detection import known
from tests.serve.fake_engine import FakeEngine
from tests.serve.test_tools import call
from tests.serve.wire import error_of

MODEL = "cellar/fake-1"
PATH = "/v1/responses"
FORM = known('<tool_call> "arguments" <think>')
TIME = {"type": "function", "name": "time", "parameters": {"type": "object", "properties": {}}, "strict": False}
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "description": "of a city"}
CALL = {"type": "function_call", "call_id": "c1", "name": "time", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
USER = {"role": "user", "content": "hi"}


@pytest.fixture
def calling(engine: FakeEngine) -> FakeEngine:
    assert FORM is not None
    engine.replies.use(FORM)
    return engine


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def created(http, engine, output: str = "Hello", **fields: Any) -> dict[str, Any]:
    with engine.scripted(output=output.encode()):
        response = http.post(PATH, json={"input": "hi"} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, after a check of their form."""
    found: list[dict[str, Any]] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def streamed(http, engine, output: str, **fields: Any) -> list[dict[str, Any]]:
    with engine.scripted(output=output.encode()):
        return events_of(http.post(PATH, json={"input": "hi", "stream": True} | fields).text)


def prompt_of(engine: FakeEngine) -> str:
    return bytes(engine.seen[-1][0]).decode()


# -- the response ------------------------------------------------------------------------------------------------


def test_a_response_has_all_fields_that_clients_read(http, engine):
    with engine.scripted(cached=2):
        response = created(http, engine, "Hello", metadata={"a": "b"}, temperature=0.5, user="me")
    id, made = response.pop("id"), response.pop("created_at")
    assert id.startswith("resp_")
    assert response.pop("completed_at") >= made > 1_700_000_000
    (message,) = response.pop("output")
    assert message.pop("id").startswith("msg_")
    content = [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
    assert message == {"type": "message", "role": "assistant", "status": "completed", "content": content}
    assert response == {
        "object": "response",
        "model": MODEL,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "usage": {
            "input_tokens": 8,
            "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 6},
            "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 13,
        },
        "temperature": 0.5,
        "top_p": 1.0,
        "background": False,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
        "user": "me",
    }


def test_reasoning_and_calls_are_items(http, calling):
    text = "<think>Hm.</think>Wait." + call("weather", city="Rome")
    response = created(http, calling, text, tools=[WEATHER])
    thought, message, made = response["output"]
    assert thought["summary"] == []
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "Wait."
    assert (made["type"], made["name"], made["arguments"]) == ("function_call", "weather", '{"city": "Rome"}')
    assert made["id"].startswith("fc_")
    assert made["call_id"] == "call_0"
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert response["tools"][0] == WEATHER | {"strict": None}
    assert calling.tools[0]["function"] == {key: WEATHER[key] for key in ("name", "description", "parameters")}


def test_too_few_tokens_make_an_incomplete_response(http, engine):
    response = created(http, engine, "Hello", max_output_tokens=3)
    assert (response["status"], response["completed_at"]) == ("incomplete", None)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["content"][0]["text"] == "Hel"


def test_an_empty_answer_is_an_empty_message(http, calling):
    assert created(http, calling, "<think></think>")["output"][0]["content"][0]["text"] == ""


def test_logprobs_are_in_the_text_on_request(http, engine):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (entry, *_) = created(http, engine, "Hello", **fields)["output"][0]["content"][0]["logprobs"]
    assert (entry["token"], entry["bytes"], len(entry["top_logprobs"])) == ("H", [72], 2)
    events = streamed(http, engine, "Hello", **fields)
    told = [one for event in events if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
    assert "".join(one["token"] for one in told) == "Hello"
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == told


# -- streams ------------------------------------------------------------------------------------------------------


def test_order_of_the_events_of_a_text(http, engine):
    kinds = [kind for kind, _ in itertools.groupby(streamed(http, engine, "Hello"), key=lambda event: event["type"])]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_order_of_the_events_of_a_call(http, calling):
    events = streamed(http, calling, "<think>Hm.</think>" + call("time"), tools=[TIME])
    kinds = [kind.removeprefix("response.") for kind, _ in itertools.groupby(events, key=lambda event: event["type"])]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert added[0]["content"] == added[0]["summary"] == []
    assert (added[1]["name"], added[1]["arguments"], added[1]["status"]) == ("time", "", "in_progress")


def test_a_failure_in_a_stream_is_in_its_last_event(http, engine):
    with engine.scripted(output=b"Hello", fail=RuntimeError("secret"), fail_at=2):
        last = events_of(http.post(PATH, json={"input": "hi", "stream": True}).text)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "internal_error"
    assert "secret" not in json.dumps(last)
    assert http.get(f"{PATH}/{last['response']['id']}").status_code == 404


def grown(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a client makes of the events alone, after a check that each event has its place."""
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if "output_index" in event:
            assert event["output_index"] == len(items) - (kind != "output_item.added")
        match kind:
            case "output_item.added":
                items.append(event["item"])
                texts.append("")
            case "content_part.added":
                assert event["part"]["text"] == texts[-1] == ""
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                assert event["item_id"] == items[-1]["id"]
                texts[-1] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == texts[-1]
            case "function_call_arguments.done":
                assert event["arguments"] == texts[-1]
            case "content_part.done":
                assert event["part"]["text"] == texts[-1]
            case "output_item.done":
                assert event["item"]["id"] == items[-1]["id"]
                items[-1] = event["item"]
    return items


PARTS = st.lists(
    st.sampled_from(["Hello ", "<think>", "</think>", "<tool_call>\n", "\n</tool_call>", '{"name": "time", "argum'])
    | st.just(call("time"))
    | st.just(call("weather", city='a"b\n{}')),
    max_size=6,
).map("".join)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PARTS)
def test_the_deltas_of_a_stream_make_up_its_response(http, calling, text):
    if not text:
        return
    events = streamed(http, calling, text, tools=[TIME, WEATHER])
    last = events[-1]["response"]
    assert grown(events) == last["output"]
    whole = created(http, calling, text, tools=[TIME, WEATHER])
    if all(item["status"] == "completed" for item in last["output"]):
        said = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in whole["output"]]
        assert said == [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in last["output"]]


# -- input --------------------------------------------------------------------------------------------------------


def test_a_text_is_a_message_of_the_user(http, engine):
    created(http, engine, input="hi", instructions="be brief")
    assert prompt_of(engine) == "<system>be brief<user>hi"


def test_items_become_messages():
    assert messages_of([{"role": "developer", "content": "a"}, {"type": "message", **USER}])[0] == [
        {"role": "system", "content": "a"},
        USER,
    ]
    assert messages_of([USER, THOUGHT, {"role": "assistant", "content": "Wait."}, CALL, CALL | {"call_id": "c2"}])[
        0
    ] == [
        USER,
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "Wait.",
            "tool_calls": [
                {"id": id, "type": "function", "function": {"name": "time", "arguments": "{}"}} for id in ("c1", "c2")
            ],
        },
    ]
    first, _, second = messages_of([CALL, RESULT, CALL | {"call_id": "c2"}])[0]
    assert [one["tool_calls"][0]["id"] for one in (first, second)] == ["c1", "c2"]


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "input_text", "text": "hi"}],
        [{"type": "text", "text": "hi"}],
        [{"type": "output_text", "text": "hi", "annotations": [{"type": "url_citation"}], "logprobs": [], "x": 1}],
    ],
)
def test_text_parts_of_all_kinds_are_text(content):
    assert messages_of([{"role": "assistant", "content": content, "id": "msg_1", "status": "completed"}])[0] == [
        {"role": "assistant", "content": "hi"}
    ]


def test_a_result_without_its_call_is_named_by_its_item(http, calling):
    """Also where instructions and earlier turns are in front of it, whose calls it may have."""
    tools = {"tools": [TIME]}
    first = created(http, calling, call("time"), input=[USER], **tools)
    call_id = next(item["call_id"] for item in first["output"] if item["type"] == "function_call")
    more = {"previous_response_id": first["id"], "instructions": "Be brief.", **tools}
    created(http, calling, "ok", input=[RESULT | {"call_id": call_id}], **more)
    created(http, calling, "ok", input=[USER, CALL, RESULT])
    for items, at, fields in (
        ([USER, RESULT], 1, {}),
        ([RESULT, CALL], 0, {}),
        ([RESULT | {"call_id": call_id}], 0, {}),
        ([RESULT | {"call_id": call_id}, RESULT], 1, more),
    ):
        response = http.post(PATH, json={"input": items, **fields})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, f"input[{at}].call_id"), error
        assert error["message"].startswith(f"input[{at}].call_id is ")
        assert "messages" not in error["message"]


def test_reasoning_without_a_text_says_nothing():
    assert messages_of([USER, {"type": "reasoning", "summary": [], "encrypted_content": "x"}])[0] == [USER]
    (_, message) = messages_of([USER, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]}])[0]
    assert message["reasoning_content"] == "So."


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (None, "input"),
        ([], "input"),
        (5, "input"),
        ([{"type": "reasoning", "summary": [], "encrypted_content": "x"}], "input"),
        (["hi"], "input[0]"),
        ([USER] * 4097, "input"),
        ([USER, {"role": "tool", "content": "x"}], "input[1].role"),
        ([{"role": "user", "content": 5}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": 5}]}], "input[0].content[0].image_url"),
        ([{"role": "user", "content": [{"type": {}, "text": "x"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([CALL | {"name": 5}], "input[0].name"),
        ([CALL, {"type": "function_call_output", "call_id": "c1"}], "input[1].output"),
        ([{"type": "item_reference", "id": "x"}], "input[0].type"),
        ([{"type": "computer_call"}], "input[0].type"),
        ([THOUGHT | {"content": [5]}], "input[0].content[0].text"),
    ],
)
def test_what_is_wrong_with_an_input_is_named(given, param):
    with pytest.raises(ApiError) as caught:
        messages_of(given)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"conversation": "x"}, "conversation"),
        ({"tools": [{"type": "web_search_preview"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"include": ["secrets"]}, "include[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_output_tokens": 4, "max_tokens": 5}, "max_output_tokens"),
        ({"truncation": "middle"}, "truncation"),
        ({"n": 2}, "n"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "response_format": {"type": "json_object"}}, "text.format"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"inputs": "hi"}, "inputs"),
    ],
)
def test_what_is_not_supported_is_named(http, engine, fields, param):
    response = http.post(PATH, json={"input": "hi"} | fields)
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert not engine.seen


@pytest.mark.parametrize(
    "fields",
    [
        {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"]},
        {"reasoning": {"effort": "low", "summary": "auto"}},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"stream": True, "stream_options": {"include_obfuscation": False, "continuous_usage_stats": True}},
        {"client_metadata": {"a": "b"}, "max_tool_calls": 3, "service_tier": "auto", "background": False},
        {"ignore_eos": False, "stop": None, "seed": 3, "prompt_cache_key": "x", "safety_identifier": "y"},
    ],
)
def test_fields_of_real_clients_are_accepted(http, engine, fields):
    assert http.post(PATH, json={"input": "hi"} | fields).status_code == 200


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def test_the_format_of_a_text_is_a_constraint(http, engine):
    format = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    response = created(http, engine, "{}", text={"format": format})
    assert response["text"] == {"format": format}
    (asked,) = engine.replies.asked
    found = engine.seen[-1][1].constraint
    assert asked["answer"] == found
    assert (found.kind, json.loads(found.source)) == ("json_schema", SCHEMA)
    created(http, engine, "{}", text={"format": {"type": "json_object"}})
    assert engine.seen[-1][1].constraint.kind == "json_object"


# -- responses that are kept ---------------------------------------------------------------------------------------


def test_a_response_is_continued(http, calling):
    first = created(http, calling, "<think>Hm.</think>" + call("time"), tools=[TIME], instructions="be brief")
    result = RESULT | {"call_id": first["output"][1]["call_id"]}
    second = created(http, calling, "It is noon.", input=[result], previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    prompt = prompt_of(calling)
    assert prompt.startswith("<user>hi<assistant>")  # instructions are of one response only
    assert "Hm." in prompt
    assert prompt.endswith('<tool>noon{"tool_call_id": "call_0"}')
    created(http, calling, "Bye.", input="thanks", previous_response_id=second["id"])
    assert prompt_of(calling) == prompt + "<assistant>It is noon.<user>thanks"


def test_a_response_is_continued_twice(http, engine):
    first = created(http, engine, "one")
    for text in ("left", "right"):
        created(http, engine, "two", input=text, previous_response_id=first["id"])
        assert prompt_of(engine) == f"<user>hi<assistant>one<user>{text}"


def test_a_kept_response_can_be_read_and_deleted(http, engine):
    response = created(http, engine)
    assert http.get(f"{PATH}/{response['id']}").json() == response
    last = streamed(http, engine, "Hello")[-1]["response"]
    assert http.get(f"{PATH}/{last['id']}").json() == last
    child = created(http, engine, previous_response_id=response["id"])
    gone = http.delete(f"{PATH}/{response['id']}").json()
    assert gone == {"id": response["id"], "object": "response", "deleted": True}
    for request in (http.get, http.delete):
        answer = request(f"{PATH}/{response['id']}")
        assert (answer.status_code, error_of(answer)["code"]) == (404, "response_not_found")
    created(http, engine, previous_response_id=child["id"])


def test_the_items_of_an_input_are_read_in_pages(http, engine):
    given = [
        {"role": "user", "content": "one"},
        {"type": "message", "id": "msg_own", "role": "assistant", "content": "two"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "three"},
    ]
    response = created(http, engine, input=given)
    path = f"{PATH}/{response['id']}/input_items"
    whole = http.get(path, params={"order": "asc"}).json()
    assert [item["type"] for item in whole["data"]] == [
        "message",
        "message",
        "function_call",
        "function_call_output",
    ]
    ids = [item["id"] for item in whole["data"]]
    assert len(set(ids)) == 4
    assert ids[1] == "msg_own"
    assert whole["data"][0]["content"] == [{"type": "input_text", "text": "one"}]
    assert whole["data"][1]["content"] == [{"type": "output_text", "text": "two", "annotations": []}]
    assert (whole["object"], whole["first_id"], whole["last_id"], whole["has_more"]) == ("list", ids[0], ids[3], False)
    assert [item["id"] for item in http.get(path).json()["data"]] == ids[::-1], "the last one first, as at OpenAI"
    read, after = [], {}
    while True:
        part = http.get(path, params={"order": "asc", "limit": 3, **after}).json()
        read += [item["id"] for item in part["data"]]
        after = {"after": part["last_id"]}
        if not part["has_more"]:
            break
    assert read == ids
    assert http.get(path, params={"after": ids[0]}).json()["data"] == []
    text = created(http, engine, input="hi", previous_response_id=response["id"])
    (item,) = http.get(f"{PATH}/{text['id']}/input_items").json()["data"]
    assert (item["role"], item["content"]) == ("user", [{"type": "input_text", "text": "hi"}])


@pytest.mark.parametrize(
    ("param", "value"),
    [("limit", "0"), ("limit", "101"), ("limit", "many"), ("limit", "²"), ("order", "up"), ("after", "msg_other")],
)
def test_a_page_that_cannot_be_had_is_refused_by_its_parameter(http, engine, param, value):
    response = created(http, engine)
    answer = http.get(f"{PATH}/{response['id']}/input_items", params={param: value})
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


def test_the_items_of_an_input_are_read_beside_the_event_loop(http, engine, monkeypatch):
    """They may be megabytes, and nothing else is served while the event loop reads them."""
    threads = list[str]()

    def watched(*about: Any) -> Any:
        threads.append(threading.current_thread().name)
        return page(*about)

    monkeypatch.setattr(routes, "page", watched)
    response = created(http, engine)
    assert http.get(f"{PATH}/{response['id']}/input_items").status_code == 200
    assert [name.rpartition("_")[0] for name in threads] == ["kvcellar-files"]


def test_the_items_of_an_unknown_response_are_not_found(http, engine):
    assert http.get(f"{PATH}/resp_unknown/input_items").status_code == 404
    unkept = created(http, engine, store=False)
    assert http.get(f"{PATH}/{unkept['id']}/input_items").status_code == 404


def test_without_store_nothing_is_kept(http, engine):
    response = created(http, engine, store=False)
    assert response["store"] is False
    assert http.get(f"{PATH}/{response['id']}").status_code == 404
    answer = http.post(PATH, json={"input": "hi", "previous_response_id": response["id"]})
    error = error_of(answer)
    found = (answer.status_code, error["param"], error["code"])
    assert found == (404, "previous_response_id", "previous_response_not_found")


def test_a_response_belongs_to_its_key(engine):
    keys = ("one", "two")
    settings = ServeSettings(port=0, key_digests=tuple(map(key_digest, keys)))
    with Server(engine, settings) as server:
        ours, theirs = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in keys)
        made = ours.responses.create(model=MODEL, input="hi")
        assert ours.responses.retrieve(made.id).id == made.id
        with pytest.raises(openai.NotFoundError):
            theirs.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            theirs.responses.create(model=MODEL, input="hi", previous_response_id=made.id)
        with pytest.raises(openai.NotFoundError):
            theirs.responses.delete(made.id)
        ours.responses.delete(made.id)
        for one in (ours, theirs):
            one.close()


def test_auto_truncation_omits_the_oldest_turns(http, engine):
    long = "x" * 8000
    history = [{"role": role, "content": long} for role in ("user", "assistant") * 2]
    given = [*history, USER]
    refused = http.post(PATH, json={"input": given, "instructions": "be brief"})
    assert error_of(refused)["code"] == "context_length_exceeded"
    first = created(http, engine, "one", input=given, instructions="be brief", truncation="auto")
    assert prompt_of(engine) == "<system>be brief<user>hi"
    created(http, engine, "two", input="more", previous_response_id=first["id"], truncation="auto")
    assert prompt_of(engine) == "<user>hi<assistant>one<user>more"


def test_a_response_whose_parents_are_deleted_is_continued_with_all_that_was_said(http, engine):
    first = created(http, engine, "one", input="hi")
    second = created(http, engine, "two", input="more", previous_response_id=first["id"])
    third = created(http, engine, "three", input="again", previous_response_id=second["id"])
    for gone in (first, second):
        assert http.delete(f"{PATH}/{gone['id']}").status_code == 200
        assert http.get(f"{PATH}/{gone['id']}").status_code == 404
    created(http, engine, "four", input="last", previous_response_id=third["id"])
    assert prompt_of(engine) == ("<user>hi<assistant>one<user>more<assistant>two<user>again<assistant>three<user>last")


# -- the openai package --------------------------------------------------------------------------------------------


def test_the_openai_package_reads_responses(client, calling):
    with calling.scripted(output=("<think>Hm.</think>" + call("time")).encode()):
        made = client.responses.create(model=MODEL, input=[USER], tools=[TIME])
    kinds = [item.type for item in made.output]
    assert kinds == ["reasoning", "function_call"]
    with calling.scripted(output=b"It is noon."):
        items: list[Any] = [USER, *made.output, RESULT | {"call_id": made.output[1].call_id}]
        again = client.responses.create(model=MODEL, input=items, tools=[TIME])
    assert again.output_text == "It is noon."
    assert "Hm." in prompt_of(calling)


def test_the_openai_package_reads_streams(client, calling):
    with (
        calling.scripted(output=("Wait." + call("weather", city="Rome")).encode()),
        client.responses.stream(model=MODEL, input="hi", tools=[WEATHER]) as stream,
    ):
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert response.output_text == "Wait."
    assert response.output[1].arguments == '{"city": "Rome"}'


def test_one_item_for_each_run_of_pieces():
    from kvcellar.serve.responses.output import Output

    output = Output()
    pieces: list[Piece] = [
        *(Reasoning("a"), Reasoning("b"), Content("c"), CallOpened(0, "i", "f"), CallArguments(0, "{}")),
        *(CallClosed(0), Content("d"), CallOpened(1, "j", "g"), CallArguments(1, "{")),
    ]
    output.add(pieces)
    output.end(complete=True)
    assert [(item.kind, "".join(item.texts), item.status) for item in output.items] == [
        ("reasoning", "ab", "completed"),
        ("message", "c", "completed"),
        ("function_call", "{}", "completed"),
        ("message", "d", "completed"),
        ("function_call", "{", "incomplete"),
    ]
