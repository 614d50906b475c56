"""What arrives in another process is what was sent, or an error that the reader expects; frames are whole."""

import re
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar import errors, wire
from kvcellar.constraint import Constraint
from kvcellar.engine.messages import (
    VERSION,
    Ask,
    Blocks,
    Cancel,
    Drawn,
    EngineEvent,
    Fail,
    FromEngine,
    Given,
    Hello,
    Refusal,
    Reply,
    StepEvents,
    Stop,
    Submission,
    ToEngine,
)
from kvcellar.events import Done, Failed, Timings, TokenLogprob, Usage
from kvcellar.memory.prefix.kv_events import AllBlocksCleared
from kvcellar.memory.prefix.node import key_of
from kvcellar.memory.retention import RetentionOptions
from kvcellar.sampling_params import SamplingParams
from kvcellar.wire import ErrorRecord, Link, Outbox, decode, encode, error_of, packed, record_of

TO_ENGINE: Any = ToEngine
FROM_ENGINE: Any = FromEngine
UNIONS = pytest.mark.parametrize("union", [TO_ENGINE, FROM_ENGINE], ids=["to the engine", "from the engine"])

# Of each class of `kvcellar.errors` one or more, with all that its arguments can change.
ERRORS: list[Exception] = [
    errors.NativePanic("a tokenizer has panicked"),
    errors.KvcellarError("wrong"),
    errors.BadRequest("n must be a whole number", "n"),
    errors.BadRequest("too many", hint="raise `max_waiting`"),
    errors.PromptTooLong(70, 60, "the model's context"),
    errors.PromptTooLong(70, 60, "its memory", at_least=True, hint="raise cache_bytes"),
    errors.TextTooSlow("prompt", 5000, 2.0),
    errors.TokenizerFailed("damaged"),
    errors.TemplateFailed("roles must alternate", "messages"),
    errors.UnknownConversation("no conversation a", "conversation"),
    errors.ConversationConflict("it is open", "conversation"),
    errors.ConversationUnreadable("damaged"),
    errors.ConversationNotSaved("no space"),
    errors.ModelNotFound("no such directory"),
    errors.PullFailed("no network"),
    errors.ModelRefused("no weights"),
    errors.NoBackend("layer 3", {"sdpa": "head size 512", "triton": "no GPU"}),
    errors.DraftRefused("small", "large", {"context": "4096"}, {"vocabulary": "32000 and 64000"}),
    errors.AdapterRefused("style", "rank 0"),
    errors.CapacityTooSmall("raise cache_bytes"),
    errors.CacheFull("full", 9, 2, unit="rows"),
    errors.NotSupported("layers are recurrent", 12),
    errors.UnknownSequence(7),
    errors.WrongStage("commit before begin"),
    errors.EngineClosed("closed"),
    errors.EngineDied("died"),
    errors.EngineFailed("a kernel failed"),
    errors.EngineFailed(),
    errors.NoToken("every token is banned"),
    errors.ScoresNotNumbers("NaN"),
    errors.ConstraintFailed("too many states"),
    errors.Overloaded("40 requests are waiting"),
]

texts, ids = st.text(max_size=8), st.integers(0, 2**31 - 1)
phrases = st.lists(ids, min_size=1, max_size=4)
WITHIN_1 = st.floats(0.0, 1.0, exclude_min=True)
CONSTRAINTS = [
    Constraint.json_schema({"type": "object", "properties": {"é": {"enum": [1, "a"]}}}, param="response_format"),
    Constraint.json_object(compact=True),
    Constraint.regex("a+"),
    Constraint.choice(["yes", "no"]),
    Constraint("grammar", 'start: "a"', False, "start: @answer"),
]
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 2**31 - 1),
    "min_tokens": st.integers(0, 2**31 - 1),
    "min_length": st.integers(0, 2**31 - 1),
    "temperature": st.floats(0.0, 100.0),
    "top_k": st.integers(0, 2**31 - 1),
    "top_p": WITHIN_1,
    "min_p": st.floats(0.0, 1.0),
    "typical_p": WITHIN_1,
    "top_h": WITHIN_1,
    "epsilon_cutoff": st.floats(0.0, 1.0),
    "eta_cutoff": st.floats(0.0, 1.0),
    "repetition_penalty": st.floats(0.01, 100.0),
    "presence_penalty": st.floats(-2.0, 2.0),
    "frequency_penalty": st.floats(-2.0, 2.0),
    "repeat_last_n": st.integers(-1, 2**31 - 1),
    "logit_bias": st.dictionaries(ids, st.floats(-100.0, 100.0), max_size=4),
    "sequence_bias": st.dictionaries(phrases.map(tuple), st.floats(-1e4, 1e4), max_size=4),
    "no_repeat_ngram_size": st.integers(0, 64),
    "bad_words_ids": st.lists(phrases, max_size=3),
    "suppress_tokens": st.lists(ids, max_size=3),
    "begin_suppress_tokens": st.lists(ids, max_size=3),
    "exponential_decay_length_penalty": st.tuples(ids, st.floats(0.0, 100.0, exclude_min=True)),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "n": st.integers(1, 128),
    "logprobs": st.integers(0, 20),
    "prompt_logprobs": st.integers(0, 20),
    "stop": st.lists(st.text(min_size=1, max_size=8), max_size=3) | st.text(min_size=1, max_size=8),
    "stop_token_ids": st.lists(ids, max_size=3),
    "ignore_eos": st.booleans(),
    "shift": st.booleans(),
    "num_keep": st.integers(-1, 2**31 - 1),
    "constraint": st.sampled_from(CONSTRAINTS),
}


