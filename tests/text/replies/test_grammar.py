"""What a grammar allows is read back as calls of the tools, and what is no call is refused where one is required."""

import random
import string

import pytest
from jsonschema import validate
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from kvcellar.constraint import Constraint
from kvcellar.engine.sample.compiler import as_read
from kvcellar.errors import BadRequest
from kvcellar.text.replies.detection import known
from kvcellar.text.replies.grammar import Grammar, Rules
from kvcellar.text.replies.tools import checked
from tests.text.made import byte_level
from tests.text.replies.chats import TEMPLATES
from tests.text.replies.reads import pieces_of, read

PROPERTIES = {
    "city": {"type": "string", "maxLength": 8},
    "unit": {"enum": ["C", "F"], "type": "string"},
    "days": {"type": "integer", "minimum": -9, "maximum": 99},
    "exact": {"type": "boolean"},
    "where": {"$ref": "#/$defs/place"},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": ["days", "unit"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"lat": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["lat"],
            "additionalProperties": False,
        }
    },
}
NONE = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = checked(
    [
        {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
        {"type": "function", "name": "get-time", "parameters": NONE},
    ]
)
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>"]
MARKS += ["<|constrain|>", "<|call|>", "<|start|>", "<|end|>", '<|"|>', "<|tool_call>", "<tool_call|>"]
MARKS += ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<|tool_call_begin|>"]


def vocabulary(special: bool):
    """A tokenizer that has the marks as tokens, or has none of them."""
    made = byte_level()
    if special:
        made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return made


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "text"])
def words(request):
    made = vocabulary(request.param)
    ends = [made.token_to_id("</s>")]
    added = {about.content: token for token, about in made.get_added_tokens_decoder().items()}
    return made, LLTokenizer(made.to_str(), n_vocab=made.get_vocab_size(), eos_token=ends), added, ends[0]


def matcher(words, grammar: str) -> LLMatcher:
    found = LLMatcher(words[1], grammar, log_level=0)
    assert not found.is_error(), f"{found.get_error()}\n{grammar}"
    return found


