"""An engine reads reasoning and calls while it generates, and constrains calls that are required."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvcellar import Constraint, Engine
from kvcellar.engine.models import embedded
from kvcellar.errors import BadRequest
from kvcellar.text.pieces import CallArguments, CallClosed, CallOpened, Content, Reasoning, pieces_of
from tests.text.templates import THINKER

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 9}, "unit": {"enum": ["C", "F"]}},
                "required": ["days", "unit"],
                "additionalProperties": False,
            },
        },
    }
]
ASKED = [{"role": "user", "content": "How is the weather?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"days": 2, "unit": "C"}}\n</tool_call>'


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The embedded model, with a chat template that has tools and reasoning."""
    path = tmp_path_factory.mktemp("models") / "thinker"
    shutil.copytree(Path(embedded.__file__).parent, path, ignore=shutil.ignore_patterns("*.py", "__pycache__", "mtp*"))
    (path / "chat_template.jinja").write_text(THINKER)
    with Engine(path, threads=1) as opened:
        yield opened


def answered(engine, text, *, stop=(), reading, **sampling):
    """The pieces and the result where the model writes `text`."""
    prompt = engine.render(ASKED, tools=TOOLS)
    constraint = Constraint.choice([text])
    stream = engine.stream(prompt, constraint=constraint, stop=list(stop), reading=reading, max_tokens=400, **sampling)
    reasoning, pieces = 0, []
    for delta in stream:
        reasoning += delta.reasoning_tokens
        pieces += pieces_of(delta)
    return pieces, reasoning, stream.result


def test_pieces_come_with_the_deltas(engine):
    reading = engine.replies.reading(tools=TOOLS)
    pieces, reasoning, result = answered(engine, f"<think>\nhm\n</think>\n\nSure.\n{CALL}", reading=reading)
    assert "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)) == "hm"
    assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == "Sure." == result.text
    given = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
    assert json.loads(given) == {"days": 2, "unit": "C"}
    assert sum(isinstance(piece, CallArguments) for piece in pieces) > 1
    assert isinstance(pieces[-1], CallClosed)
    assert sum(isinstance(piece, CallClosed) for piece in pieces) == 1
    assert 0 < reasoning < len(result.token_ids)


def test_stop_strings_apply_to_the_content_alone(engine):
    reading = engine.replies.reading(tools=TOOLS)
    pieces, _, result = answered(engine, f"<think>\nhm days\n</think>\n\nSure.\n{CALL}", stop=["days"], reading=reading)
    assert any(isinstance(piece, CallClosed) for piece in pieces)
    assert result.choices[0].stop_string is None
    reading = engine.replies.reading(tools=TOOLS)
    pieces, _, result = answered(engine, f"<think>\nhm\n</think>\n\nSure, so.\n{CALL}", stop=[", s"], reading=reading)
    assert result.text == "Sure"
    assert result.choices[0].stop_string == ", s"
    assert not any(isinstance(piece, CallOpened) for piece in pieces)


def test_an_answer_ends_with_its_first_call_where_one_is_wanted(engine):
    reading = engine.replies.reading(tools=TOOLS, parallel=False)
    pieces, _, result = answered(engine, f"{CALL}\n{CALL}", reading=reading)
    assert sum(isinstance(piece, CallClosed) for piece in pieces) == 1
    assert result.finish_reason == "stop"
    assert len(result.token_ids) < len(engine.encode(f"{CALL}\n{CALL}", special=False))
    assert isinstance(pieces[-1], CallClosed)


def test_a_required_call_is_one_at_any_temperature(engine):
    reading = engine.replies.reading(
        tools=TOOLS, choice="required", parallel=False, variables={"enable_thinking": False}
    )
    prompt = engine.render(ASKED, tools=TOOLS, variables={"enable_thinking": False})
    for seed in range(4):
        stream = engine.stream(
            prompt, constraint=reading.constraint, reading=reading, max_tokens=200, temperature=1.5, seed=seed, top_k=40
        )
        pieces = [piece for delta in stream for piece in pieces_of(delta)]
        opened = [piece for piece in pieces if isinstance(piece, CallOpened)]
        if not any(isinstance(piece, Reasoning) for piece in pieces):
            assert [piece.name for piece in opened] == ["weather"]
            given = json.loads("".join(piece.text for piece in pieces if isinstance(piece, CallArguments)))
            assert set(given) == {"days", "unit"}


