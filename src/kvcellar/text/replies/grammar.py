"""grammar: what an answer with calls has to match, in llguidance's Lark dialect, made of the record of a form.

Always true: an answer that a grammar of `required` allows is read as calls of its tools, beside reasoning; and where
`strict` allows an answer, each of the calls that are read from it fits its schema, if its tool binds.

Whatever has to match comes behind the reasoning, which is free, also where the prompt has opened it.
"""

from collections.abc import Mapping, Sequence

from kvcellar.errors import BadRequest
from kvcellar.text.replies.call_rules import CallRules
from kvcellar.text.replies.form import Body, Channels, ReplyForm, Section, Thought
from kvcellar.text.replies.rules import ANY, Rules, quoted
from kvcellar.text.replies.tools import Tools

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
