"""grammar: what an answer with calls has to match, in llguidance's Lark dialect, made of the record of a form.

A mark that is a token of its own is written as that token: text never matches it there. Other text is free up to the
mark that ends it. Whatever has to match comes behind the reasoning, which is free, also where the prompt has opened it.

Always true:
  * an answer that a grammar of `required` allows is read as calls of its tools, beside reasoning;
  * where `strict` allows an answer, each of the calls that are read from it fits its schema, if its tool binds; a call
    of a tool that does not has arguments of any kind.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from kvcellar.errors import BadRequest
from kvcellar.text.replies.form import Body, Channels, Ids, ReplyForm, Section, Tags, Thought
from kvcellar.text.replies.tools import Tool, Tools
from kvcellar.text.replies.values import schema_types

ANY = "(\\n|.)"


class Rules:
    """Rules by name. `tokens` are texts that are one token each, with their ids."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._rules: dict[str, str] = {}
        self._shared: dict[str, None] = {}

    def grammar(self, start: str) -> str:
        rules = "\n".join(f"{name}: {rule}" for name, rule in self._rules.items())
        return f"start: {start}\n{rules}\n{''.join(self._shared)}"

    def add(self, name: str, rule: str) -> str:
        self._rules[name] = rule
        return name

    def once(self, rules: str) -> None:
        """Add these rules, unless they were added before."""
        self._shared[rules] = None

    def within(self, text: str) -> list[str]:
        """The tokens that are in a text."""
        return [token for token in self._tokens if token in text]

    def is_token(self, text: str) -> bool:
        return text in self._tokens

    def begins_with_token(self, text: str) -> bool:
        return any(text.startswith(token) for token in self._tokens)

    def literal(self, text: str) -> str:
        """A text, in which tokens are tokens."""
        parts: list[str] = []
        plain = at = 0
        while at < len(text):
            mark = max((one for one in self._tokens if text.startswith(one, at)), key=len, default="")
            if not mark:
                at += 1
                continue
            parts += [quoted(text[plain:at])] if at > plain else []
            parts.append(f"<[{self._tokens[mark]}]>")
            at += len(mark)
            plain = at
        parts += [quoted(text[plain:])] if plain < len(text) else []
        return " ".join(parts)

    def until(self, name: str, mark: str, among: Iterable[str] = ()) -> str:
        """Any text up to a mark, and the mark. Those of `among` that are tokens may be in it, too."""
        if mark not in self._tokens:
            self._rules[f"{name}[suffix={json.dumps(mark)}]"] = f"/{ANY}*/"
            return name
        text = self.text(name.upper(), (mark,))
        others = " | ".join(self.literal(one) for one in dict.fromkeys(among) if one in self._tokens and one != mark)
        free = f"({text}? ({others}))* {text}?" if others else f"{text}?"
        return self.add(name, f"{free} {self.literal(mark)}")

    def space(self) -> str:
        """White space between the parts of an answer."""
        return self.add("space", r"/[ \n]{0,8}/")

    def text(self, name: str, without: Iterable[str], shape: str = f"/{ANY}+/") -> str:
        """Text of this shape that has none of these marks in it, also not spelled in other tokens: a reader would find
        them there. `name` is in capitals."""
        marks = "|".join(map(pattern, without))
        return self.add(name, f"({shape}) & ~/{ANY}*({marks}){ANY}*/" if marks else shape)

    def head(self, name: str, mark: str, without: Iterable[str]) -> str:
        """Text up to the first `mark`, which is no token, and the mark; the text has none of `without` in it."""
        marks = "|".join(pattern(one) for one in without if one not in mark)
        terminal = self.add(
            name.upper(), f"/{ANY}*{pattern(mark)}/" + (f" & ~/{ANY}*({marks}){ANY}*/" if marks else "")
        )
        self._rules[f"{name}[lazy]"] = terminal
        return name


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # Lark has control characters escaped


def pattern(text: str) -> str:
    """A text as a part of a regular expression of Lark."""
    return "".join(map(_in_pattern, text))


def _in_pattern(char: str) -> str:
    if char == "\n":
        return "\\n"
    return f"\\{char}" if char.isascii() and not char.isalnum() and char not in "_ <>" else char


