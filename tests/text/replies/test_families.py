"""What a chat template of each family writes for an assistant's message is read back as that message."""

import string
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.text.replies.detection import known
from kvcellar.text.template import ChatTemplate
from kvcellar.text.tokens import TextTokenizer
from tests.text.made import RENDERER, byte_level
from tests.text.replies.chats import TEMPLATES
from tests.text.replies.reads import TOOLS, pieces_of, read

PLAIN = string.ascii_letters + string.digits + " _-.,:;!?'\"\\/{}[]()äé漢\n\t"
TEXT = st.text(alphabet=PLAIN, max_size=12)
INNER = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(alphabet=string.ascii_letters, max_size=5),
    lambda one: (
        st.lists(one, max_size=3)
        | st.dictionaries(st.text(string.ascii_lowercase, min_size=1, max_size=4), one, max_size=3)
    ),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": TEXT,
        "days": st.integers(-(10**12), 10**12),
        "exact": st.booleans(),
        "more": st.dictionaries(st.text(string.ascii_lowercase, min_size=1, max_size=4), INNER, max_size=3),
        "list": st.lists(INNER, max_size=3),
        "share": st.floats(-1000, 1000).map(lambda value: round(value, 3)),
        "nothing": st.none(),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(TOOLS.names)), ARGUMENTS), min_size=1, max_size=3)
WORDS = st.text(alphabet=string.ascii_letters + " ,.é", max_size=20).map(str.strip)
OPENED = "<|im_start|>assistant\n"


@pytest.fixture(scope="module", params=TEMPLATES)
def family(request):
    """The name of a family, its form, and its template."""
    source = TEMPLATES[request.param]
    return request.param, known(source), ChatTemplate(source, TextTokenizer(byte_level()), RENDERER)


def written(name, template, message) -> tuple[str, str]:
    """What comes before an assistant's message in the text of a chat, and the message."""
    chat = [{"role": "user", "content": "x"}]
    before = template.render(chat).text
    text = template.render([*chat, {"role": "assistant", **message}], add_generation_prompt=False).text
    assert text.startswith(before)
    return before, text[len(before) :].removesuffix("<|im_end|>\n")


def as_sent(calls):
    return [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]


def is_bare(form) -> bool:
    return any(section.bare for section in form.sections)


def test_the_form_is_known_by_the_template(family):
    name, form, _ = family
    assert form.name == name


@settings(max_examples=12)
@given(data=st.data())
def test_what_a_template_writes_is_read_back(family, data):
    name, form, template = family
    calls = data.draw(CALLS)
    content = "" if is_bare(form) else data.draw(WORDS)
    reasoning = data.draw(WORDS) if form.thoughts or form.channels else ""
    message = {"content": content, "reasoning_content": reasoning, "tool_calls": as_sent(calls)}
    _, text = written(name, template, message)
    opening = "<|start|>assistant" if name == "harmony" else OPENED
    cuts = data.draw(st.lists(st.integers(0, 400), max_size=8))
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts = [text[start:end] for start, end in pairwise(places)]
    for deltas in (True, False):
        whole = pieces_of(form, [text], opening=opening, deltas=deltas)
        assert pieces_of(form, parts, opening=opening, deltas=deltas) == whole
        seen = read(whole)
        if name == "harmony":
            seen.content = seen.content.removesuffix("<|end|>")
        assert (seen.calls, seen.reasoning, seen.content) == (calls, reasoning, content), text


@settings(max_examples=3)
@given(data=st.data())
def test_a_message_that_is_cut_off_anywhere_is_read_without_an_error(family, data):
    name, form, template = family
    calls = data.draw(CALLS)
    _, text = written(name, template, {"content": "", "tool_calls": as_sent(calls)})
    for end in range(len(text)):
        seen = read(pieces_of(form, [text[:end]], deltas=False))
        assert seen.calls == calls[: len(seen.calls)]
        if not seen.calls and end and not form.channels:
            assert seen.content.strip() == text[:end].strip()
        opened = read(pieces_of(form, [text[:end]], deltas=True))
        assert opened.calls == seen.calls


NOISE = st.sampled_from(
    ["{", "}", "[", "]", "(", ")", '"', "'", "\\", ":", ",", "=", "<", ">", "\n", " ", "a", "1", "f"]
)


@settings(max_examples=12)
@given(data=st.data())
def test_what_is_read_does_not_depend_on_how_it_arrives(family, data):
    name, form, template = family
    _, text = written(name, template, {"content": "", "tool_calls": as_sent([("weather", {"city": "x", "days": 1})])})
    at = data.draw(st.integers(0, len(text)))
    until = data.draw(st.integers(at, min(len(text), at + 20)))
    broken = text[:at] + "".join(data.draw(st.lists(NOISE, max_size=4))) + text[until:]
    for deltas in (True, False):
        whole = pieces_of(form, [broken], deltas=deltas)
        assert pieces_of(form, list(broken), deltas=deltas) == whole
        read(whole)
    again = pieces_of(form, [broken + text], deltas=False)
    read(again)
