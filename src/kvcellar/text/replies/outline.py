"""outline: a form with all its marks prepared for reading one request's answers. Never changes."""

from collections.abc import Mapping

from kvcellar.text.replies.bodies import ArgumentsBody, BodyReader, ObjectBody
from kvcellar.text.replies.foreign_bodies import TagsBody, loose_body, python_body
from kvcellar.text.replies.form import Body, Ids, ReplyForm, Section, Thought
from kvcellar.text.replies.marks import Marks
from kvcellar.text.replies.tools import Tools

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
