"""call_rules: the rules of calls of the tools of one request, as a form writes them.

Always true: an answer that they allow is read as calls of these tools. A call of a tool that binds has the arguments
that its schema allows; of any other, arguments of any kind.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from kvcellar.errors import BadRequest
from kvcellar.text.replies.form import Body, Ids, ReplyForm, Section, Tags
from kvcellar.text.replies.rules import Rules, quoted
from kvcellar.text.replies.tools import Tool, Tools
from kvcellar.text.replies.values import schema_types

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