def allowed(given: dict[str, Any]) -> SamplingParams:
    """Without what cannot be combined."""
    for name in ("min_tokens", "min_length", "ignore_eos") if "constraint" in given else ():
        given.pop(name, None)
    if "max_tokens" not in given:
        given.pop("shift", None)
    elif given.get("min_tokens", 0) > given["max_tokens"]:
        given["min_tokens"], given["max_tokens"] = given["max_tokens"], given["min_tokens"]
    return SamplingParams(**given)


every_params = st.fixed_dictionaries({}, optional=FIELDS).map(allowed)
every_retention = st.builds(
    RetentionOptions,
    priority=st.integers(-8, 8),
    ttl=st.none() | st.floats(1e-3, 1e8),
    pinned=st.booleans(),
    stored=st.booleans(),
    recurring=st.booleans(),
    owner=st.sampled_from(["", "tenant é"]),
    weight=st.floats(0.01, 100.0),
)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(),
    str: texts,
    bool: st.booleans(),
    bytes: st.binary(max_size=8),
    memoryview: st.binary(max_size=8).map(memoryview),
    NoneType: st.none(),
    Path: st.sampled_from([Path("/models/a b"), Path("relative"), Path("/not-\udcff-unicode")]),
    Exception: st.sampled_from(ERRORS),
    msgspec.Raw: st.builds(packed, st.recursive(st.none() | ids | texts, st.lists, max_leaves=4)),
    SamplingParams: every_params,
    RetentionOptions: every_retention,
    dict[str, Any]: st.dictionaries(texts, st.none() | ids | texts | st.binary(max_size=8), max_size=3),
    Hello: st.builds(Hello, version=st.just(VERSION), card=st.builds(packed, texts)),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Of a type as the fields of messages have it; of a record with all its fields, also those it has got since."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in PLAIN:
        return PLAIN[kind]
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is list:
        return st.lists(values(args[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(values, args))
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Union, UnionType):
        return st.one_of(*map(values, args))
    assert is_dataclass(kind) or issubclass(kind, msgspec.Struct), f"{kind}: add how values of it are made"
    return st.builds(kind, **{name: values(hint) for name, hint in get_type_hints(kind).items()})


def seen(value: object) -> str:
    """A record with the types and values of all its fields. What is `Raw` is compared by its bytes."""
    return re.sub(r"<msgspec.Raw object at \w+>", "Raw", repr(value))


def read(data: bytes, kind: Any) -> Any:
    return decode(data, kind)


@UNIONS
@given(data=st.data())
def test_a_message_arrives_as_it_was_sent(union: Any, data: st.DataObject) -> None:
    sent = data.draw(values(union))
    arrived = read(encode(sent), union)
    assert type(arrived) is type(sent)
    assert encode(arrived) == encode(sent)
    assert seen(arrived) == seen(sent)


@given(data=st.data())
def test_a_submission_arrives_equal_to_what_was_sent(data: st.DataObject) -> None:
    sent = data.draw(values(Submission))
    arrived = decode(encode(sent), Submission)
    assert arrived == sent
    for name in (field.name for field in fields(SamplingParams)):
        assert getattr(arrived.params, name) == getattr(sent.params, name), name
    assert (type(arrived.prompt), type(arrived.params.logit_bias)) == (bytes, MappingProxyType)
    if sent.params.constraint is not None:
        assert arrived.params.constraint is not None
        assert arrived.params.constraint.param == sent.params.constraint.param, "which is not compared"


def test_whole_numbers_and_lists_of_parameters_arrive_equal() -> None:
    sent = SamplingParams(temperature=0, top_p=1, logit_bias={3: -1}, sequence_bias=[([1, 2], 3)], stop="a")  # type: ignore[arg-type]
    assert decode(encode(sent), SamplingParams) == sent


def test_every_field_of_sampling_parameters_is_among_those_that_are_sent_here() -> None:
    assert set(FIELDS) == {field.name for field in fields(SamplingParams)}


@given(path=PLAIN[Path])
def test_a_path_arrives_as_it_was_sent(path: Path) -> None:
    assert decode(encode(path), Path) == path


@given(events=st.lists(st.tuples(ids, values(EngineEvent)), max_size=4).map(tuple))
def test_a_step_is_not_larger_than_what_is_in_it(events: tuple[tuple[int, EngineEvent], ...]) -> None:
    size = len(encode(StepEvents(events)))
    assert size <= 64 + sum(16 + len(encode(event)) for _, event in events)


def test_what_a_token_and_a_prompt_take_is_bounded() -> None:
    assert len(encode(StepEvents(((2**31, Drawn(127, (2**31,), None, 2**20)),)))) < 64
    scored = TokenLogprob(2**31, -1.5, tuple((2**31, -1.5) for _ in range(20)))
    assert len(encode(Drawn(0, (1,), (scored,), 0))) < 400
    short, long = (
        Submission(number=0, prompt=key_of((2**31 - 1,) * n), params=SamplingParams(), seed=0) for n in (1000, 131_000)
    )
    assert len(encode(long)) - len(encode(short)) <= 8 * 130_000 + 2


def exception_classes() -> set[type]:
    found = (one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, BaseException))
    return {one for one in found if one.__module__ == errors.__name__}


