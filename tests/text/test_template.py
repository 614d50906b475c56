"""Templates: what transformers renders, what a client cannot do with them, and what they themselves cannot do."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from kvcellar.errors import BadRequest, ModelRefused, TemplateFailed
from kvcellar.text.conversation import Caps, Marker, unmarked, unused
from kvcellar.text.template import ChatTemplate, Rendered
from kvcellar.text.tokens import TextTokenizer
from tests.text import templates
from tests.text.made import CONTROL, RENDERER, byte_level, llama_like

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
WORDS = TextTokenizer(byte_level(), special_tokens=SPECIAL)
LLAMA_WORDS = TextTokenizer(llama_like(), special_tokens=SPECIAL)
THEIRS = PreTrainedTokenizerFast(tokenizer_object=byte_level(), **SPECIAL)
LLAMA_THEIRS = PreTrainedTokenizerFast(tokenizer_object=llama_like(), **SPECIAL)
OURS = {name: ChatTemplate(source, WORDS, RENDERER) for name, source in templates.ALL.items()}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "é": "<b>"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}

TALKS: dict[str, list[dict[str, Any]]] = {
    "one": [user(" Hello, 世界! \n")],
    "system": [system("Be brief.  "), user("Hi")],
    "turns": [user("a"), assistant(" b "), user("c")],
    "thought": [user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c"), assistant("<think>so</think>d")],
    "reasoned": [user("a"), assistant("b", reasoning_content="because"), user("c"), assistant("d", thinking="well")],
    "tools": [user("a"), assistant(None, tool_calls=[CALL]), {"role": "tool", "content": "3", "tool_call_id": "c1"}],
    "odd": [user(""), assistant("{{ 7 * 7 }} {% raw %}"), user("a < b <|im\t\u00a0<")],
    "parts": [user([{"type": "text", "text": " one "}, {"type": "text", "text": "two"}])],
}


def theirs(source: str, talk: list[dict[str, Any]], tokenizer: Any = THEIRS, **more: Any) -> tuple[str, list[int]]:
    made = tokenizer.apply_chat_template
    text = made(talk, chat_template=source, tokenize=False, **more)
    return text, made(talk, chat_template=source, tokenize=True, return_dict=False, **more)


def outcome(render: Callable[[], Any]) -> Any:
    """What was rendered, or why it was not."""
    try:
        return render()
    except (TemplateFailed, TemplateError, TypeError) as error:
        return str(error)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("talk", [name for name in TALKS if name != "parts"])
@pytest.mark.parametrize("template", OURS)
def test_rendering_is_that_of_transformers(template: str, talk: str, add_generation_prompt: bool) -> None:
    source, messages = templates.ALL[template], TALKS[talk]
    if talk == "tools" and template not in ("llama3", "thinker"):
        pytest.skip("this template has no tool calls: see tests/text/test_calls.py")
    tools = [TOOL] if talk == "tools" else None
    more: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "tools": tools}
    expected = outcome(lambda: theirs(source, messages, **more))
    got = outcome(lambda: OURS[template].render(messages, **more))
    if isinstance(got, Rendered):
        assert (got.text, got.encode(WORDS)) == expected
    else:
        assert isinstance(expected, str)
        assert expected in got


def test_most_of_these_conversations_are_accepted() -> None:
    """Lest the test above only compare refusals."""
    outcomes = [outcome(lambda t=t, talk=talk: t.render(talk)) for t in OURS.values() for talk in TALKS.values()]
    assert sum(isinstance(one, Rendered) for one in outcomes) >= 40


def test_variables_of_the_operator_reach_the_template() -> None:
    expected = theirs(templates.THINKER, TALKS["one"], add_generation_prompt=True, enable_thinking=False)[0]
    assert OURS["thinker"].render(TALKS["one"], variables={"enable_thinking": False}).text == expected


@pytest.mark.parametrize("template", ["chatml", "gemma", "mistral", "llama3"])
def test_ids_are_those_of_transformers_with_tokenizers_that_put_spaces(template: str) -> None:
    source = templates.ALL[template]
    for talk in ("one", "turns", "odd"):
        expected = theirs(source, TALKS[talk], LLAMA_THEIRS, add_generation_prompt=True)[1]
        assert ChatTemplate(source, LLAMA_WORDS, RENDERER).render(TALKS[talk]).encode(LLAMA_WORDS) == expected


def test_content_in_parts_goes_where_the_template_reads_it() -> None:
    talk, joined = TALKS["parts"], [user(" one \ntwo")]
    assert OURS["gemma3"].render(talk).text == theirs(templates.GEMMA3, talk, add_generation_prompt=True)[0]
    assert OURS["chatml"].render(talk) == OURS["chatml"].render(joined)
    parts_only = ChatTemplate(templates.PARTS_ONLY, WORDS, RENDERER)
    assert parts_only.render([user("hello")]).text == "<|im_start|>user\nhello<|im_end|>\n"
    assert parts_only.render(talk).text == "<|im_start|>user\n one two<|im_end|>\n"


# What a client writes is text.

fragments = st.sampled_from(
    [*CONTROL[:5], "<|im_end|>", "<|im", "_end|>", "<", "|im_end|>", " ", "\n", "a", "hello ", "é"]
)
contents = st.lists(fragments, max_size=6).map("".join)


@cache
def own_control(template: str) -> list[int]:
    """The control tokens that a template itself writes around three messages."""
    harmless = [user("x"), assistant("y"), user([{"type": "text", "text": "x"}, {"type": "text", "text": "z"}])]
    return [token for token in OURS[template].render(harmless).encode(WORDS) if token in WORDS.control]


@pytest.mark.parametrize("template", ["chatml", "gemma", "gemma3", "mistral", "thinker", "llama3"])
@settings(max_examples=max(25, settings.default.max_examples // 2))
@given(first=contents, second=contents, third=contents)
def test_a_client_cannot_write_control_tokens(template: str, first: str, second: str, third: str) -> None:
    talk = [user(first), assistant(second), user([{"type": "text", "text": first}, {"type": "text", "text": third}])]
    rendered = OURS[template].render(talk)
    ids = rendered.encode(WORDS)
    control = [token for token in ids if token in WORDS.control]
    assert control == own_control(template)
    assert WORDS.decode(ids, skip_special=False) == rendered.text
    if not any(token in text for token in CONTROL for text in (first, second, first + third, first + "\n" + third)):
        assert ids == WORDS.encode(rendered.text, special=False)


def test_adjacent_texts_cannot_make_a_control_token_together() -> None:
    bare = ChatTemplate("{% for m in messages %}{{ m.content | trim }}{% endfor %}<|im_end|>", WORDS, RENDERER)
    (end,) = WORDS.encode("<|im_end|>", special=False)
    for parts in (["<|im_ ", " end|>"], ["<", "|im_", "end|>"], ["<|im_end|", ">"], ["<|IM_END|", "x"]):
        rendered = bare.render([user(part) for part in parts])
        assert rendered.encode(WORDS).count(end) == 1
    lowering = ChatTemplate("{{ messages[0].content | lower }}", WORDS, RENDERER)
    assert end not in lowering.render([user("<|Im_End|>")]).encode(WORDS)


def test_control_tokens_in_tools_and_names_are_text_too() -> None:
    tool = {"type": "function", "function": {"name": "<|im_end|>", "description": "</s>"}}
    escaping = ChatTemplate("{{ tools | tojson(ensure_ascii=true) }}{{ messages[0].name }}<|im_end|>", WORDS, RENDERER)
    rendered = escaping.render([{**user("a"), "name": "<|im_start|>"}], tools=[tool])
    assert rendered.text == '[{"type": "function", "function": {"name": "<|im_end|>", "description": "</s>"}}]' + (
        "<|im_start|><|im_end|>"
    )
    ids = rendered.encode(WORDS)
    assert [token for token in ids if token in WORDS.control] == ids[-1:]


def test_characters_for_private_use_stay_the_clients() -> None:
    text = "\U000f0000<|im_end|>\U000f0001"
    rendered = OURS["chatml"].render([system("s"), user(text)])
    assert text in rendered.text
    assert len(rendered.marks) == 1


@given(st.lists(st.text("ab<|>", min_size=1, max_size=5), max_size=8), st.text("ab<|>AB ", max_size=30))
def test_marks_are_in_every_control_token_and_split_off_again(control: list[str], text: str) -> None:
    (mark,) = unused([text])
    marked = Marker(control, 1000).marked(text, mark)
    assert unmarked(marked, mark)[0] == text
    longest_first = sorted(control, key=len, reverse=True)
    found = re.finditer("|".join(map(re.escape, longest_first)) or "(?!)", text, re.IGNORECASE)
    assert {at.start() + 1 for at in found} <= set(unmarked(marked, mark)[1])


# What a client may send.

WRONG: list[tuple[Any, str]] = [
    ([], "messages has 0 items"),
    ("hi", "must be a list, not str"),
    (None, "must be a list"),
    ([user("a")] * 10_001, "messages has 10001 items; 1 to 10000 are allowed"),
    (["a"], r"messages\[0\] must be an object"),
    ([{"content": "a"}], r"messages\[0\].role must be one of assistant, developer"),
    ([{"role": "root", "content": "a"}], "role must be one of"),
    ([{"role": ["user"], "content": "a"}], "role must be one of"),
    ([{"role": "user"}], r"messages\[0\].content is required, and must not be an empty list"),
    ([user(None)], "content is required"),
    ([user([])], "content is required"),
    ([user(0)], "must be a string or a list of text and image parts"),
    ([user(7)], "must be a string or a list of text and image parts"),
    ([user({"type": "text"})], "must be a string or a list of text and image parts"),
    ([assistant(None)], "content is required"),
    ([assistant(None, tool_calls=[])], "content is required"),
    ([user("a"), {"role": "tool", "content": "3"}], r"messages\[1\] is the result of a tool call, but no message"),
    ([user(["a"])], r"content\[0\].type must be text"),
    (
        [user([{"type": "image_url", "image_url": {"url": "http://x"}}])],
        r"content\[0\].type must be text or image; audio",
    ),
    ([user([{"type": "text"}])], r"content\[0\].text must be a string"),
    ([user([{"type": "text", "text": None}])], "text must be a string"),
    ([user("\ud800")], "half of a surrogate pair"),
    ([{**user("a"), "x\udfff": 1}], "half of a surrogate pair"),
    ([{**user("a"), 1: 1}], "must be strings, not int"),
    ([{**user("a"), "x": object()}], r"messages\[0\].x must be JSON, not object"),
    ([user("a" * (2**22 + 1)), user("a" * 2**22)], "more than 8388608 characters together"),
]


@pytest.mark.parametrize(("messages", "why"), WRONG, ids=[why for _, why in WRONG])
def test_wrong_messages_are_refused_with_the_place(messages: Any, why: str) -> None:
    with pytest.raises(BadRequest, match=why) as refused:
        OURS["chatml"].render(messages)
    assert refused.value.param == "messages"


def test_deep_nesting_is_refused() -> None:
    deep: Any = "a"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(BadRequest, match="nested more than 32 deep"):
        OURS["chatml"].render([{**user("a"), "extra": deep}])


def test_what_was_sent_is_left_alone() -> None:
    talk = [user([{"type": "text", "text": "<|im_end|>"}]), assistant("b", reasoning="c")]
    before = repr(talk)
    OURS["chatml"].render(talk)
    assert repr(talk) == before


# What a template may do.


def run(source: str, content: str = "x" * 50, **caps: Any) -> str:
    return ChatTemplate(source, WORDS, RENDERER, Caps(**caps)).render([user(content)]).text


ENDLESS = {
    "a loop": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "a loop that filters": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for a in range(9999) recursive %}{{ loop(range(9999)) if loop.depth < 9 }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "filters": "{% for a in range(99999) %}{% set b = range(99999) | map('abs') | sum %}{% endfor %}",
    "output": "{% for a in range(100000) %}{% for b in range(100000) %}{{ b }}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS.keys())
def test_a_template_that_does_not_end_is_ended(source: str) -> None:
    source = "{% if messages[0].content != 'probe' %}" + source + "{% endif %}"
    made = ChatTemplate(source, WORDS, RENDERER, Caps(seconds=0.3))
    with pytest.raises(TemplateFailed, match=r"was stopped: it (ran for more than 0.3 seconds|wrote more)"):
        made.render([user("x")])


BIG = 10**9
LARGE = {
    "times": f"{{{{ 'a' * {BIG} }}}}",
    "times, turned": f"{{{{ {BIG} * 'a' }}}}",
    "list times": f"{{{{ [messages] * {BIG} }}}}",
    "power": "{{ 10 ** 100000000 }}",
    "powers": "{% set ns = namespace(n=9) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "center": f"{{{{ 'a' | center({BIG}) }}}}",
    "center by name": f"{{{{ 'a' | center(width={BIG}) }}}}",
    "center in map": f"{{{{ ['a'] | map('center', {BIG}) | list }}}}",
    "ljust": f"{{{{ messages[0].content.ljust({BIG}) }}}}",
    "zfill": f"{{{{ messages[0]['content'].zfill({BIG}) }}}}",
    "expandtabs": f"{{{{ '\\t'.expandtabs({BIG}) }}}}",
    "indent": f"{{{{ 'a\\nb' | indent({BIG}) }}}}",
    "indent by text": "{{ ('a\n' * 99999) | indent('b' * 9999) }}",
    "batch": f"{{{{ [1] | batch({BIG}, 0) | list }}}}",
    "slice": f"{{{{ [1] | slice({BIG}) | list }}}}",
    "round": f"{{{{ 1.5 | round({BIG}, 'ceil') }}}}",
    "percent": f"{{{{ '%{BIG}d' % 1 }}}}",
    "percent star": f"{{{{ '%*d' % ({BIG}, 1) }}}}",
    "percent named": f"{{{{ '%(a){BIG}d' % {{'a': 1}} }}}}",
    "percent often": "{{ ('%(a)s' * 99999) % {'a': 'b' * 99999} }}",
    "format filter": f"{{{{ '%{BIG}d' | format(1) }}}}",
    "format": f"{{{{ '{{:{BIG}d}}'.format(1) }}}}",
    "format nested": f"{{{{ '{{:{{}}d}}'.format(1, {BIG}) }}}}",
    "format often": "{{ ('{0}' * 99999).format('b' * 99999) }}",
    "replace": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "replace nothing": "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
    "join": "{{ range(99999) | join('b' * 99999) }}",
    "join method": "{{ ('b' * 99999).join(range(99999) | map('string')) }}",
    "tojson": f"{{{{ [[1]] | tojson(indent={BIG}) }}}}",
    "doubling": "{% set ns = namespace(a='a') %}{% for i in range(99) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "adding": "{% set ns = namespace(a='a') %}{% for i in range(99) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "nesting": "{% set ns = namespace(a='a') %}{% for i in range(99) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}",
    "nesting dicts": "{% set n = namespace(a=0) %}{% for i in range(99) %}{% set n.a = {1: n.a, 2: n.a} %}{% endfor %}",
    "nesting tuples": "{% set n = namespace(a=0) %}{% for i in range(99) %}{% set n.a = (n.a, n.a) %}{% endfor %}",
    "quoting": "{% set ns = namespace(a='\"') %}{% for i in range(99) %}{% set ns.a = ns.a | tojson %}{% endfor %}",
    "a macro's output": "{% macro f() %}{% for i in range(999) %}{{ 'a' * 999999 }}{% endfor %}{% endmacro %}{{ f() }}",
    "a block's output": "{% set b %}{% for i in range(9999) %}{{ 'a' * 9999999 }}{% endfor %}{% endset %}",
    "a list of large": "{{ range(9999) | map('center', 9999999) | list | length }}",
    "output": "{% for i in range(9999) %}{{ 'a' * 99999 }}{% endfor %}",
    "title": "{{ ('a ' * 9999999) | title }}",
    "words": "{{ ('a ' * 9999999) | wordcount }}",
    "split": "{{ ('a ' * 9999999).split() | length }}",
    "split at": "{{ ('a,' * 9999999).split(',') | length }}",
    "lines": "{{ ('a\n' * 9999999).splitlines() | length }}",
    "characters": "{{ ('é' * 9999999) | list | length }}",
    "characters by a filter": "{{ ('é' * 9999999) | select | list | length }}",
    "one of many": "{{ ('a' * 9999999) | groupby('b') | length }}",
    "percent encoding": "{{ ('a' * 9999999) | urlencode | length }}",
    "escaping": "{{ (('&' * 39999999) | e) | length }}",
    "parts joined at once": "{% set a = 'a' * 60000000 %}{{ (" + " ~ ".join("a" * 99) + ") | length }}",
    "wide parts joined": "{% set a = 'a' * 15000000 %}{{ (a ~ a ~ '😀') | length }}",
    "slices": "{% set a = 'a' * 60000000 %}" + "".join(f"{{% set a{n} = a[1:] %}}" for n in range(99)),
    "slices of a list": "{% set a = [1] * 900000 %}" + "".join(f"{{% set a{n} = a[1:] %}}" for n in range(99)),
    "macros that return much": "{% macro f() %}{{ 'a' * 9000000 }}{% endmacro %}"
    + "".join(f"{{% set a{n} = f() %}}" for n in range(99)),
    "iterators": "{% set a = range(99999) %}{{ [a, a, a, a, a, a, a, a, a, a, a, a] | map('map') | list | length }}"
    "{% set a = 'ab' * 200000 %}{{ [a, a, a, a] | map('reverse') | map('list') | list | length }}",
    "numbers from digits": "{{ ('f' * 9999999) | int(0, 16) }}",
    "printed lists": "{{ ['\x00' * 40000000] ~ '' }}",
    "sum of lists": "{{ ([[1]] * 99999) | sum(start=[]) | length }}",
}


@pytest.mark.parametrize("source", LARGE.values(), ids=LARGE.keys())
def test_a_template_that_would_fill_memory_is_stopped_or_bounded(source: str) -> None:
    """Its next run is as the one before it."""
    source = "{% if messages[0].content == 'x' %}" + source + "{% else %}{{ messages[0].content }}{% endif %}"
    made, stopped = ChatTemplate(source, WORDS, RENDERER, Caps(seconds=1.0)), 0
    assert made.render([user("y")]).text == "y"
    try:
        assert len(made.render([user("x")]).text) <= Caps().output_chars
    except TemplateFailed as failed:
        stopped = len(str(failed))
    assert stopped < 2000
    assert made.render([user("y")]).text == "y"


FAULTY = {
    "{{ raise_exception('no ' ~ messages[0].content) }}": "refused these messages: no <|im_end|>",
    "{{ nothing.at.all }}": "UndefinedError",
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{{ messages[0].content + 1 }}": "TypeError",
    "{{ 'a'.index('b') }}": "ValueError",
    "{{ range(100001) }}": "OverflowError",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{% include 'x' %}": "TypeError",
    "{{ messages.append(1) }}": "SecurityError",
    "{{ ''.__class__.__mro__ }}": "SecurityError",
    "{{ raise_exception.__globals__.re }}": "SecurityError",
    "{{ strftime_now('%c' * 501) }}": "strftime_now has a format of 1002 characters; 1000 are allowed",
    "{% set messages.x = 1 %}": "cannot assign attribute on non-namespace object",
}


@pytest.mark.parametrize(("source", "why"), FAULTY.items(), ids=FAULTY.keys())
def test_an_error_of_a_template_is_reported(source: str, why: str) -> None:
    made = ChatTemplate(source, WORDS, RENDERER)
    with pytest.raises(TemplateFailed, match=why) as failed:
        made.render([user("<|im_end|>")])
    assert failed.value.param == "messages"


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ a", "{% generation %}", "{{ 'a' | unknown }}", "(" * 9 + "{{ (" * 9]
)
def test_what_is_no_template_is_refused_at_load(source: str) -> None:
    with pytest.raises(ModelRefused, match="does not compile"):
        ChatTemplate(source, WORDS, RENDERER)


def test_deep_and_long_sources_are_refused_at_load() -> None:
    with pytest.raises(ModelRefused, match="does not compile"):
        ChatTemplate("{{ " + "(" * 9999 + ")" * 9999 + " }}", WORDS, RENDERER)
    with pytest.raises(ModelRefused, match="has 1048577 characters; 1048576 are allowed"):
        ChatTemplate("a" * (2**20 + 1), WORDS, RENDERER)


def test_a_long_conversation_is_no_trouble() -> None:
    talk = [user(f"question {n}") if n % 2 == 0 else assistant(f"<think>hm</think>answer {n}") for n in range(2001)]
    collecting = ChatTemplate(
        "{% set ns = namespace(all=[]) %}{% for m in messages %}{% set ns.all = ns.all + [m] %}{% endfor %}"
        "{% for m in ns.all %}{{ m.content }}{% endfor %}",
        WORDS,
        RENDERER,
    )
    assert collecting.render(talk).text == "".join(m["content"] for m in talk)
    assert OURS["thinker"].render(talk).text.count("<|im_end|>") == 2001


def test_runs_do_not_share_anything() -> None:
    counting = ChatTemplate("{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", WORDS, RENDERER)
    assert [counting.render([user("a")]) for _ in range(2)] == [Rendered("1")] * 2


# A last message that the answer continues.

BEGUN = [
    "It is",
    "It is ",
    " It",
    "",
    "a\n\n",
    "<think>\nhm\n</think>\n\nSo",
    "<think>\nhm",
    "{{ x }} <|im",
    "a <|im_end|>",
    "é ",
]
TEMPLATES = [name for name in OURS if name != "macros"]


@pytest.mark.parametrize("begun", BEGUN)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_message_is_continued_as_in_transformers(template: str, begun: str) -> None:
    talk = [user("a"), assistant("b"), user("c"), assistant(begun)]
    got = outcome(lambda: OURS[template].render(talk, continue_final_message=True))
    try:
        expected: Any = theirs(templates.ALL[template], talk, continue_final_message=True)
    except (TemplateError, TypeError) as error:
        expected = str(error)
    except ValueError:  # they refuse a template that drops a part of the message in front of its end
        assert isinstance(got, Rendered)
        assert got.text.endswith(begun.rpartition("</think>")[2].strip())
        return
    if isinstance(got, Rendered):
        assert got.text == expected[0]
        if not got.marks:
            assert got.encode(WORDS) == expected[1]
    else:
        assert expected in got


@pytest.mark.parametrize("template", TEMPLATES)
@given(begun=contents, rest=contents.filter(bool))
def test_the_prompt_of_a_continued_message_begins_that_of_the_whole_one(template: str, begun: str, rest: str) -> None:
    """And the rest of the message follows in the latter."""
    talk, ours = [user("a"), assistant(begun)], OURS[template]
    try:
        prompt = ours.render(talk, continue_final_message=True)
        whole = ours.render([user("a"), assistant(begun + "x" + rest)], add_generation_prompt=False).text
    except TemplateFailed:
        return
    assert whole.startswith(prompt.text)
    assert whole[len(prompt.text) :].lstrip().startswith("x") or "think" in begun
    assert all(mark <= len(prompt.text) for mark in prompt.marks)
    assert WORDS.decode(prompt.encode(WORDS), skip_special=False) == prompt.text


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_a_client_writes_in_a_continued_message_is_text(template: str) -> None:
    talk = [user("a"), assistant("b <|im_end|> </s> c")]
    got = outcome(lambda: OURS[template].render(talk, continue_final_message=True).encode(WORDS))
    if isinstance(got, list):
        plain = OURS[template].render([user("a"), assistant("b")], continue_final_message=True).encode(WORDS)
        assert [token for token in got if token in WORDS.control] == [
            token for token in plain if token in WORDS.control
        ]


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (user("a"), r"messages\[1\] cannot be continued: its role is not assistant"),
        (assistant("b", tool_calls=[CALL]), r"messages\[1\] cannot be continued: it has calls of tools"),
    ],
)
def test_what_cannot_be_continued_is_refused(last: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        OURS["thinker"].render([user("a"), last], continue_final_message=True)


def test_a_template_that_hides_a_message_cannot_continue_it() -> None:
    hides = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", WORDS, RENDERER
    )
    with pytest.raises(BadRequest, match="does not write the text of the message that is continued"):
        hides.render([user("a"), assistant("b")], continue_final_message=True)


def test_the_opening_of_a_continued_message_ends_where_the_prompt_does() -> None:
    ours, begun = OURS["thinker"], assistant("<think>\nWell")
    opening = ours.opening({"continued": begun})
    assert opening.endswith("Well")
    assert ours.render([user("x"), begun], continue_final_message=True).text.endswith(opening)
