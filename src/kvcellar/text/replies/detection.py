"""detection: the form in which a model writes reasoning and calls. The checkpoint declares it, the chat template is
that of a known family, or the template is probed.

`declared` reads the `response_template` of a tokenizer, in transformers' format. Its marks are fixed texts, or
patterns. No pattern is run, since it could take any time: those that stand for one text are read as that text, and a
template with others is not used.

`known` looks for the marks of a family in the text of the template: tunes change a template, and keep the type of their
model.

`probed` renders a call with a name and arguments that occur nowhere else. Where these are JSON, the texts around them
are the marks of a call. A form is used only if what the template writes for two calls is read back as two.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from kvcellar.text.pieces import CallClosed, CallOpened
from kvcellar.text.replies.form import Body, Channels, Ids, ReplyForm, Section, Tags, Thought
from kvcellar.text.replies.machine import Machine, Outline
from kvcellar.text.replies.tools import Tool, Tools

DECLARED = "the checkpoint has a response_template"
_REASONING = ("thinking", "reasoning", "reasoning_content")
_SPACE = re.compile(r"\\s[*+]?")
_ESCAPED = re.compile(r"\\([^A-Za-z0-9])")
_SPECIAL = frozenset("()[]{}?*+|.^$\\")
_OBJECT = ({"name": "{content.name}", "arguments": "{content.arguments}"}, "{content}")
_PARAMETERS = {"name": "{content.name}", "arguments": "{content.parameters}"}


def declared(template: Any) -> ReplyForm | None:
    """The form of a template; None if there is none, or it has marks or calls of a kind that is not read."""
    fields = _mapping(_mapping(template).get("fields"))
    calls = _mapping(fields.get("tool_calls"))
    thoughts: list[Thought] = []
    for name in _REASONING:
        opens, closes = (_marks(_mapping(fields.get(name)), part) for part in ("open", "close"))
        thoughts += [Thought(opens[0], closes[0])] if opens and closes else []
    opens, closes = _marks(calls, "open"), _marks(calls, "close")
    function: Any = _mapping(calls.get("transform")).get("function")
    if calls.get("content") != "json" or calls.get("content_args") or not opens or not closes:
        return None
    if function not in (*_OBJECT, _PARAMETERS):
        return None
    key = "parameters" if function == _PARAMETERS else "arguments"
    section = Section(begin=tuple(opens), body=Body.OBJECT, arguments=key, finish=tuple(closes))
    return ReplyForm("declared", DECLARED, (section,), tuple(thoughts))


def _marks(field: Mapping[str, Any], part: str) -> Sequence[str]:
    """The texts that open or close a field; none if they are patterns that stand for more than one text."""
    fixed: Any = field.get(part)
    if isinstance(fixed, str):
        return [fixed] if fixed.strip() else []
    if isinstance(fixed, list):
        texts = [text for text in cast("list[Any]", fixed) if isinstance(text, str) and text.strip()]
        return texts if len(texts) == len(cast("list[Any]", fixed)) else []
    pattern: Any = field.get(f"{part}_pattern")
    text = _SPACE.sub("", pattern) if isinstance(pattern, str) else ""
    if not text.strip() or _SPECIAL & set(_ESCAPED.sub("", text)):
        return []
    return [_ESCAPED.sub(r"\1", text)]


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


TABLE = "the chat template is that of a known family"

HERMES = Section(
    begin=("<tool_call>\n", "<tool_call>"), body=Body.OBJECT, finish=("\n</tool_call>", "</tool_call>"), apart="\n"
)
QWEN_CODER = Section(
    begin=("<tool_call>\n",),
    body=Body.TAGS,
    lead=("<function=",),
    after_name=(">\n",),
    tags=Tags("<parameter=", (">",), "</parameter>", between="\n"),
    tail=("</function>",),
    finish=("\n</tool_call>",),
)
GLM = Section(
    begin=("<tool_call>",),
    body=Body.TAGS,
    after_name=("\n",),
    ends_name=("<arg_key>", "</tool_call>"),
    tags=Tags("<arg_key>", ("</arg_key>\n<arg_value>", "</arg_key><arg_value>"), "</arg_value>", False, False, "\n"),
    finish=("</tool_call>",),
)
MINIMAX = Section(
    begin=("<minimax:tool_call>\n",),
    body=Body.TAGS,
    lead=('<invoke name="',),
    after_name=('">\n',),
    tags=Tags('<parameter name="', ('">',), "</parameter>", lines=False, between="\n"),
    tail=("</invoke>\n",),
    between="",
    finish=("</minimax:tool_call>",),
)
DSML = Section(
    begin=("<｜DSML｜function_calls>\n",),
    body=Body.TAGS,
    lead=('<｜DSML｜invoke name="',),
    after_name=('">\n',),
    tags=Tags(
        '<｜DSML｜parameter name="',
        ('" string="true">', '" string="false">'),
        "</｜DSML｜parameter>",
        kinds=True,
        lines=False,
        between="\n",
    ),
    tail=("</｜DSML｜invoke>\n",),
    between="",
    finish=("</｜DSML｜function_calls>",),
)
DEEPSEEK_V3 = Section(
    begin=("<｜tool▁calls▁begin｜>",),
    body=Body.ARGUMENTS,
    lead=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>",),
    after_name=("\n```json\n",),
    tail=("\n```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>"),
    between="\n",
    finish=("<｜tool▁calls▁end｜>",),
)
DEEPSEEK_V31 = Section(
    begin=("<｜tool▁calls▁begin｜>",),
    body=Body.ARGUMENTS,
    lead=("<｜tool▁call▁begin｜>",),
    after_name=("<｜tool▁sep｜>",),
    tail=("<｜tool▁call▁end｜>",),
    between="",
    finish=("<｜tool▁calls▁end｜>",),
)
KIMI = Section(
    begin=("<|tool_calls_section_begin|>",),
    body=Body.ARGUMENTS,
    lead=("<|tool_call_begin|>",),
    after_name=("<|tool_call_argument_begin|>",),
    tail=("<|tool_call_end|>",),
    between="",
    finish=("<|tool_calls_section_end|>",),
)
GEMMA4 = Section(
    begin=("<|tool_call>",),
    body=Body.LOOSE,
    lead=("call:",),
    after_name=("",),
    ends_name=("{",),
    tail=("<tool_call|>",),
    quote='<|"|>',
    apart="",
)
MISTRAL_LIST = Section(
    begin=("[TOOL_CALLS][", "[TOOL_CALLS] ["), body=Body.OBJECT, between=", ", finish=("]",), separator=","
)
MISTRAL_NAMED = Section(begin=("[TOOL_CALLS]",), body=Body.ARGUMENTS, after_name=("[ARGS]",), apart="")
LLAMA_JSON = Section(
    begin=("{",), body=Body.OBJECT, between="; ", separator=";", arguments="parameters", bare=True, apart="; "
)
LLAMA_TAGGED = Section(begin=("<|python_tag|>",), body=Body.OBJECT, between="; ", separator=";", arguments="parameters")
PYTHONIC = Section(begin=("[",), body=Body.PYTHON, bare=True)
PYTHON_TAGGED = Section(begin=("<|python_start|>",), body=Body.PYTHON, finish=("<|python_end|>",))
LFM2 = Section(begin=("<|tool_call_start|>",), body=Body.PYTHON, finish=("<|tool_call_end|>",), apart="")
HARMONY = Channels(
    begin=("<|channel|>", "<|start|>"),
    end="<|message|>",
    call="to=functions.",
    written="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
    thought=Thought("analysis", "<|end|>"),
    section=Section(begin=("",), body=Body.ARGUMENTS, tail=("<|call|>",)),
)

# Texts that the chat template has, and the form. The first that fits is taken.
CALLS: Sequence[tuple[Sequence[str], ReplyForm]] = (
    (("<|channel|>", "to=functions."), ReplyForm("harmony", TABLE, channels=HARMONY)),
    (("｜DSML｜",), ReplyForm("deepseek_v32", TABLE, (DSML,))),
    (("<｜tool▁calls▁begin｜>", "```json"), ReplyForm("deepseek_v3", TABLE, (DEEPSEEK_V3,))),
    (("<｜tool▁calls▁begin｜>",), ReplyForm("deepseek_v31", TABLE, (DEEPSEEK_V31,))),
    (("<|tool_calls_section_begin|>",), ReplyForm("kimi_k2", TABLE, (KIMI,), ids=Ids.WRITTEN)),
    (("<|tool_call>", "call:"), ReplyForm("gemma4", TABLE, (GEMMA4,))),
    (("minimax:tool_call", "<invoke"), ReplyForm("minimax_m2", TABLE, (MINIMAX,))),
    (("<tool_call>", "<arg_key>"), ReplyForm("glm4_moe", TABLE, (GLM,))),
    (("<tool_call>", "<function="), ReplyForm("qwen3_coder", TABLE, (QWEN_CODER,))),
    (("<tool_call>", "arguments"), ReplyForm("hermes", TABLE, (HERMES,))),
    (("[TOOL_CALLS]", "[ARGS]"), ReplyForm("mistral", TABLE, (MISTRAL_NAMED,), ids=Ids.SHORT)),
    (("[TOOL_CALLS]",), ReplyForm("mistral_list", TABLE, (MISTRAL_LIST,), ids=Ids.SHORT)),
    (("<|tool_call_start|>",), ReplyForm("lfm2", TABLE, (LFM2,))),
    (("<|python_start|>", "func_name1("), ReplyForm("pythonic", TABLE, (PYTHONIC, PYTHON_TAGGED))),
    (("func_name1(",), ReplyForm("pythonic", TABLE, (PYTHONIC,))),
    (('"parameters": ', "ipython"), ReplyForm("llama3_json", TABLE, (LLAMA_JSON, LLAMA_TAGGED))),
)

THOUGHTS: Sequence[tuple[str, Thought]] = (
    ("<think>", Thought("<think>", "</think>")),
    ("[THINK]", Thought("[THINK]", "[/THINK]", apart="")),
    ("<|channel>", Thought("<|channel>thought\n", "<channel|>", apart="")),
    ("<seed:think>", Thought("<seed:think>", "</seed:think>")),
    ("<|START_THINKING|>", Thought("<|START_THINKING|>", "<|END_THINKING|>", apart="")),
)


def known(template: str) -> ReplyForm | None:
    """The form of a family whose chat template this is, if it is known."""
    thoughts = tuple(thought for mark, thought in THOUGHTS if mark in template)
    for marks, form in CALLS:
        if all(mark in template for mark in marks):
            return replace(form, thoughts=thoughts)
    return ReplyForm("reasoning", TABLE, (), thoughts) if thoughts else None


PROBED = "a call was rendered by the chat template"
NAME, KEY, VALUE = "probename", "probekey", "probevalue"
_MARK = re.compile(r"\s*(?:[<\[]+[^<\[\s][^<\[\n]*|[^<\[\s]+)")
Written = Callable[[str, Mapping[str, Any], int], str | None]


def probed(written: Written) -> ReplyForm | None:
    """The form in which a template writes calls, if it is JSON. `written(name, arguments, count)` is what it writes for
    an answer of so many calls."""
    text = written(NAME, {KEY: VALUE}, 1)
    if text is None or NAME not in text or VALUE not in text:
        return None
    for build in (_object, _named):
        section = build(text)
        form = ReplyForm("probed", PROBED, (section,)) if section is not None else None
        if form is not None and _reads(form, written(NAME, {KEY: VALUE}, 2) or text):
            return form
    return None


def _reads(form: ReplyForm, text: str) -> bool:
    """Is a text read as calls, and does it begin with one?"""
    tool = Tool(NAME, {"type": "object"})
    machine = Machine(Outline(form, Tools((tool,)), deltas=False), lambda kind: "")
    pieces = [*machine.push(text), *machine.end()]
    count = text.count(NAME)
    return sum(isinstance(piece, CallClosed) for piece in pieces) == count and isinstance(pieces[0], CallOpened)


def _object(text: str) -> Section | None:
    """Marks around an object that has the name and the arguments."""
    start = text.rfind("{", 0, text.index(NAME))
    while start >= 0:
        found = _json_at(text, start)
        if found is not None and found[0].get("name") == NAME:
            value, end = found
            key = next((key for key in ("arguments", "parameters") if value.get(key) == {KEY: VALUE}), None)
            begin, finish = text[:start], _mark(text[end:])
            if key is None:
                return None
            if not begin.strip():
                return Section(begin=("{",), body=Body.OBJECT, arguments=key, bare=True)
            return Section(begin=(begin.lstrip(),), body=Body.OBJECT, arguments=key, finish=(finish,))
        start = text.rfind("{", 0, start)
    return None


def _named(text: str) -> Section | None:
    """Marks around a name, and an object with the arguments behind it."""
    start = text.find("{", text.index(NAME))
    found = _json_at(text, start) if start >= 0 else None
    begin, after = text[: text.index(NAME)], text[text.index(NAME) + len(NAME) : start]
    if found is None or found[0] != {KEY: VALUE} or "{" in begin or not begin.strip() or not after.strip():
        return None
    return Section(begin=(begin.lstrip(),), body=Body.ARGUMENTS, after_name=(after,), finish=(_mark(text[found[1] :]),))


def _json_at(text: str, start: int) -> tuple[dict[str, Any], int] | None:
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except ValueError:
        return None
    return (cast("dict[str, Any]", value), end) if isinstance(value, dict) else None


def _mark(text: str) -> str:
    """The mark that ends a call: what follows it, up to the next mark or the end of the line."""
    match = _MARK.match(text)
    return match[0] if match is not None else ""