JSON_STYLE = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
_DEFINED = ("$defs", "definitions")
_WORDS = """\
KEY: /[A-Za-z_][A-Za-z0-9_]*/
NUMBER: /-?(0|[1-9][0-9]{0,30})(\\.[0-9]{1,30})?/
"""
_LOOSE = """\
loose: loose_text | loose_word | "[" (loose ("," loose)*)? "]" | "{" (KEY ":" loose ("," KEY ":" loose)*)? "}"
loose_word: "true" | "false" | "null" | NUMBER
"""
_PYTHON = """\
literal: PYTHON_TEXT | literal_word | "[" (literal (", " literal)*)? "]" | "{" (pair (", " pair)*)? "}"
literal_word: "True" | "False" | "None" | NUMBER
pair: PYTHON_TEXT ": " literal
PYTHON_TEXT: /"([^"\\\\\\n]|\\\\["\\\\n])*"/ | /'([^'\\\\\\n]|\\\\['\\\\n])*'/
"""


class CallRules:
    """Rules for the calls of one request. With `binds`, all tools bind; else those that are strict."""

    def __init__(self, form: ReplyForm, tools: Tools, rules: Rules, *, binds: bool) -> None:
        self._form, self._tools, self._rules, self._binds = form, tools, rules, binds

    def calls(self, *, parallel: bool) -> str:
        """All calls of an answer, with the marks in front of them."""
        channels, rules = self._form.channels, self._rules
        if channels is not None:
            heads = [(rules.literal(channels.written.replace("NAME", tool.name)), tool) for tool in self._tools.every]
            return rules.add("call", " | ".join(f"{head} {self.arguments(tool)}" for head, tool in heads))
        section = self._form.sections[0]
        one = rules.add("section", self.section(section, begun=False, parallel=parallel))
        if section.body is Body.PYTHON or (section.between is not None and not section.bare):
            return one
        return f"{one} ({rules.literal(section.apart)} {one})*" if parallel else one

    def section(self, section: Section, *, begun: bool, parallel: bool = True, name: str = "call") -> str:
        """The calls of one section; `begun`: its mark is there already. `name` is that of a new rule."""
        rules = self._rules
        begin = "" if begun or section.bare else rules.literal(section.begin[0])
        if section.body is Body.PYTHON:
            first = " | ".join(self._python(tool, "[") for tool in self._tools.every)
            call = rules.add(name, " | ".join(self._python(tool) for tool in self._tools.every))
            more = f'(", " {call})*' if parallel else ""
            return f'{begin} ({first}) {more} "]" {rules.literal(section.finish[0])}'
        call = rules.add(name, " | ".join(self._call(section, tool) for tool in self._tools.every))
        between = rules.literal(section.between or "") if section.between is not None and not section.bare else None
        more = f"({between} {call})*" if between is not None and parallel else ""
        return f"{begin} {call} {more} {rules.literal(section.finish[0])}"

    def arguments(self, tool: Tool) -> str:
        """The arguments of a call, as JSON."""
        name = f"arguments_{self._number(tool)}"
        if not self._bound(tool):
            return self._rules.add(name, '%json {"type": "object"}')
        return self._rules.add(name, self._schema({"type": "object", **tool.schema}))

    def _bound(self, tool: Tool) -> bool:
        return self._binds or tool.strict

    def _number(self, tool: Tool) -> int:
        return self._tools.every.index(tool)

    def _call(self, section: Section, tool: Tool) -> str:
        rules = self._rules
        match section.body:
            case Body.OBJECT:
                head = f'{{"name": {json.dumps(tool.name)}, "{section.arguments}": '
                return f'{rules.literal(head)} {self.arguments(tool)} "}}"'
            case Body.LOOSE:
                head, tail = rules.literal(f"{section.lead[0]}{tool.name}"), rules.literal(section.tail[0])
                return f'{head} "{{" {self._pairs(tool, ":", ",", section.quote)} "}}" {tail}'
            case Body.TAGS if section.tags is not None:
                head, tail = self._named(section, tool), rules.literal(section.tail[0])
                return f"{head} {self._tagged(tool, section.tags)} {tail}"
            case _:
                return f"{self._named(section, tool)} {self.arguments(tool)} {rules.literal(section.tail[0])}"

    def _python(self, tool: Tool, before: str = "") -> str:
        """A call of a function. What is `before` is part of the same literal: a text that is no call ends later than
        the bracket alone, and would be taken for the longer one."""
        return f'{json.dumps(f"{before}{tool.name}(")} {self._pairs(tool, "=", ", ")} ")"'

    def _named(self, section: Section, tool: Tool) -> str:
        lead, after = self._rules.literal(section.lead[0]), self._rules.literal(section.after_name[0])
        if self._form.ids is Ids.WRITTEN:
            return f"{lead} {json.dumps(f'functions.{tool.name}:')} /[0-9]{{1,4}}/ {after}"
        return f"{lead} {json.dumps(tool.name)} {after}"

    # -- arguments one by one -----------------------------------------------------------------------------------------

    def _schema(self, schema: Mapping[str, Any]) -> str:
        return f"%json {json.dumps({**schema, 'x-guidance': JSON_STYLE}, ensure_ascii=False)}"

    def _properties(self, tool: Tool) -> list[tuple[str, dict[str, Any], bool]]:
        """The arguments of a tool that has them one by one: name, schema, and whether each is required."""
        if any(name in tool.schema for name in ("anyOf", "oneOf", "allOf", "$ref", "patternProperties")):
            why = "its schema is not an object with properties, and this model writes arguments one by one"
            raise BadRequest(f"calls of the tool {tool.name} cannot be constrained: {why}", "tools")
        shared = {name: tool.schema[name] for name in _DEFINED if name in tool.schema}
        required: Any = tool.schema.get("required")
        needed = cast("list[Any]", required) if isinstance(required, list) else []
        return [
            (key, {**shared, **cast("dict[str, Any]", schema)} if isinstance(schema, Mapping) else {}, key in needed)
            for key, schema in tool.properties.items()
        ]

    def _tagged(self, tool: Tool, tags: Tags) -> str:
        rules = self._rules
        line = "\n" if tags.lines else ""
        close = f"{line}{tags.close}"
        if not self._bound(tool):
            open_, between = rules.literal(tags.open), rules.literal(tags.between)
            rules.once(_WORDS)
            values = " | ".join(
                f"{rules.literal(middle + line)} "
                + ("loose_json " + rules.literal(close) if tags.kinds and at else rules.until("any_value", close))
                for at, middle in enumerate(tags.middle if tags.kinds else tags.middle[:1])
            )
            rules.add("loose_json", "%json {}")
            return f"({open_} KEY ({values}) {between})*"
        parts: list[str] = []
        for number, (key, schema, needed) in enumerate(self._properties(tool)):
            name = f"value_{self._number(tool)}_{number}"
            types, choices = schema_types(schema), _words(schema)
            text = not types or "string" in types
            middle = tags.middle[0] if text or not tags.kinds else tags.middle[1]
            head = rules.literal(f"{tags.open}{key}{middle}{line}")
            if choices:
                value = f"({' | '.join(map(quoted, choices))}) {rules.literal(close)}"
            elif text:
                value = rules.until(name, close)
            else:
                value = f"{rules.add(name, self._schema(schema))} {rules.literal(close)}"
            part = f"{head} {value} {rules.literal(tags.between)}"
            parts.append(part if needed else f"({part})?")
        return " ".join(parts)

    def _pairs(self, tool: Tool, sign: str, between: str, quote: str = "") -> str:
        """Keys with values, between brackets, in the order of the schema."""
        rules = self._rules
        if not self._bound(tool):
            pair = f"KEY {json.dumps(sign)} {self._free_value(quote)}"
            return rules.add(f"any_{self._number(tool)}", f"({pair} ({json.dumps(between)} {pair})*)?")
        rest, first = '""', '""'
        for number, (key, schema, needed) in reversed([*enumerate(self._properties(tool))]):
            name = f"{self._number(tool)}_{number}"
            value = self._loose(schema, quote, name) if quote else rules.add(f"value_{name}", self._schema(schema))
            pair = f"{json.dumps(key + sign)} {value}"
            more = f"{json.dumps(between)} {pair} {rest}"
            first = rules.add(f"first_{name}", f"{pair} {rest}" if needed else f"{pair} {rest} | {first}")
            rest = rules.add(f"more_{name}", more if needed else f"{more} | {rest}")
        return first

    def _free_value(self, quote: str) -> str:
        """Any value: a literal of Python, or one with quotes of the model's own."""
        rules = self._rules
        rules.once(_WORDS)
        if not quote:
            rules.once(_PYTHON)
            return "literal"
        rules.add("loose_text", f"{rules.literal(quote)} {rules.until('loose_end', quote)}")
        rules.once(_LOOSE)
        return "loose"

    def _loose(self, schema: Mapping[str, Any], quote: str, name: str) -> str:
        """A value with quotes of the model's own. What is in lists and objects is free."""
        free = self._free_value(quote)
        types, choices = schema_types(schema), _words(schema)
        if choices:
            mark = self._rules.literal(quote)
            return f"({' | '.join(f'{mark} {quoted(one)} {mark}' for one in choices)})"
        if types == {"string"}:
            return "loose_text"
        if types and types <= {"integer", "number", "boolean", "null"}:
            return self._rules.add(f"value_{name}", self._schema(schema))
        return free


