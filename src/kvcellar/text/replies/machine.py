"""machine: reads one answer in parts, and returns its pieces as soon as they are certain.

Always true, for any text:
  * the pieces, joined (`Content` next to `Content`, and so on), do not depend on how the text is divided;
  * nothing raises, and what is no complete call is told as content, without control tokens;
  * what is held back is the part of a mark, white space at the end, or a call that is not known to be one yet;
  * the cost of a character does not depend on what was read before it.
"""

import secrets
import string
from collections.abc import Mapping, Sequence
from copy import copy
from enum import Enum, auto

from kvcellar.text.pieces import CallArguments, CallClosed, CallOpened, Content, Piece, Reasoning
from kvcellar.text.replies.bodies import (
    MOST_NAME,
    ArgumentsBody,
    Begun,
    BodyReader,
    Ended,
    Event,
    Given,
    Marks,
    ObjectBody,
    TagsBody,
    loose_body,
    python_body,
)
from kvcellar.text.replies.form import Body, IdMaker, Ids, ReplyForm, Section, Thought
from kvcellar.text.replies.tools import Tools
from kvcellar.text.replies.values import Status

SHORT_ID = 9  # characters of an id of Mistral's


class Outline:
    """Without `tools`, calls are not looked for. `deltas`: arguments are told while they are read. `parallel`: further
    calls are wanted after the first. `answers`: an answer that does not begin with a call is content behind the
    reasoning, and marks are text in it."""

    def __init__(
        self,
        form: ReplyForm,
        tools: Tools | None,
        *,
        deltas: bool = True,
        parallel: bool = True,
        answers: bool = False,
    ) -> None:
        self.form, self.tools, self.deltas, self.parallel, self.answers = form, tools, deltas, parallel, answers
        sections = form.sections if tools is not None else ()
        marked = [section for section in sections if not section.bare]
        self.bare = next((section for section in sections if section.bare), None)
        self.message = form.channels.section if form.channels is not None else None
        if self.message is not None:
            sections = (*sections, self.message)
        self.sections = {text.strip(): section for section in marked for text in section.begin}
        self.thoughts: Mapping[str, Thought] = {thought.open.strip(): thought for thought in form.thoughts}
        channels = form.channels
        self.headers = frozenset(channels.begin if channels is not None else ())
        self.content = Marks([*self.sections, *self.thoughts, *self.headers])
        thoughts = (*form.thoughts, *(() if channels is None else (channels.thought,)))
        self.ends = {thought.open: Marks([thought.close.strip(), *self.headers]) for thought in thoughts}
        self.leads = {section: _marks(section.lead) for section in sections}
        self.names = {section: Marks(_of_names(section)) for section in sections}
        self.finishes = {section: _stripped(section.finish) for section in sections}
        self.begins_next = {section: _stripped(section.lead) for section in sections}
        between = {section: (section.separator,) for section in sections}
        self.tails = {
            section: _marks((*section.tail, *between[section], *section.finish, *section.lead)) for section in sections
        }

    def unnamed(self, section: Section) -> BodyReader:
        """A reader of what has names inside."""
        names = self.tools.names if section.bare and self.tools is not None else None
        return python_body(names) if section.body is Body.PYTHON else ObjectBody(names)

    def named(self, section: Section, name: str, call_id: str | None) -> BodyReader:
        """A reader of the arguments of a call."""
        if section.body is Body.LOOSE:
            return loose_body(name, call_id, section.quote)
        if section.tags is not None:
            tool = self.tools.named(name) if self.tools is not None else None
            ends = _stripped(section.tail) or _stripped(section.finish)
            return TagsBody(name, call_id, section.tags, sorted(ends), tool.properties if tool is not None else {})
        return ArgumentsBody(name, call_id)

    def name_and_id(self, written: str) -> tuple[str, str | None]:
        """The name of a call, and its id if the model wrote one with it."""
        if self.form.ids is Ids.WRITTEN:
            return written.removeprefix("functions.").rpartition(":")[0] or written, written
        name, _, call_id = written.partition("[CALL_ID]")
        return name, call_id or None

    def keeps_id(self, written: str | None) -> bool:
        """May a call have the id that the model wrote?"""
        if not written:
            return False
        if self.form.ids is Ids.SHORT:
            return len(written) == SHORT_ID and written.isascii() and written.isalnum()
        return self.form.ids is Ids.WRITTEN


