"""grammar: what an answer with calls has to match, in llguidance's Lark dialect, made of the record of a form.

Always true: an answer that a grammar of `required` allows is read as calls of its tools, beside reasoning.

A mark that is a token of its own is written as that token: text never matches it there. Other text is free up to the
mark that ends it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from kvcellar.errors import BadRequest
from kvcellar.text.replies.form import Body, ReplyForm, Section, Tags, Thought
from kvcellar.text.replies.tools import Tool, Tools
from kvcellar.text.replies.values import schema_types

JSON_STYLE = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
_ANY_OBJECT = '{"type":"object"}'
_DEFINED = ("$defs", "definitions")
_LOOSE = """\
loose: loose_text | loose_word | "[" (loose ("," loose)*)? "]" | "{" (KEY ":" loose ("," KEY ":" loose)*)? "}"
loose_word: "true" | "false" | "null" | NUMBER
KEY: /[A-Za-z_][A-Za-z0-9_]*/
NUMBER: /-?(0|[1-9][0-9]{0,30})(\\.[0-9]{1,30})?/
"""


class Grammar:
    """Rules for the calls of one request. `tokens` are texts that are one token each, with their ids."""

    def __init__(self, form: ReplyForm, tools: Tools, tokens: Mapping[str, int]) -> None:
        self._form, self._tools, self._tokens = form, tools, tokens
        self._rules: dict[str, str] = {}
        self._extra = ""

    def required(self, *, thinking: str | None, parallel: bool) -> str:
        """Reasoning if the model wants it, then calls. `thinking`: the mark of the reasoning that the prompt opened."""
        calls = self._calls(parallel=parallel)
        return self._with(f"{self._thoughts(thinking)} {calls}")

    def answer(self, kind: str, source: str, *, thinking: str | None, calls: bool, parallel: bool) -> str:
        """Reasoning if the model wants it, then what matches a `Constraint` of this kind, which is no grammar, and
        source; or, with `calls`, these."""
        channels = self._form.channels
        head = self._literal("<|channel|>final<|message|>") if channels is not None else ""
        answer = f"{head} {self._rule('answer', self._wanted(kind, source))}"
        other = f" | {self._calls(parallel=parallel)}" if calls else ""
        return self._with(f"{self._thoughts(thinking)} ({answer}{other})")

    def strict(self, *, parallel: bool) -> str | None:
        """Any text, and calls that are as they must be. None for calls that no mark announces."""
        if self._form.channels is not None or any(section.bare for section in self._form.sections):
            return None
        section = self._form.sections[0]
        call = self._rule("called", self._section(section, begun=True, parallel=parallel))
        mark = section.begin[0].strip()
        self._free()
        self._rules["space"] = r"/[ \n]{0,8}/"
        if any(mark.startswith(token) for token in self._tokens):
            called = f"{self._literal(mark)} space {call}"
            return self._with(f"(free {called})* free" if parallel else f"free ({called})?")
        self._rules["head[lazy]"] = f"/(\\n|.)*({'|'.join(_pattern(one.strip()) for one in section.begin)})/"
        return self._with(f"(head space {call})* free" if parallel else f"head space {call} | free")

    # -- parts ------------------------------------------------------------------------------------------------------

    def _wanted(self, kind: str, source: str) -> str:
        """The rule of an answer that matches a constraint."""
        match kind:
            case "regex":
                return f"/{_between_slashes(source)}/"
            case "choice":
                return " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(source))
            case _:
                return self._schema(json.loads(source or _ANY_OBJECT))

    def _with(self, start: str) -> str:
        rules = "\n".join(f"{name}: {rule}" for name, rule in self._rules.items())
        return f"start: {start}\n{rules}\n{self._extra}"

    def _rule(self, name: str, rule: str) -> str:
        self._rules[name] = rule
        return name

    def _free(self) -> str:
        """Any text, with the marks of reasoning."""
        marks = [text.strip() for one in self._form.thoughts for text in (one.open, one.close)]
        tokens = [self._token(mark) for mark in marks if mark in self._tokens]
        self._rules["TEXT"] = r"/(\n|.)+/"
        between = f"({' | '.join(tokens)})" if tokens else ""
        return self._rule("free", f"TEXT? ({between} TEXT?)*" if tokens else "TEXT?")

    def _thoughts(self, thinking: str | None) -> str:
        """What may come before a call."""
        channels = self._form.channels
        if channels is not None:
            head = self._literal("<|channel|>analysis<|message|>")
            rest, again = self._until("analysis", "<|end|>"), self._literal("<|start|>assistant")
            return f"({head} {rest} {again})*"
        parts: list[str] = []
        for number, thought in enumerate(self._form.thoughts):
            rest = self._thought(f"thought_{number}", thought)
            if thought.open == thinking:
                return f"{rest} space"
            parts.append(f"{self._literal(thought.open.strip())} {rest} space")
        return f"({' | '.join(parts)})?" if parts else ""

    def _thought(self, name: str, thought: Thought) -> str:
        self._rules["space"] = r"/[ \n]{0,8}/"
        return self._until(name, thought.close.strip())

    def _until(self, name: str, mark: str) -> str:
        """Any text up to a mark, and the mark."""
        if mark in self._tokens:
            return self._rule(name, f"/(\\n|.)*/ {self._token(mark)}")
        return self._rule(f"{name}[suffix={json.dumps(mark)}]", r"/(\n|.)*/") and name

    def _token(self, mark: str) -> str:
        return f"<[{self._tokens[mark]}]>"

    def _literal(self, text: str) -> str:
        """A text, in which tokens are tokens."""
        parts: list[str] = []
        plain = at = 0
        while at < len(text):
            mark = max((one for one in self._tokens if text.startswith(one, at)), key=len, default="")
            if not mark:
                at += 1
                continue
            parts += [json.dumps(text[plain:at], ensure_ascii=False)] if at > plain else []
            parts.append(self._token(mark))
            at += len(mark)
            plain = at
        parts += [json.dumps(text[plain:], ensure_ascii=False)] if plain < len(text) else []
        return " ".join(parts)

    # -- calls ------------------------------------------------------------------------------------------------------

    def _calls(self, *, parallel: bool) -> str:
        channels = self._form.channels
        if channels is not None:
            heads = [(self._literal(channels.written.replace("NAME", tool.name)), tool) for tool in self._tools.every]
            return self._rule("call", " | ".join(f"{head} {self._json(tool)}" for head, tool in heads))
        section = self._form.sections[0]
        one = self._rule("section", self._section(section, begun=False, parallel=parallel))
        if section.body is Body.PYTHON or (section.between is not None and not section.bare):
            return one
        return f"{one} ({self._literal(section.apart)} {one})*" if parallel else one

    def _section(self, section: Section, *, begun: bool, parallel: bool = True) -> str:
        call = self._rule("call", " | ".join(self._call(section, tool) for tool in self._tools.every))
        between = self._literal(section.between or "") if section.between is not None and not section.bare else None
        if section.body is Body.PYTHON:
            between = '", "'
        more = f"({between} {call})*" if between is not None and parallel else ""
        begin = "" if begun or section.bare else self._literal(section.begin[0])
        opened, closed = ('"["', '"]"') if section.body is Body.PYTHON else ("", "")
        return f"{begin} {opened} {call} {more} {closed} {self._literal(section.finish[0])}"

    def _call(self, section: Section, tool: Tool) -> str:
        match section.body:
            case Body.OBJECT:
                head = f'{{"name": {json.dumps(tool.name)}, "{section.arguments}": '
                return f'{self._literal(head)} {self._json(tool)} "}}"'
            case Body.PYTHON:
                return f'{json.dumps(tool.name + "(")} {self._pairs(tool, "=", ", ")} ")"'
            case Body.LOOSE:
                head, tail = self._literal(f"{section.lead[0]}{tool.name}"), self._literal(section.tail[0])
                return f'{head} "{{" {self._pairs(tool, ":", ",", section.quote)} "}}" {tail}'
            case Body.TAGS if section.tags is not None:
                head, tail = self._named(section, tool), self._literal(section.tail[0])
                return f"{head} {self._tagged(tool, section.tags)} {tail}"
            case _:
                return f"{self._named(section, tool)} {self._json(tool)} {self._literal(section.tail[0])}"

    def _named(self, section: Section, tool: Tool) -> str:
        lead, after = self._literal(section.lead[0]), self._literal(section.after_name[0])
        if self._form.ids.name == "WRITTEN":
            return f"{lead} {json.dumps(f'functions.{tool.name}:')} /[0-9]{{1,4}}/ {after}"
        return f"{lead} {json.dumps(tool.name)} {after}"

    def _number(self, tool: Tool) -> int:
        return self._tools.every.index(tool)

    def _json(self, tool: Tool) -> str:
        """The arguments of a call, as JSON."""
        return self._rule(f"arguments_{self._number(tool)}", self._schema({"type": "object", **tool.schema}))

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
        parts: list[str] = []
        for number, (key, schema, needed) in enumerate(self._properties(tool)):
            name = f"value_{self._number(tool)}_{number}"
            line = "\n" if tags.lines else ""
            types, choices = schema_types(schema), _words(schema)
            text = not types or "string" in types
            middle = tags.middle[0] if text or not tags.kinds else tags.middle[1]
            head, close = self._literal(f"{tags.open}{key}{middle}{line}"), f"{line}{tags.close}"
            if choices:
                value = f"({' | '.join(json.dumps(one, ensure_ascii=False) for one in choices)}) {self._literal(close)}"
            elif text:
                value = self._until(name, close)
            else:
                value = f"{self._rule(name, self._schema(schema))} {self._literal(close)}"
            part = f"{head} {value} {self._literal(tags.between)}"
            parts.append(part if needed else f"({part})?")
        return " ".join(parts)

    def _pairs(self, tool: Tool, sign: str, between: str, quote: str = "") -> str:
        """Keys with values, between brackets, in the order of the schema."""
        rest, first = '""', '""'
        for number, (key, schema, needed) in reversed([*enumerate(self._properties(tool))]):
            name = f"{self._number(tool)}_{number}"
            value = self._loose(schema, quote, name) if quote else self._rule(f"value_{name}", self._schema(schema))
            pair = f"{json.dumps(key + sign)} {value}"
            more = f"{json.dumps(between)} {pair} {rest}"
            first = self._rule(f"first_{name}", f"{pair} {rest}" if needed else f"{pair} {rest} | {first}")
            rest = self._rule(f"more_{name}", more if needed else f"{more} | {rest}")
        return first

    def _loose(self, schema: Mapping[str, Any], quote: str, name: str) -> str:
        """A value with quotes of the model's own. What is in lists and objects is free."""
        self._rules["loose_text"] = f"{self._literal(quote)} {self._until('loose_end', quote)}"
        self._extra = self._extra or _LOOSE
        types, choices = schema_types(schema), _words(schema)
        if choices:
            mark = self._literal(quote)
            return f"({' | '.join(f'{mark} {json.dumps(one, ensure_ascii=False)} {mark}' for one in choices)})"
        if types == {"string"}:
            return "loose_text"
        if types and types <= {"integer", "number", "boolean", "null"}:
            return self._rule(f"value_{name}", self._schema(schema))
        return "loose"


def _words(schema: Mapping[str, Any]) -> Sequence[str]:
    """The texts that a value can be, if they are listed."""
    listed: Any = schema.get("enum")
    found = cast("list[Any]", listed) if isinstance(listed, list) else []
    words = [one for one in found if isinstance(one, str)]
    return words if len(words) == len(found) else []


def _between_slashes(pattern: str) -> str:
    """A regular expression as Lark writes it: between slashes, and on one line."""
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", pattern, flags=re.DOTALL)
    return escaped.replace("\\\n", "\\n").replace("\n", "\\n")


def _pattern(text: str) -> str:
    """A text as a part of a regular expression of Lark."""
    return "".join(f"\\{char}" if not char.isalnum() and char not in "_ <>｜▁" else char for char in text)
