"""speculations: what drafts have done for a request, as JSON: in responses, in its log line and in its record."""

from collections.abc import Mapping

from kvcellar.events import Done
from kvcellar.serve.answers import Answer


class SpeculationFields(Answer):
    """The fields of `kvcellar.events.Speculation`."""

    rounds: int  # steps of its completions, with drafts or without
    drafted: int  # drafts that were computed
    accepted: int  # of these, drafts that became tokens
    tried_at: list[int]  # by position in the round: drafts whose predecessors in the round were all accepted
    accepted_at: list[int]  # of these, drafts that became tokens
    acceptance_at: list[float]  # `accepted_at` / `tried_at`
    # drafts of a round in up to 8 equal parts of the rounds, from the first to the last: `[mean, most]`
    depths: list[tuple[float, int]]
    seconds_saved: float  # beside the expected seconds of plain steps for as many tokens; negative: lost


def draft_counts(done: Mapping[int, Done]) -> tuple[int, int] | None:
    """Drafts of all prompts and those that were accepted; None without speculation."""
    found = [one.speculation for one in done.values() if one.speculation is not None]
    return (sum(one.drafted for one in found), sum(one.accepted for one in found)) if found else None