def _words(schema: Mapping[str, Any]) -> Sequence[str]:
    """The texts that a value can be, if they are listed."""
    listed: Any = schema.get("enum")
    found = cast("list[Any]", listed) if isinstance(listed, list) else []
    words = [one for one in found if isinstance(one, str)]
    return words if len(words) == len(found) else []


ANSWER = "@answer"  # the grammar of what the content has to match
_SPACE, _MARKS = r"[\s\x1c-\x1f]*", ("<|channel|>", "<|message|>", "<|start|>")
# Text that a reader takes for content, where a call without a mark could begin the answer.
_NO_BRACE = rf"/{_SPACE}([^\s\x1c-\x1f{{]{ANY}*)?/"
_NO_LIST = rf"/{_SPACE}([^\s\x1c-\x1f\[]{ANY}*)?/"
_OTHER_OBJECT = (
    rf'(/{_SPACE}\{{[ \t\r\n]*("[^"\\]*"|[^" \t\r\n]){ANY}*/'
    rf' & ~/{_SPACE}\{{[ \t\r\n]*"(name|id|type|index|arguments|parameters)"{ANY}*/)'
)
_OTHER_LIST = rf"(/{_SPACE}\[{ANY}*/ & ~/{_SPACE}\[{_SPACE}[A-Za-z_][A-Za-z0-9_.\-]*{_SPACE}\({ANY}*/)"


