"""prompts: reads prompts and prints completions, as text or as token ids."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvcellar.cli.memory_picture import picture
from kvcellar.engine.result import Result
from kvcellar.errors import BadRequest
from kvcellar.events import Delta

TURN_WIDTH = 12  # characters of the picture of a turn


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """`ids`: prompts and completions are token ids instead of text."""

    ids: bool

    def parse(self, prompt: str) -> str | list[int]:
        if not self.ids:
            return prompt
        try:
            return [int(word) for word in prompt.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()]
        except ValueError:
            raise BadRequest(f"with --ids a prompt is token ids, like 12 7 99, not {prompt[:40]!r}", "prompt") from None

    def texts(self, deltas: Iterable[Delta]) -> Iterator[str]:
        """What to print for each delta."""
        if not self.ids:
            yield from (delta.text for delta in deltas)
            return
        separator = ""
        for delta in deltas:
            for token in delta.token_ids:
                yield f"{separator}{token}"
                separator = " "


def cost_line(result: Result) -> str:
    """A picture of the prompt, speed, time to the first token, prompt tokens that came from memory, and drafts that
    were accepted."""
    usage, timings, drafts = result.usage, result.timings, result.speculation
    speed = timings.tokens_per_second(usage.completion_tokens)
    accepted = f"; {drafts.accepted} of {drafts.drafted} drafts were accepted" if drafts and drafts.drafted else ""
    found = picture(usage.prompt_tokens, usage.cached_tokens, usage.cached_tokens, TURN_WIDTH)
    first = timings.first_token * 1e3
    return (
        f"{found} [{usage.completion_tokens} tokens, {speed:.1f} tokens/s, first after {first:.0f} ms; "
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens came from memory{accepted}]"
    )
