"""speculations: what drafts have done for a request, as JSON: in responses, in its log line and in its record."""

from collections.abc import Mapping
from types import MappingProxyType

from kvcellar.events import Done, Speculation

Json = dict[str, object]

SPECULATION: Mapping[str, str] = MappingProxyType(  # meaning of the fields of `speculation`
    {
        "rounds": "steps of its completions, with drafts or without",
        "drafted": "drafts that were computed",
        "accepted": "of these, drafts that became tokens",
        "tried_at": "by position in the round: drafts whose predecessors in the round were all accepted",
        "accepted_at": "of these, drafts that became tokens",
        "acceptance_at": "`accepted_at` / `tried_at`",
        "depths": "drafts of a round in up to 8 equal parts of the rounds, from the first to the last: `[mean, most]`",
        "seconds_saved": "beside the expected seconds of plain steps for as many tokens; negative: lost",
    }
)


def speculation_fields(speculation: Speculation) -> Json:
    values = (
        *(speculation.rounds, speculation.drafted, speculation.accepted),
        *(list(speculation.tried_at), list(speculation.accepted_at), list(speculation.acceptance_at)),
        [list(part) for part in speculation.depths],
        speculation.seconds_saved,
    )
    return dict(zip(SPECULATION, values, strict=True))


def draft_counts(done: Mapping[int, Done]) -> tuple[int, int] | None:
    """Drafts of all prompts and those that were accepted; None without speculation."""
    found = [one.speculation for one in done.values() if one.speculation is not None]
    return (sum(one.drafted for one in found), sum(one.accepted for one in found)) if found else None