def test_every_class_of_errors_is_among_those_that_are_sent_here() -> None:
    assert set(map(type, ERRORS)) == exception_classes()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_with_its_class_text_and_attributes(error: Exception) -> None:
    arrived = decode(encode(Failed(error)), Failed).error
    assert type(arrived) is type(error)
    assert (str(arrived), vars(arrived)) == (str(error), vars(error))
    assert vars(error).keys() == get_type_hints(type(error)).keys(), "an attribute is not declared in its class"
    assert encode(Failed(arrived)) == encode(Failed(error)), "it is not sent on as it came"


class OutOfCells(errors.CacheFull):
    pass


class BadRequest(errors.BadRequest):
    """Another class of a name that `errors` has."""


@pytest.mark.parametrize("error", [KeyError("a"), OutOfCells("g", 1, 0), BadRequest("x"), RuntimeError("a\udcffb")])
def test_an_error_of_another_class_arrives_as_a_failure_with_its_name_and_text(error: Exception) -> None:
    arrived = decode(encode(Failed(error)), Failed).error
    assert type(arrived) is errors.EngineFailed
    assert str(arrived) == f"{type(error).__name__}: {error}".replace("\udcff", "\\udcff")


@pytest.mark.parametrize(
    "record",
    [
        ErrorRecord("KeyError", "a", {}),
        ErrorRecord("Exception", "a", {}),
        ErrorRecord("shown", "a", {}),
        ErrorRecord("BadRequest", "a", {}),
        ErrorRecord("BadRequest", "a", {"message": "a", "param": 3, "hint": None}),
        ErrorRecord("NoBackend", "a", {"refused": {"a": ["b"]}}),
    ],
)
def test_what_is_no_error_of_ours_is_refused(record: ErrorRecord) -> None:
    with pytest.raises(ValueError, match="expected"):
        decode(encode(["Failed", record]), Failed)


def test_attributes_that_a_class_does_not_declare_do_not_arrive() -> None:
    record = record_of(errors.EngineClosed("closed"))
    assert vars(error_of(msgspec.structs.replace(record, fields={"__class__": "a", "args": [1]}))) == {}


def arrived_or_refused(data: bytes, union: Any) -> None:
    """Either a message of the union or a `ValueError`; any other exception fails the test."""
    try:
        found = read(data, union)
    except ValueError:
        return
    assert type(found) in get_args(union)