def _of_names(section: Section) -> list[str]:
    """Texts that end a name. A line break does, where the template writes nothing else."""
    return [text.strip() or text for text in (*section.after_name, *section.ends_name) if text]


def _stripped(texts: tuple[str, ...]) -> frozenset[str]:
    return frozenset(text.strip() for text in texts if text.strip())


def _marks(texts: tuple[str, ...]) -> Marks:
    return Marks(sorted(_stripped(texts)))


class _Mode(Enum):
    CONTENT = auto()
    REASONING = auto()
    HEADER = auto()  # of a message in a channel
    LEAD = auto()  # in front of a call
    NAME = auto()
    BODY = auto()
    AFTER = auto()  # behind a call


class Machine:
    """Of one choice. `over`: a call was closed, and no more are wanted; what follows is not read."""

    def __init__(self, outline: Outline, new_id: IdMaker, *, blank: bool = True) -> None:
        """`blank`: the answer has no content yet."""
        self._outline, self._new_id = outline, new_id
        self.over = False
        self.calls = 0  # opened so far
        self._mode = _Mode.CONTENT
        self._text = ""  # not read yet
        self._hidden: tuple[tuple[int, int], ...] = ()  # parts of it that are control tokens
        self._pieces: list[Piece] = []
        self._space = ""  # white space at the end of what was told
        self._fresh = False  # whether white space is not told: behind reasoning and calls
        self._blank = blank  # whether no content was told
        self._thought: Thought | None = None
        self._section: Section | None = None
        self._body: BodyReader | None = None
        self._raw: list[str] = []  # what was read of a call that was not told yet, without control tokens
        self._told = False  # whether the call was told as opened
        self._begun: Begun | None = None  # the call that is read; `_given` are its arguments, if it is told whole
        self._given: list[str] = []

    @property
    def reasons(self) -> bool:
        """Is the text that follows reasoning?"""
        return self._mode is _Mode.REASONING

    @property
    def thinking(self) -> str | None:
        """The mark of the reasoning that the text is in."""
        return self._thought.open if self._thought is not None and self.reasons else None

    @property
    def outside(self) -> bool:
        """Is the text that follows content?"""
        return self._mode is _Mode.CONTENT

    def push(self, text: str, *, special: bool = False) -> list[Piece]:
        """The pieces that are certain after more text. `special`: it is the text of a control token."""
        if self.over or not text:
            return []
        if special:
            self._hidden += ((len(self._text), len(self._text) + len(text)),)
        self._text += text
        return self._read(ended=False)

    def end(self) -> list[Piece]:
        """The rest: no text follows."""
        pieces = self._read(ended=True) if not self.over else []
        if self._space and not self._fresh and self._mode is _Mode.CONTENT:
            pieces.append(Content(self._space))
        self._space = ""
        return pieces

    def copy(self) -> "Machine":
        """Another one that has read the same."""
        other = copy(self)
        other._pieces = []
        other._body = self._body.copy() if self._body is not None else None
        other._raw, other._given = self._raw[:], self._given[:]
        return other

    def _read(self, *, ended: bool) -> list[Piece]:
        while not self.over and self._step(ended):
            pass
        pieces, self._pieces = self._pieces, []
        return joined(pieces)

    def _step(self, ended: bool) -> bool:
        """Read on; returns whether there may be more to read of the same text."""
        match self._mode:
            case _Mode.CONTENT:
                return self._content(ended)
            case _Mode.REASONING:
                return self._reasoning(ended)
            case _Mode.HEADER:
                return self._header(ended)
            case _Mode.LEAD:
                return self._lead(ended)
            case _Mode.NAME:
                return self._name(ended)
            case _Mode.BODY:
                return self._in_body(ended)
            case _Mode.AFTER:
                return self._after(ended)

    # -- text -------------------------------------------------------------------------------------------------------

    def _content(self, ended: bool) -> bool:
        if self._blank and self._outline.bare is not None and self._begins_bare():
            return True
        settled, end, mark = self._outline.content.find(self._text, ended=ended)
        self._tell(self._take(settled), Content)
        if self._outline.answers and not self._blank and not self.calls:  # a string of JSON may have marks
            self._tell(self._take(len(self._text)), Content)
            return False
        if not mark:
            return False
        shown = self._take(end - settled)
        if mark in self._outline.thoughts:
            self._space, self._fresh = "", True
            self._thought, self._mode = self._outline.thoughts[mark], _Mode.REASONING
        elif mark in self._outline.sections:
            self._open(self._outline.sections[mark], shown)
        elif mark in self._outline.headers:
            self._raw, self._mode = [shown], _Mode.HEADER
        return True

    def _begins_bare(self) -> bool:
        """Does the answer begin with what may be a call without a mark?"""
        bare, text = self._outline.bare, self._text.lstrip()
        if bare is None or not text or text[0] != bare.begin[0][0] or self._hidden:
            return False
        space = self._take(len(self._text) - len(text))
        self._space += space
        self._open(bare, "")
        return True

    def _reasoning(self, ended: bool) -> bool:
        thought = self._thought
        assert thought is not None
        settled, end, mark = self._outline.ends[thought.open].find(self._text, ended=ended)
        self._tell(self._take(settled), Reasoning)
        if not mark:
            return False
        if mark == thought.close:
            self._take(end - settled)
        self._space, self._fresh, self._mode = "", True, _Mode.CONTENT
        return True

    def _tell(self, text: str, kind: type[Content] | type[Reasoning]) -> None:
        """Text is told up to its last character that is no white space."""
        if self._fresh:
            text = text.lstrip()
        if not text:
            return
        self._fresh = False
        shown = text.rstrip()
        if shown:
            self._pieces.append(kind(self._space + shown))
            self._space = ""
            self._blank = self._blank and kind is Reasoning
        self._space += text[len(shown) :]

    def _take(self, count: int) -> str:
        """Take so many characters; returns them without control tokens."""
        text, self._text = self._text[:count], self._text[count:]
        if not self._hidden:
            return text
        if self._hidden[0][0] >= count:
            self._hidden = tuple((start - count, end - count) for start, end in self._hidden)
            return text
        shown, at = list[str](), 0
        for start, end in self._hidden:
            shown.append(text[at:start])
            at = max(at, end)
        shown.append(text[at:])
        self._hidden = tuple((max(0, start - count), end - count) for start, end in self._hidden if end > count)
        return "".join(shown)

    # -- messages with headers --------------------------------------------------------------------------------------

    def _header(self, ended: bool) -> bool:
        channels = self._outline.form.channels
        assert channels is not None
        end = self._text.find(channels.end)
        if end < 0:
            if ended or len(self._text) > MOST_NAME:
                self._fail()
                return True
            return False
        header = self._text[:end]
        self._raw.append(self._take(end + len(channels.end)))
        where = header.find(channels.call)
        if where >= 0 and self._outline.tools is not None:
            name = header[where + len(channels.call) :].split("<")[0].split()
            if name:
                self._section = channels.section
                self._start(self._outline.named(channels.section, name[0], None))
                return True
        self._raw = []
        if channels.thought.open in header:
            self._thought, self._mode = channels.thought, _Mode.REASONING
        else:
            self._mode = _Mode.CONTENT
        self._space, self._fresh = "", True
        return True

    # -- calls ------------------------------------------------------------------------------------------------------

    def _open(self, section: Section, shown: str) -> None:
        self._section = section
        self._raw, self._told = [shown], False
        self._mode = _Mode.LEAD

    def _lead(self, ended: bool) -> bool:
        """In front of a call."""
        section = self._section
        assert section is not None
        self._skip_space()
        lead = self._outline.leads[section].at(self._text, ended=ended)
        if lead is None or (not self._text and not ended):
            return False
        if (not lead and "" not in section.lead) or not self._text:
            self._fail()
            return True
        self._raw.append(self._take(len(lead)))
        if self._outline.names[section].texts:
            self._mode = _Mode.NAME
        else:
            self._start(self._outline.unnamed(section))
        return True

    def _name(self, ended: bool) -> bool:
        section = self._section
        assert section is not None
        settled, end, mark = self._outline.names[section].find(self._text, ended=ended)
        written = self._text[:settled].strip()
        if len(written) > MOST_NAME or (mark and not written) or (ended and not mark):
            self._fail()
            return True
        if not mark:
            return False
        keeps = mark in section.ends_name
        self._raw.append(self._take(settled if keeps else end))
        name, call_id = self._outline.name_and_id(written)
        self._start(self._outline.named(section, name, call_id))
        return True

    def _start(self, body: BodyReader) -> None:
        self._body, self._mode = body, _Mode.BODY
        self._begun, self._given, self._told = None, [], False

    def _in_body(self, ended: bool) -> bool:
        body = self._body
        assert body is not None
        used, events = body.feed(self._text)
        raw = self._take(used)
        if not self._told:
            self._raw.append(raw)
        self._hear(events)
        if body.status is Status.DONE:
            self._body, self._raw = None, []
            self._mode = _Mode.AFTER
        elif body.status is Status.FAILED or ended:
            self._fail()
        return ended or body.status is not Status.MORE

    def _hear(self, events: Sequence[Event]) -> None:
        for event in events:
            if self.over:
                return
            match event:
                case Begun():
                    self._begun = event
                    if self._outline.deltas:
                        self._opened(event)
                case Given(text):
                    if self._outline.deltas:
                        self._pieces += [CallArguments(self.calls - 1, text)] if text else []
                    else:
                        self._given.append(text)
                case Ended():
                    self._ended()

    def _opened(self, call: Begun) -> None:
        written = call.id if self._outline.keeps_id(call.id) else None
        self._pieces.append(CallOpened(self.calls, written or self._new_id(self._outline.form.ids), call.name))
        self.calls += 1
        self._told, self._raw = True, []
        self._space, self._fresh, self._blank = "", True, False

    def _ended(self) -> None:
        assert self._begun is not None
        if not self._outline.deltas:
            self._opened(self._begun)
            self._pieces.append(CallArguments(self.calls - 1, "".join(self._given)))
        self._pieces.append(CallClosed(self.calls - 1))
        self._begun, self._given, self._told = None, [], False
        self.over = not self._outline.parallel

    def _after(self, ended: bool) -> bool:
        """Behind a call: its tail, then the next one or the end of the section."""
        section = self._section
        assert section is not None
        self._skip_space()
        mark = self._outline.tails[section].at(self._text, ended=ended)
        if mark is None or (not self._text and not ended):
            return False
        if ended and any(one.startswith(self._text) for one in self._outline.tails[section].texts):
            self._take(len(self._text))  # a mark that was cut off
        if not mark or not self._text:
            self._mode = _Mode.CONTENT
        elif mark in self._outline.finishes[section]:
            self._take(len(mark))
            self._mode = _Mode.CONTENT
        elif mark in self._outline.begins_next[section]:
            self._raw = []
            self._mode = _Mode.LEAD
        else:
            self._take(len(mark))
            self._mode = _Mode.LEAD if mark == section.separator else _Mode.AFTER
        return True

    def _skip_space(self) -> None:
        count = len(self._text) - len(self._text.lstrip())
        shown = self._take(count)
        if self._raw:
            self._raw.append(shown)

    def _fail(self) -> None:
        """What was read is no call: it is content, except what was told of it already."""
        raw, self._raw = "".join(self._raw), []
        if self._given and not self._told:
            self._given = []
        self._body, self._begun = None, None
        self._mode = _Mode.CONTENT
        if not self._told:
            self._fresh = False
            self._tell(raw, Content)
        self._told, self._blank = False, False


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same with neighbours of one kind in one piece."""
    if len(pieces) < 2:
        return list(pieces)
    made: list[Piece] = []
    for piece in pieces:
        last = made[-1] if made else None
        match piece:
            case Content(text) if isinstance(last, Content):
                made[-1] = Content(last.text + text)
            case Reasoning(text) if isinstance(last, Reasoning):
                made[-1] = Reasoning(last.text + text)
            case CallArguments(call, text) if isinstance(last, CallArguments) and last.call == call:
                made[-1] = CallArguments(call, last.text + text)
            case _:
                made.append(piece)
    return made


def fresh_id(kind: Ids) -> str:
    """An id for a call that has none of its own."""
    if kind is Ids.SHORT:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(SHORT_ID))
    return f"call_{secrets.token_hex(12)}"


def opened(outline: Outline, opening: str, *, begun: bool = False) -> Machine:
    """A machine whose copies read answers to a prompt that ends with `opening`: what a template writes in front of an
    answer may begin the reasoning. `begun`: the prompt has the beginning of the content, too, which the answer
    continues."""
    machine = Machine(outline, fresh_id)
    machine.push(opening, special=True)  # none of it is told
    if machine.outside or machine.calls or (begun and not machine.reasons):
        machine = Machine(outline, fresh_id, blank=not begun)
    return machine