OPENS = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{%- for t in tools or [] %}{{ t | tojson }}<tool_call>{"name": "", "arguments": {}}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
KINDS = {
    "json_schema": (Constraint.json_schema(SCHEMA), '{"a": 5}', '{"b"'),
    "json_object": (Constraint.json_object(), "{}", "[1]"),
    "regex": (Constraint.regex("[0-9]+"), "55", "a"),
    "choice": (Constraint.choice(["yes", "no"]), "no", "or"),
    "grammar": (Constraint.grammar('start: "a" | /b+/'), "bb", "c"),
    "gbnf": (Constraint.grammar('root ::= "x" [0-9]'), "x1", "1"),
    "required": (None, CALL, "Sure"),
    "strict": (None, CALL, '<tool_call>\n{"name": "other"'),
}


@pytest.fixture(scope="module")
def opening(tmp_path_factory):
    """The embedded model, with a chat template whose prompt opens reasoning."""
    path = tmp_path_factory.mktemp("models") / "opening"
    shutil.copytree(Path(embedded.__file__).parent, path, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (path / "chat_template.jinja").write_text(OPENS)
    engines = {draft: Engine(path, threads=1, draft=draft) for draft in ("none", "mtp")}
    yield engines
    for one in engines.values():
        one.close()


def reading_of(engine, name):
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    if name == "required":
        return engine.replies.reading(tools=TOOLS, choice="required")
    return engine.replies.reading(answer=KINDS[name][0], tools=tools if name == "strict" else None)


@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
@pytest.mark.parametrize("names", [(), ("weather",)])
def test_a_required_call_has_no_content_that_a_format_could_bind(engine, kind, names):
    """What is generated and how it is read is as without the format, which is refused where it cannot be honoured."""
    wanted = {"tools": TOOLS, "choice": "required", "names": names}
    reading = engine.replies.reading(**wanted, answer=KINDS[kind][0])
    for text, fits in ((CALL, True), (f"<think>\nhm\n</think>\n\n{CALL}", True), (KINDS[kind][1], False)):
        for one in (reading, engine.replies.reading(**wanted)):
            matcher = engine._built.intake.grammars.matcher(one.constraint)
            assert matcher_takes(matcher, engine.encode(text, special=False)) == fits, text
    pieces, _, _ = answered(engine, f"<think>\n{CALL}\n</think>\n\n{CALL}", reading=reading)
    assert not any(isinstance(piece, Content) for piece in pieces)
    assert sum(isinstance(piece, CallOpened) for piece in pieces) == 1
    unknown = Constraint.json_schema({"not": {}}, param="response_format")
    refused = engine.replies.reading(**wanted, answer=unknown).constraint
    with pytest.raises(BadRequest, match="response_format: this json_schema cannot be honoured: Unimpl"):
        engine.generate(ASKED[0]["content"], constraint=refused, max_tokens=1)


def test_a_schema_of_a_tool_that_cannot_be_honoured_is_not_blamed_on_the_format(engine):
    parameters = {"type": "object", "properties": {"a": {"not": {}}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
    for choice in ("auto", "required"):
        made = engine.replies.reading(tools=tools, choice=choice, answer=Constraint.json_object())
        with pytest.raises(BadRequest, match=r"cannot be honoured beside reasoning and calls of tools: .*Unimpl"):
            engine.generate(ASKED[0]["content"], constraint=made.constraint, max_tokens=1)


@pytest.mark.parametrize("kind", ["regex", "choice", "grammar", "gbnf"])
def test_a_required_call_is_refused_beside_a_text_that_the_model_must_write(engine, kind):
    answer = replace(KINDS[kind][0], param="structured_outputs.x")
    assert engine.replies.reading(tools=TOOLS, answer=answer).constraint.around, "a call may be in its place"
    with pytest.raises(BadRequest, match=r"^tool_choice requires a call, and structured_outputs\.x another text"):
        engine.replies.reading(tools=TOOLS, choice="required", answer=answer)


@pytest.mark.parametrize("name", KINDS)
def test_a_constraint_begins_where_the_reasoning_ends_that_the_prompt_has_opened(opening, name):
    """The reasoning is what it is without a constraint: with drafts, with several completions, by their seed."""
    plain = opening["none"]
    prompt = plain.render(ASKED, tools=TOOLS)
    for engine in opening.values():
        constraint = reading_of(engine, name).constraint
        for how in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3, "n": 2}):
            free = plain.generate(prompt, max_tokens=10, **how)
            bound = engine.generate(prompt, max_tokens=10, constraint=constraint, **how)
            for one, other in zip(free.choices, bound.choices, strict=True):
                assert one.token_ids == other.token_ids, "no end of the reasoning is among these"
        _, right, wrong = KINDS[name]
        for text, fits in ((f"hm {{}} so\n</think>\n\n{right}", True), (f"hm\n</think>\n\n{wrong}", False)):
            matcher = engine._built.intake.grammars.matcher(constraint)
            assert matcher_takes(matcher, engine.encode(text, special=False)) == fits, text


def matcher_takes(matcher, tokens):
    for token in tokens:
        matcher.wait(60.0)
        if not matcher.allows((), token):
            return False
        matcher.accept(token)
    return True


def test_compact_json_is_compact_behind_reasoning(opening):
    engine = opening["none"]
    constraint = engine.replies.reading(answer=Constraint.json_schema(SCHEMA, compact=True)).constraint
    for text, fits in (('hm</think>{"a":5}', True), ('hm</think>{"a": 5}', False)):
        matcher = engine._built.intake.grammars.matcher(constraint)
        assert matcher_takes(matcher, engine.encode(text, special=False)) == fits


def test_a_schema_that_binds_nothing_is_not_checked_as_a_constraint(engine):
    """Within the bounds on all tools, any schema may describe what the model writes on its own."""
    many = {"type": "object", "properties": {f"p{n}": {} for n in range(2100)}}
    odd = {"x-guidance": {}, "properties": {"a": {"not": {}, "unknown": 5}}}
    for schema in (many, odd):
        tools = [{"type": "function", "function": {"name": "free", "parameters": schema}}]
        assert engine.replies.reading(tools=tools).constraint is None
        answer = engine.replies.reading(tools=tools, answer=Constraint.json_object()).constraint
        strict = engine.replies.reading(
            tools=[*tools, {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
        ).constraint
        for constraint in (answer, strict):
            matcher = engine._built.intake.grammars.matcher(constraint)
            call = '<tool_call>\n{"name": "free", "arguments": {"b": [1]}}\n</tool_call>'
            assert matcher_takes(matcher, engine.encode(call, special=False))
        with pytest.raises(BadRequest, match=r"2100 properties|cannot have x-guidance"):
            engine.replies.reading(tools=tools, choice="required")
        strictly = [{"type": "function", "function": {**tools[0]["function"], "strict": True}}]
        with pytest.raises(BadRequest, match=r"2100 properties|cannot have x-guidance"):
            engine.replies.reading(tools=strictly)
    for schema, said in (({"a": "x" * 300_000}, "at most 262144"), (nested(70), "nested more than 64")):
        with pytest.raises(BadRequest, match=said):
            engine.replies.reading(tools=[{"type": "function", "function": {"name": "free", "parameters": schema}}])


def nested(levels):
    return {} if not levels else {"a": nested(levels - 1)}


def test_tools_are_in_the_prompt(engine):
    with_tools = engine.decode(engine.render(ASKED, tools=TOOLS))
    assert "weather" in with_tools
    assert '"minimum"' in with_tools
    assert '"minimum"' not in engine.decode(engine.render(ASKED))


def test_the_form_is_known(engine):
    assert (engine.replies.form, engine.replies.refusal) == ("hermes", None)
    assert engine.replies.described == "tools: calls are read as hermes (the chat template is that of a known family)"


def test_wrong_tools_are_refused(engine):
    for tools, choice, names, said in (
        ([{"type": "function", "function": {"name": "a b"}}], "auto", (), "name is up to 64"),
        ([{"type": "function", "function": {}}], "auto", (), "not null"),
        (TOOLS, "required", ("other",), "no tool has that name"),
        (None, "required", (), "there are no tools"),
        (TOOLS * 2, "auto", (), "the same name"),
        ([{"type": "web_search"}], "auto", (), "only function"),
    ):
        with pytest.raises(BadRequest, match=said):
            engine.replies.reading(tools=tools, choice=choice, names=names)


def test_tools_are_refused_where_the_template_does_not_render_them():
    with Engine(threads=1) as plain:
        assert plain.replies.form is None
        assert plain.replies.described == "tools: refused (its chat template does not render tools)"
        with pytest.raises(BadRequest, match="does not render tools"):
            plain.replies.reading(tools=TOOLS)
        reading = plain.replies.reading()
        result = plain.chat(ASKED, max_tokens=6, temperature=0.0, reading=reading)
        assert result.text == plain.chat(ASKED, max_tokens=6, temperature=0.0).text
