"""families: the forms of well-known models, chosen by the text of the chat template: tunes change a template, and keep
the type of their model."""

from collections.abc import Sequence
from dataclasses import replace

from kvcellar.text.replies.form import Body, ReplyForm, Section, Thought

TABLE = "known families"

HERMES = Section(
    begin=("<tool_call>\n", "<tool_call>"), body=Body.OBJECT, finish=("\n</tool_call>", "</tool_call>"), apart="\n"
)

# Each with texts that its chat template has, all of them.
CALLS: Sequence[tuple[str, Sequence[str], ReplyForm]] = (
    ("hermes", ("<tool_call>", '"arguments"'), ReplyForm("hermes", TABLE, (HERMES,))),
)

THOUGHTS: Sequence[tuple[Sequence[str], Thought]] = ((("<think>",), Thought("<think>", "</think>")),)


def known(template: str) -> ReplyForm | None:
    """The form of a family whose chat template this is, if it is known."""
    thoughts = tuple(thought for marks, thought in THOUGHTS if all(mark in template for mark in marks))
    for _, marks, form in CALLS:
        if all(mark in template for mark in marks):
            return replace(form, thoughts=(*form.thoughts, *thoughts))
    return ReplyForm("reasoning", TABLE, (), thoughts) if thoughts else None
