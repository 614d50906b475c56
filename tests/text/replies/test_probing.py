"""The form of calls of an unknown template is found by rendering one, and only used where it reads two."""

import pytest

from kvcellar.text.replies.detection import known, probed
from kvcellar.text.template import ChatTemplate
from kvcellar.text.tokens import TextTokenizer
from tests.text.made import RENDERER, byte_level
from tests.text.replies.chats import TEMPLATES, chat
from tests.text.replies.reads import pieces_of, read
from tests.text.templates import CHATML, LLAMA3

EACH = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
OBJECT = EACH + '<<do>>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}<</do>>\n{% endfor %}'
LIST = EACH + 'CALL {"arguments": {{ f.arguments | tojson }}, "name": "{{ f.name }}"}\n{% endfor %}'
NAMED = EACH + "[[call {{ f.name }} with]]{{ f.arguments | tojson }}\n{% endfor %}"
PROSE = EACH + "I call {{ f.name }} with {{ f.arguments.probekey }}.\n{% endfor %}"
BARE = EACH + '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n{% endfor %}'


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, TextTokenizer(byte_level()), RENDERER)


@pytest.mark.parametrize("calls", [OBJECT, LIST, NAMED])
def test_calls_in_json_behind_a_mark_are_read(calls):
    made = template(chat(calls))
    form = probed(made.written_call)
    assert form is not None
    text = made.written_call("weather", {"city": 'a "{b}"', "days": 2}, 2)
    assert text is not None
    seen = read(pieces_of(form, list("Well. " + text.removesuffix("<|im_end|>\n"))))
    assert seen.calls == [("weather", {"city": 'a "{b}"', "days": 2})] * 2
    assert seen.content == "Well."


@pytest.mark.parametrize("source", [chat(PROSE), chat(BARE), CHATML, "{{ 1 / 0 }}"])
def test_other_calls_are_not_guessed(source):
    assert probed(template(source).written_call) is None


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_a_probed_form_reads_what_the_known_one_does(name):
    made = template(TEMPLATES[name])
    form = probed(made.written_call)
    assert form is not None
    text = made.written_call("weather", {"days": 2}, 1) or ""
    text = text.removesuffix("<|im_end|>\n")
    assert read(pieces_of(form, [text])).calls == read(pieces_of(known(TEMPLATES[name]), [text])).calls


def test_templates_that_do_not_render_tools_are_known():
    assert not template(CHATML).renders_tools
    assert template(LLAMA3).renders_tools
    assert all(template(source).renders_tools for source in TEMPLATES.values())


def test_a_template_that_renders_one_call_alone_is_read():
    made = template(LLAMA3)
    form = probed(made.written_call)
    assert form is not None
    text = made.written_call("weather", {"days": 2}, 1) or ""
    assert read(pieces_of(form, list(text.partition("<|eot_id|>")[0]))).calls == [("weather", {"days": 2})]