@UNIONS
@given(data=st.data())
def test_a_damaged_message_is_refused_or_is_another_message(union: Any, data: st.DataObject) -> None:
    whole = encode(data.draw(values(union)))
    at = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ValueError, match="expected"):
        read(whole[:at], union)
    arrived_or_refused(whole[:at] + data.draw(st.binary(min_size=1, max_size=4)) + whole[at + 1 :], union)
    with pytest.raises(ValueError, match="expected"):
        read(whole + b"\x00", union)


@UNIONS
@given(data=st.binary(max_size=64), size=st.integers(1, 15))
def test_random_bytes_are_refused(union: Any, data: bytes, size: int) -> None:
    arrived_or_refused(data, union)
    for kind in get_args(union):
        arrived_or_refused(bytes([0x90 + size]) + encode(kind.__name__) + data, union)  # a list of its size


JSON = st.recursive(st.none() | PLAIN[int] | PLAIN[float] | texts | PLAIN[bytes], lambda one: st.lists(one) | (
    st.dictionaries(texts | ids, one)), max_leaves=8)  # fmt: skip


@UNIONS
@given(data=st.data())
def test_a_message_with_fields_of_other_types_is_refused(union: Any, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(get_args(union))).__name__
    arrived_or_refused(encode([name, *data.draw(st.lists(JSON, max_size=5))]), union)


@given(data=st.data())
def test_parameters_with_fields_of_other_values_are_refused(data: st.DataObject) -> None:
    """Through the constructor, so that what is out of bounds in one process is so in the other."""
    given = data.draw(st.dictionaries(st.sampled_from(sorted(FIELDS)), JSON | PLAIN[int], min_size=1, max_size=2))
    try:
        arrived = decode(encode(given), SamplingParams)
    except ValueError:
        return
    assert arrived == SamplingParams(**{name: getattr(arrived, name) for name in FIELDS})


SUBMITTED = {"number": 1, "prompt": [1], "params": {}}


@pytest.mark.parametrize(
    "body",
    [
        ["Nothing", 1],
        ["Drawn", 0, [1], None, 0],
        ["Submission", 1, [1]],
        ["Submission", 1, [1.5], {}],
        ["Submission", 1, ["1"], {}],
        ["Submission", 1, [1], {"n": 129}],
        ["Submission", 1, [1], {"temperature": float("nan")}],
        ["Submission", 1, [1], {"logit_bias": {-1: 1.0}}],
        ["Submission", 1, [1], {"sequence_bias": {(): 1.0}}],
        ["Submission", 1, [1], {"constraint": {"kind": "regex", "source": ""}}],
        ["Submission", 1, [1], {}, "", [], {"ttl": -1.0}],
        ["Submission", 1, [1], {}, "", [], {}, None, "max"],
        ["Cancel", "1"],
        ["Cancel"],
        "Cancel",
        {"Cancel": 1},
        None,
    ],
)
def test_what_is_no_message_to_an_engine_is_refused(body: Any) -> None:
    with pytest.raises(ValueError, match="what arrived is not a message that was expected"):
        read(encode(body), TO_ENGINE)


@pytest.mark.parametrize(
    "event",
    [
        ["BlockStored", [2.5], None, None, 16, None, "GPU"],
        ["BlockStored", ["7"], None, None, 16, None, "GPU"],
        ["BlockStored", [True], None, None, 16, None, "GPU"],
        ["BlockStored", [7], None, None, 16, None, 3],
        ["BlockStored", [7]],
        ["BlockRemoved", 7, "GPU"],
        ["BlockMoved", [7], "GPU"],
        [],
        "AllBlocksCleared",
        None,
    ],
)
def test_what_is_no_kv_event_is_refused(event: Any) -> None:
    assert read(encode(["Blocks", [["AllBlocksCleared"]]]), FROM_ENGINE) == Blocks((AllBlocksCleared(),))
    with pytest.raises(ValueError, match="what arrived is not a message that was expected"):
        read(encode(["Blocks", [event]]), FROM_ENGINE)