def sampled(words, grammar: str, seed: int) -> list[str] | None:
    """Texts of random tokens that the grammar allows, up to its end; None if it does not end soon."""
    made, _, _, end = words
    found, parts, chance = matcher(words, grammar), list[str](), random.Random(seed)
    for _ in range(300):
        mask = found.compute_bitmask()
        allowed = [n for n in range(made.get_vocab_size()) if mask[n // 8] >> (n % 8) & 1]
        assert allowed, found.get_error()
        if end in allowed and (len(allowed) == 1 or chance.random() < 0.7):
            return parts
        token = chance.choice([one for one in allowed if one != end])
        assert found.consume_token(token), found.get_error()
        parts.append(token)
    return None


def texts(made, ids: list[int]) -> tuple[list[str], frozenset[str]]:
    """Texts of runs of ordinary tokens, and of control tokens, which are returned beside them."""
    parts: list[str] = []
    run: list[int] = []
    special = {token for token, about in made.get_added_tokens_decoder().items() if about.special}
    for token in [*ids, None]:
        if token is not None and token not in special:
            run.append(token)
            continue
        parts += [made.decode(run, skip_special_tokens=False)] if run else []
        run = []
        parts += [made.id_to_token(token)] if token is not None else []
    return parts, frozenset(made.id_to_token(token) for token in special)


def test_a_mark_may_have_any_character(words):
    """A checkpoint declares what its marks are."""
    for char in string.punctuation + "\n\t\x7f【»🙂é\u2028\xa0":
        mark = f"a{char}b"
        ids = words[0].encode(f"so a b {mark}", add_special_tokens=False).ids
        for rules, find in ((Rules({}), Rules.head), (Rules({}), Rules.until)):
            found = matcher(words, rules.grammar(f"{find(rules, 'head', mark, ())} {rules.literal(char)}"))
            assert found.try_consume_tokens(ids) == len(ids), mark
            more = words[0].encode(char, add_special_tokens=False).ids
            assert (found.try_consume_tokens(more), found.is_accepting()) == (len(more), True), mark
        rules = Rules({})
        found = matcher(words, rules.grammar(rules.text("TEXT", (mark,))))
        assert found.try_consume_tokens(ids) < len(ids), mark


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> range:
    return range(60 if request.config.getoption("--long") else 24)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_required_call_may_be_is_read_back(words, name, seeds):
    form = known(TEMPLATES[name])
    grammar = Grammar(form, TOOLS, words[2]).required(thinking=None, parallel=True)
    found = 0
    opening = "<|start|>assistant" if name == "harmony" else ""
    for seed in seeds:
        ids = sampled(words, grammar, seed)
        if ids is None:
            continue
        parts, special = texts(words[0], ids)
        seen = read(pieces_of(form, parts, tools=TOOLS, special=special, opening=opening))
        assert seen.calls, parts
        assert (seen.content.strip(), seen.unclosed) == ("", 0), parts
        for called, given in seen.calls:
            if name != "gemma4" or "where" not in given:
                validate(given if "city" not in given else {**given, "city": "x"}, TOOLS.named(called).schema)
        found += len(seen.calls)
    assert found >= 3


@pytest.mark.parametrize("name", TEMPLATES)
def test_only_one_call_is_allowed_where_one_is_wanted(words, name):
    form = known(TEMPLATES[name])
    grammar = Grammar(form, TOOLS.only(["get-time"]), words[2]).required(thinking=None, parallel=False)
    for seed in range(8):
        ids = sampled(words, grammar, seed)
        if ids is not None:
            parts, special = texts(words[0], ids)
            opening = "<|start|>assistant" if name == "harmony" else ""
            seen = read(pieces_of(form, parts, tools=TOOLS, special=special, opening=opening))
            assert seen.calls == [("get-time", {})]


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_that_is_no_call_is_refused_where_one_is_required(words, name):
    grammar = Grammar(known(TEMPLATES[name]), TOOLS, words[2]).required(thinking=None, parallel=True)
    made = words[0]
    for text in ("Sure, I can", '{"name": "other"', "weather()", "\n\n\n"):
        ids = made.encode(text, add_special_tokens=False).ids
        assert matcher(words, grammar).try_consume_tokens(ids) < len(ids)


@pytest.mark.parametrize("name", [name for name, text in TEMPLATES.items() if known(text).thoughts])
def test_reasoning_is_free_in_front_of_a_required_call(words, name):
    form, made = known(TEMPLATES[name]), words[0]
    thought = form.thoughts[0]
    rest = f"so {{}} <x>\n{thought.close}\n"
    for opened, text in ((None, thought.open + rest), (thought.open, rest)):
        grammar = Grammar(form, TOOLS, words[2]).required(thinking=opened, parallel=True)
        ids = made.encode(text, add_special_tokens=False).ids
        assert matcher(words, grammar).try_consume_tokens(ids) == len(ids), (opened, text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_strict_call_is_constrained_after_free_text(words, name):
    form, made = known(TEMPLATES[name]), words[0]
    if form.channels is not None and "<|start|>" not in words[2]:
        with pytest.raises(BadRequest, match="strict tools cannot be used with this model: "):
            Grammar(form, TOOLS, words[2]).strict(thinking=None, parallel=True)
        return
    grammar = Grammar(form, TOOLS, words[2]).strict(thinking=None, parallel=True)
    section = form.sections[0] if form.sections else None
    before, begin = "Sure.\n", section.begin[0].strip() if section is not None else ""
    free, wrong = "Sure, why not.", " nothing of that kind at all"
    if section is not None and section.bare:
        before = ""
        wrong = "get-time(x=1)" if name.startswith("pythonic") else '"name": "other", "parameters": {}}'
    elif section is None:
        before, begin, wrong = "<|channel|>commentary ", "to=functions.", "other<|message|>{}"
        free = "<|channel|>final<|message|>Sure."
    for text, fits in ((free, True), (f"{before}{begin}{wrong}", False)):
        ids = made.encode(text, add_special_tokens=False).ids
        assert (matcher(words, grammar).try_consume_tokens(ids) == len(ids)) == fits, (text, grammar)


FREE = checked(
    [
        {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}},
        {"type": "function", "function": {"name": "get-time", "parameters": {"x-guidance": {}, "allOf": 5}}},
    ]
)


def nudged(words, grammar: str, texts: list[str], seed: int) -> list[int]:
    """Random tokens that the grammar allows, and texts of what may be calls, as far as it allows them, up to where it
    may end."""
    made, _, _, end = words
    found, tokens, chance = matcher(words, grammar), list[int](), random.Random(seed)
    for _ in range(400):
        if chance.random() < 0.3:
            ids = made.encode(chance.choice(texts), add_special_tokens=False).ids
            for token in ids:
                if found.try_consume_tokens([token]) == 0:
                    break
                tokens.append(token)
        mask = found.compute_bitmask()
        allowed = [n for n in range(made.get_vocab_size()) if mask[n // 8] >> (n % 8) & 1]
        assert allowed, found.get_error()
        if end in allowed and (len(allowed) == 1 or chance.random() < 0.1):
            break
        tokens.append(chance.choice([one for one in allowed if one != end]))
        assert found.consume_token(tokens[-1]), found.get_error()
    return tokens


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_strict_call_that_is_read_fits_its_schema(words, name, seeds):
    """Where the model decides whether it calls, too: random tokens, the beginnings of calls, wrong calls, and marks
    that are spelled in other tokens than their own. A tool that is not strict may be called in any way."""
    form, made = known(TEMPLATES[name]), words[0]
    if form.channels is not None and "<|start|>" not in words[2]:
        return
    grammar = Grammar(form, FREE, words[2], binds=False).strict(thinking=None, parallel=True)
    whole = [
        Grammar(form, FREE.only([tool]), words[2], binds=False).required(thinking=None, parallel=False)
        for tool in ("weather", "get-time")
    ]
    marks = [mark.strip() for section in form.sections for mark in section.begin] or ["<|channel|>x to=functions."]
    good = 'weather{"days": 1, "unit": "C"}'
    tries = [*marks, "\n", " ", '"', "weather", '{"name": "weather", "parameters": {"a": 1}}', "[weather(a=1)]", good]
    tries += ["<think>", "</think>", "<|message|>", "<|end|>", "<|start|>assistant", "<|channel|>final", "{", "["]
    opening = "<|start|>assistant" if name == "harmony" else ""
    found = {"weather": 0, "get-time": 0}
    for seed in seeds:
        ids = nudged(words, grammar, tries, seed) if seed % 3 == 2 else sampled(words, whole[seed % 3], seed)
        if ids is None or matcher(words, grammar).try_consume_tokens(ids) < len(ids):
            continue
        parts, special = texts(made, ids)
        seen = read(pieces_of(form, parts, tools=FREE, special=special, opening=opening))
        for called, given in seen.calls:
            found[called] += 1
            if called == "weather" and (name != "gemma4" or "where" not in given):
                validate(given if "city" not in given else {**given, "city": "x"}, SCHEMA)
    assert found["weather"] > 0
    assert found["get-time"] > 0


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_mark_that_is_spelled_in_other_tokens_is_no_way_around_a_strict_schema(words, name):
    """A reader finds it, so no text may have it."""
    form, made = known(TEMPLATES[name]), words[0]
    if not form.sections or not words[2]:
        return
    grammar = Grammar(form, TOOLS, words[2]).strict(thinking=None, parallel=True)
    for section in form.sections:
        mark = section.begin[0].strip()
        if section.bare or not any(mark.startswith(one) for one in words[2]):
            continue
        spelled = [token for char in mark for token in vocabulary(False).encode(char, add_special_tokens=False).ids]
        same = [made.token_to_id(vocabulary(False).id_to_token(token)) for token in spelled]
        assert matcher(words, grammar).try_consume_tokens(same) < len(same), mark


@pytest.mark.parametrize("opened", [True, False])
def test_a_strict_call_is_not_one_in_the_reasoning(words, opened):
    form, made = known(TEMPLATES["hermes"]), words[0]
    grammar = Grammar(form, TOOLS, words[2]).strict(thinking="<think>" if opened else None, parallel=True)
    thought = ("" if opened else "<think>") + "so I write <tool_call>like this</tool_call>"
    for text, fits in ((f"{thought}</think>\nYes.", True), (f"{thought}</think>\n<tool_call>like this", False)):
        ids = made.encode(text, add_special_tokens=False).ids
        assert (matcher(words, grammar).try_consume_tokens(ids) == len(ids)) == fits, text


def composed(words, constraint: Constraint) -> LLMatcher:
    return matcher(words, as_read(constraint))


def test_an_answer_that_is_json_may_come_after_reasoning(words):
    form, made = known(TEMPLATES["hermes"]), words[0]
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    call = '<tool_call>\n{"name": "get-time", "arguments": {}}\n</tool_call>'
    for calls in (False, True):
        around = Grammar(form, TOOLS, words[2]).answer(thinking=None, calls=calls, parallel=True)
        constraint = Constraint("json_schema", schema, around=around)
        for text, fits in (("<think>\nso\n</think>\n\n" + '{"a": 5}', True), ('{"a": "x"}', False), (call, calls)):
            ids = made.encode(text, add_special_tokens=False).ids
            found = composed(words, constraint)
            assert (found.try_consume_tokens(ids) == len(ids) and found.is_accepting()) == fits, text


LARK = 'start: "a" "}" tail\ntail: "b" | /c{2}/ // } start: "x"\n%ignore / /\n'


@pytest.mark.parametrize(
    ("kind", "source", "right", "wrong"),
    [
        ("regex", r"a/b\\[0-9]\/\n?", "a/b\\7/", "a/b"),
        ("choice", '["yes \\"or\\" no", "Köln\\n", "</think>x"]', 'yes "or" no', "yes"),
        ("json_object", "", '{"b": [1]}', "[1]"),
        ("grammar", LARK, "a } cc", "a}"),
        ("grammar", 'root ::= "a" [0-9]+', "a12", "12"),
    ],
)
def test_an_answer_of_any_kind_may_come_after_reasoning(words, kind, source, right, wrong):
    """Else the constraint would hold for the reasoning that the prompt has opened, and there would be no content."""
    form, made = known(TEMPLATES["hermes"]), words[0]
    for thinking, opening in ((None, ""), (None, "<think>\nso\n</think>\n\n"), ("<think>", "so\n</think>\n\n")):
        around = Grammar(form, TOOLS, words[2]).answer(thinking=thinking, calls=False, parallel=True)
        for text, fits in ((right, True), (wrong, False)):
            ids = made.encode(opening + text, add_special_tokens=False).ids
            found = composed(words, Constraint(kind, source, around=around))
            assert (found.try_consume_tokens(ids) == len(ids) and found.is_accepting()) == fits, (around, text)