class Grammar:
    """Of one request. `tokens` are texts that are one token each, with their ids. With `binds`, the schemas of all
    tools bind; else those of strict ones."""

    def __init__(self, form: ReplyForm, tools: Tools, tokens: Mapping[str, int], *, binds: bool = True) -> None:
        self._form, self._tools = form, tools
        self._rules = Rules(tokens)
        self._calls = CallRules(form, tools, self._rules, binds=binds)

    def required(self, *, thinking: str | None, parallel: bool) -> str:
        """Reasoning if the model wants it, then calls. `thinking`: the mark of the reasoning that the prompt opened."""
        return self._rules.grammar(f"{self._thoughts(thinking)} {self._calls.calls(parallel=parallel)}")

    def answer(self, *, thinking: str | None, calls: bool, parallel: bool) -> str:
        """Reasoning if the model wants it, then what `ANSWER` matches; or, with `calls`, these."""
        channels = self._form.channels
        head = self._rules.literal("<|channel|>final<|message|>") if channels is not None else ""
        other = f" | {self._calls.calls(parallel=parallel)}" if calls else ""
        return self._rules.grammar(f"{self._thoughts(thinking)} ({head} {ANSWER}{other})")

    def strict(self, *, thinking: str | None, parallel: bool) -> str:
        """Any text, and calls that are as they must be. Raises `BadRequest` where that cannot be."""
        if self._form.channels is not None:
            return self._rules.grammar(self._messages(self._form.channels, parallel=parallel))
        opened = self._thoughts(thinking) if thinking is not None else ""
        bare = next((section for section in self._form.sections if section.bare), None)
        if bare is not None:
            return self._rules.grammar(f"{opened} {self._unmarked(bare, parallel=parallel)}")
        text = self._rules.text("TEXT", self._marks)
        calls = [self._marked(number, one, parallel=parallel) for number, one in enumerate(self._form.sections)]
        thoughts = [self._thought(number, one) for number, one in enumerate(self._form.thoughts)]
        if parallel:
            return self._rules.grammar(f"{opened} ({' | '.join([*calls, *thoughts])})* {text}?")
        before = f"({' | '.join(thoughts)})*" if thoughts else ""
        return self._rules.grammar(f"{opened} {before} ({text}? | {' | '.join(calls)})")

    # -- reasoning ----------------------------------------------------------------------------------------------------

    def _thoughts(self, thinking: str | None) -> str:
        """What may come before a call."""
        rules, channels = self._rules, self._form.channels
        if channels is not None:
            head = rules.literal("<|channel|>analysis<|message|>")
            rest, again = rules.until("analysis", "<|end|>"), rules.literal("<|start|>assistant")
            return f"({head} {rest} {again})*"
        parts: list[str] = []
        for number, thought in enumerate(self._form.thoughts):
            rest = self._reasoning(number, thought)
            if thought.open == thinking:
                return f"{rest} {rules.space()}"
            parts.append(f"{rules.literal(thought.open.strip())} {rest} {rules.space()}")
        return f"({' | '.join(parts)})?" if parts else ""

    def _reasoning(self, number: int, thought: Thought) -> str:
        """The rest of it. The marks of calls are text there, also those that are tokens."""
        marks = [mark for text in _texts(self._form) for mark in self._rules.within(text)]
        return self._rules.until(f"thought_{number}", thought.close.strip(), marks)

    def _thought(self, number: int, thought: Thought) -> str:
        """Reasoning with any text in front of it."""
        rest = self._reasoning(number, thought)
        return f"{self._up_to(f'think_{number}', thought.open.strip())} {rest}"

    # -- calls behind text --------------------------------------------------------------------------------------------

    @property
    def _marks(self) -> Sequence[str]:
        """What a reader finds in the content."""
        marked = [text for section in self._form.sections if not section.bare for text in section.begin]
        return [text.strip() for text in (*marked, *(thought.open for thought in self._form.thoughts))]

    def _up_to(self, name: str, mark: str) -> str:
        """Any text up to a mark, and the mark."""
        if self._rules.begins_with_token(mark):
            return f"TEXT? {self._rules.literal(mark)}"
        return self._rules.head(name, mark, self._marks)

    def _marked(self, number: int, section: Section, *, parallel: bool) -> str:
        """The calls of a section with any text in front of them."""
        called = self._calls.section(section, begun=True, parallel=parallel, name=f"call_{number}")
        return f"{self._up_to(f'head_{number}', section.begin[0].strip())} {self._rules.space()} {called}"

    def _unmarked(self, bare: Section, *, parallel: bool) -> str:
        """Calls that begin the answer, or text that is none of them. Behind text, calls have a mark."""
        rules = self._rules
        plain = (_NO_LIST, _OTHER_LIST) if bare.body is Body.PYTHON else (_NO_BRACE, _OTHER_OBJECT)
        first = rules.text("FIRST", self._marks, " | ".join(plain))
        text = rules.text("TEXT", self._marks)
        calls = [
            f"{rules.literal(section.begin[0].strip())} {rules.space()} "
            + self._calls.section(section, begun=True, parallel=parallel, name=f"call_{number}")
            for number, section in enumerate(self._form.sections)
            if not section.bare and rules.begins_with_token(section.begin[0])
        ]
        tagged = f"({' | '.join(calls)})" if calls else ""
        again = f"{tagged} ({text}? {tagged})* {text}?" if parallel else tagged
        later = f"{first}? ({again})?" if calls else f"{first}?"
        return f"{self._thoughts(None)} ({self._calls.calls(parallel=parallel)} | {later})"

    def _messages(self, channels: Channels, *, parallel: bool) -> str:
        """Messages of any kind, where a header that names a function has its name, and its arguments behind it."""
        rules = self._rules
        if not all(map(rules.is_token, _MARKS)):
            why = f"{', '.join(_MARKS)} are no tokens of its vocabulary"
            raise BadRequest(f"strict tools cannot be used with this model: {why}; leave strict out", "tools")
        start, channel, message = (rules.literal(mark) for mark in ("<|start|>", "<|channel|>", "<|message|>"))
        marks = [mark for mark in ("<|constrain|>",) if rules.is_token(mark)]
        inner = f"({' | '.join([channel, *map(rules.literal, marks)])})"
        header = rules.text("HEADER", (channels.call, *_MARKS))
        text = rules.text("TEXT", _MARKS)
        head = rules.add("head", f"{header}? ({inner} {header}?)*")
        to = rules.head("to", channels.call, _MARKS)
        names = [f"{quoted(tool.name)} rest {message} {self._calls.arguments(tool)}" for tool in self._tools.every]
        rules.add("rest", f'(" " | {inner}) {head} | ""')
        call = rules.add("call", f"({header}? {inner})* {to} ({' | '.join(names)}) {self._closing('<|call|>')}")
        plain = rules.add("plain", f"{head} {message} {text}? {self._closing('<|end|>')}")
        again = f"({start} | {channel})"
        if parallel:
            return f"({plain} | {call}) ({again} ({plain} | {call}))*"
        return f"({plain} {again})* ({plain} | {call})"

    def _closing(self, mark: str) -> str:
        return f"({self._rules.literal(mark)})?" if self._rules.is_token(mark) else ""


def _texts(form: ReplyForm) -> Sequence[str]:
    """The texts that are the marks of a form."""
    marks = [text for one in form.sections for text in (*one.begin, *one.lead, *one.after_name, *one.tail, *one.finish)]
    return [*marks, *(text for thought in form.thoughts for text in (thought.open, thought.close))]