@pytest.mark.parametrize("kind", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
@pytest.mark.parametrize("head", [b"", b"\x93\xa6Cancel", b"\x94\xaaSubmission\x01", b"\x93\xa3Ask\x01"])
def test_a_length_that_the_message_does_not_have_takes_no_memory(kind: bytes, head: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="expected"):
            read(head + kind + b"\xff\xff\xff\xff", TO_ENGINE)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("level", [b"\x91", b"\x81\x01", b"\x81"])
@pytest.mark.parametrize("head", [b"", b"\x93\xa3Ask\x01", b"\x93\xa4Fail\x01", b"\x93\xa7Refusal\x01"])
def test_what_is_nested_deep_is_refused(level: bytes, head: bytes) -> None:
    for union in (TO_ENGINE, FROM_ENGINE):
        with pytest.raises(ValueError, match="expected"):
            read(head + level * 100_000 + b"\x00", union)


class Unknown:
    pass


def nested() -> list[Any]:
    found: list[Any] = []
    for _ in range(100_000):
        found = [found]
    return found


@pytest.mark.parametrize("value", [Unknown(), 2**64, "\ud800", nested(), {1: Unknown()}, len])
def test_what_cannot_be_sent_is_refused_by_the_sender(value: Any) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        encode(value)


def test_a_part_is_decoded_by_who_knows_its_class() -> None:
    reply = decode(encode(Reply(3, packed(Usage(1, 2, 3)))), Reply)
    assert decode(reply.value, Usage) == Usage(1, 2, 3)
    with pytest.raises(ValueError, match="expected"):
        decode(reply.value, Timings)
    ask = decode(encode(Ask(3, packed(Stop(1, 2, 3)))), Ask)
    assert decode(ask.what, Stop) == Stop(1, 2, 3)


@pytest.mark.parametrize("rest", [[], [{"a": 1}], [1, 2, 3]])
def test_a_hello_of_another_version_is_refused_whatever_it_has(rest: list[Any]) -> None:
    with pytest.raises(ValueError, match=rf"runs kvcellar 9\.9, and this one {re.escape(VERSION)}"):
        read(encode(["Hello", "9.9", *(rest or [None])]), FROM_ENGINE)


# Links.


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with one, other:
        yield one, other


@pytest.fixture
def links(ends: tuple[socket.socket, socket.socket]) -> tuple[Link[Any], Link[Any]]:
    """The front end's and the engine's."""
    return Link(ends[0], FROM_ENGINE), Link(ends[1], TO_ENGINE)


def in_threads(*calls: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - the thread of the test raises it
            failed.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failed == []


def test_messages_of_many_threads_arrive_whole_and_in_the_order_of_each(links: tuple[Link[Any], Link[Any]]) -> None:
    """Some are larger than the buffer of the socket, so that a sender is stopped within a message."""
    front, engine = links
    threads, each, arrived = 6, 40, list[Given]()

    def send(thread: int) -> None:
        for place in range(each):
            size = 1_000_000 if place % 10 == thread else place
            front.send(Given(number=thread * each + place, data=bytes((thread,)) * size))

    def receive() -> None:
        try:
            arrived.extend(engine.receive() for _ in range(threads * each))
        finally:
            engine.close()  # after an error, so that senders do not wait for it

    in_threads(receive, *(lambda thread=thread: send(thread) for thread in range(threads)))
    for thread in range(threads):
        of = [one for one in arrived if one.number // each == thread]
        assert [one.number % each for one in of] == list(range(each))
        assert all(set(one.data) <= {thread} for one in of)
        assert [len(one.data) for one in of] == [1_000_000 if at % 10 == thread else at for at in range(each)]


def test_both_ends_send_and_receive(links: tuple[Link[Any], Link[Any]]) -> None:
    front, engine = links
    engine.send(Hello(VERSION, packed("card")))
    front.send(Fail(3, errors.BadRequest("a", "b")))
    step = StepEvents(((3, Drawn(0, (1, 2))), (3, Done(Usage(1, 0, 2), Timings(0.0, 0.5, 1.0)))))
    engine.send(step)
    engine.send(Refusal(1, errors.EngineClosed("closed")))
    hello, events, refusal = (front.receive() for _ in range(3))
    assert (decode(hello.card, str), events, str(refusal.error)) == ("card", step, "closed")
    assert engine.receive().error.param == "b"


@pytest.mark.parametrize("sent", [b"", b"\x05", b"\x05\x00\x00\x00", b"\x05\x00\x00\x00\x92\xa6"])
def test_an_end_is_told_wherever_it_comes(ends: tuple[socket.socket, socket.socket], sent: bytes) -> None:
    link: Link[Any] = Link(ends[0], TO_ENGINE)
    ends[1].sendall(sent)
    ends[1].close()
    with pytest.raises(EOFError, match="closed"):
        link.receive()


def test_an_end_is_told_where_the_other_has_not_read_everything(links: tuple[Link[Any], Link[Any]]) -> None:
    front, engine = links
    front.send(Cancel(1))
    engine.close()  # without receiving it, which resets the connection
    with pytest.raises(EOFError, match="closed"):
        front.receive()


def test_a_receive_that_waits_ends_when_its_link_is_closed(links: tuple[Link[Any], Link[Any]]) -> None:
    front, _ = links
    begun = threading.Event()

    def receive() -> None:
        begun.set()
        with pytest.raises(EOFError, match="closed"):
            front.receive()

    def close() -> None:
        begun.wait()
        front.close()
        front.close()

    in_threads(receive, close)
    with pytest.raises(ConnectionError, match="closed"):
        front.send(Cancel(1))


def test_sending_to_an_end_that_is_closed_is_an_error_of_the_connection(links: tuple[Link[Any], Link[Any]]) -> None:
    front, engine = links
    engine.close()
    with pytest.raises(ConnectionError):
        front.send(Cancel(1))


def test_a_frame_over_the_bound_is_refused_before_it_is_read(ends: tuple[socket.socket, socket.socket]) -> None:
    """Of the announced 4 GiB nothing was sent: a reader that waited for them would not return."""
    link: Link[Any] = Link(ends[0], TO_ENGINE)
    for size in (wire.MOST + 1, 2**32 - 1):
        ends[1].sendall(size.to_bytes(4, "little"))
        with pytest.raises(ValueError, match=f"a message of {size} bytes was announced; {wire.MOST} can be sent"):
            link.receive()


def test_nothing_is_sent_of_a_message_over_the_bound(
    links: tuple[Link[Any], Link[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    front, engine = links
    monkeypatch.setattr(wire, "MOST", 1000)
    with pytest.raises(ValueError, match=r"a Submission has \d+ bytes; 1000 can be sent"):
        front.send(Submission(number=1, prompt=key_of((1,) * 1000), params=SamplingParams(), seed=0))
    with pytest.raises(ValueError, match="a Cancel cannot be sent"):
        front.send(Cancel(2**64))
    front.send(Cancel(2))
    assert engine.receive() == Cancel(2)


def test_a_frame_that_is_no_message_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    link: Link[Any] = Link(ends[0], TO_ENGINE)
    for body in (b"", b"\xc1", b"garbage", encode(Drawn(0, (1,)))):
        ends[1].sendall(len(body).to_bytes(4, "little") + body)
        with pytest.raises(ValueError, match="expected"):
            link.receive()


class Interrupted:
    """A socket whose second message is interrupted in its middle."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._sent = end, 0

    def sendall(self, data: bytes) -> None:
        self._sent += 1
        self._end.sendall(data if self._sent != 2 else data[: len(data) // 2])
        if self._sent == 2:
            raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)


def test_nothing_follows_a_part_of_a_message(ends: tuple[socket.socket, socket.socket]) -> None:
    front: Link[Any] = Link(Interrupted(ends[0]), FROM_ENGINE)  # type: ignore[arg-type]
    engine: Link[Any] = Link(ends[1], TO_ENGINE)
    front.send(Cancel(1))
    with pytest.raises(KeyboardInterrupt):
        front.send(Cancel(2))
    with pytest.raises(ConnectionError):
        front.send(Cancel(3))
    assert engine.receive() == Cancel(1)
    with pytest.raises(EOFError, match="before the end of a message"):
        engine.receive()


def refused(message: object, error: ValueError) -> None:
    pytest.fail(f"{message} was not sent: {error}")


def test_what_is_put_in_is_sent_at_once_where_the_socket_has_room(links: tuple[Link[Any], Link[Any]]) -> None:
    front, engine = links
    outbox = Outbox(engine, refused)
    outbox.put(Given(1, b"all of it"))
    assert front.arrives(0.0)
    outbox.close(60.0)


def test_what_is_put_in_waits_for_nothing_and_arrives_in_order(links: tuple[Link[Any], Link[Any]]) -> None:
    """The other end reads nothing before all of it is put in, which is more than the buffer of the socket."""
    front, engine = links
    outbox, sizes = Outbox(engine, refused), [3, 1 << 20, 0, 40_000] * 5 + [7] * 100
    for number, size in enumerate(sizes):
        outbox.put(Refusal(number, errors.BadRequest("x" * size)))
    for number, size in enumerate(sizes):
        message = front.receive()
        assert (message.number, len(str(message.error))) == (number, size)
    outbox.close(60.0)
    assert not outbox._thread.is_alive()


def test_what_many_threads_put_in_arrives_whole_and_in_the_order_of_each(links: tuple[Link[Any], Link[Any]]) -> None:
    front, engine = links
    outbox, threads, each, arrived = Outbox(front, refused), 4, 40, list[Given]()

    def put(number: int) -> None:
        for at in range(each):
            outbox.put(Given(number, bytes([at]) * (1 + 3001 * (at % 10))))

    def receive() -> None:
        for _ in range(threads * each):
            message = engine.receive()
            assert isinstance(message, Given)
            arrived.append(message)

    in_threads(receive, *(lambda number=number: put(number) for number in range(threads)))
    for number in range(threads):
        mine = [one.data for one in arrived if one.number == number]
        assert mine == [bytes([at]) * (1 + 3001 * (at % 10)) for at in range(each)]


def test_what_cannot_be_sent_is_given_back_and_the_rest_is_sent(links: tuple[Link[Any], Link[Any]]) -> None:
    front, engine = links
    found: list[object] = []
    outbox, bad = Outbox(front, lambda message, error: found.append(message)), Given(2, [object()])  # type: ignore[arg-type]
    for message in (Given(1, b"a"), bad, Given(3, b"b")):
        outbox.put(message)
    assert [engine.receive(), engine.receive()] == [Given(1, b"a"), Given(3, b"b")]
    assert found == [bad]


def test_what_is_put_in_after_the_end_of_a_link_is_dropped(links: tuple[Link[Any], Link[Any]]) -> None:
    front, engine = links
    outbox = Outbox(front, refused)
    engine.close()
    outbox.put(Cancel(1))
    front.close()
    outbox.put(Cancel(2))
    outbox.close(60.0)
    assert not outbox._thread.is_alive()


def test_a_link_whose_other_end_does_not_read_is_closed_before_more_waits(
    links: tuple[Link[Any], Link[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MOST", 1 << 20)
    front, engine = links
    outbox = Outbox(engine, refused)
    for _ in range(1000):
        outbox.put(Refusal(1, errors.BadRequest("x" * 60_000)))
        assert outbox._left < (1 << 20) + 70_000
    outbox.close(60.0)
    assert not outbox._thread.is_alive()
    with pytest.raises(EOFError):
        any(front.receive() is None for _ in range(1000))


class InterruptedInSend:
    """A socket whose sender is interrupted when a part of a frame was sent."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, data: bytearray, flags: int) -> int:
        self._end.send(data[: len(data) // 2], flags)
        raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)


def test_nothing_follows_a_part_of_what_was_put_in(ends: tuple[socket.socket, socket.socket]) -> None:
    front: Link[Any] = Link(InterruptedInSend(ends[0]), FROM_ENGINE)  # type: ignore[arg-type]
    engine: Link[Any] = Link(ends[1], TO_ENGINE)
    outbox = Outbox(front, refused)
    with pytest.raises(KeyboardInterrupt):
        outbox.put(Cancel(1))
    outbox.put(Cancel(2))
    with pytest.raises(EOFError, match="before the end of a message"):
        engine.receive()


FIRST = """
import sys, threading
from dataclasses import make_dataclass
from kvcellar.wire import decode, encode
sys.setswitchinterval(1e-6)
for number in range(100):
    inner = [make_dataclass(f"Part{at}", [("a", int), ("b", dict[str, int])]) for at in range(12)]
    kind = make_dataclass("Whole", [(f"f{at}", one) for at, one in enumerate(inner)])
    value = kind(*(one(at, {"x": 1}) for at, one in enumerate(inner)))
    data, begin, found = encode(value), threading.Barrier(4), []
    def first():
        begin.wait()
        found.append(decode(data, kind))
    threads = [threading.Thread(target=first) for _ in range(4)]
    for one in threads: one.start()
    for one in threads: one.join()
    assert found == [value] * 4, found
"""


def test_threads_that_decode_a_class_for_the_first_time_at_once_all_get_it() -> None:
    """In a process of its own, as msgspec crashes where they look at the class at the same time."""
    ran = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
