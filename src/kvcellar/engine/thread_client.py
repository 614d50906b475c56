"""thread_client: an engine on a thread of this process, as its front end sees it."""

from collections.abc import Callable

from kvcellar.engine.build import Built, card_of
from kvcellar.engine.controls import Controls
from kvcellar.engine.loop import nothing
from kvcellar.errors import Overloaded
from kvcellar.messages import EngineEvent, Submission


class ThreadClient:
    """An engine on a thread of this process, which delivers events at the end of each step."""

    def __init__(self, built: Built) -> None:
        """The engine does not run before `start`."""
        self.built, self._loop, controls = built, built.loop, Controls(built)
        self.ask, self.parts = controls.run, controls.parts
        self.card = card_of(built)
        self.number, self.check_caller = self._loop.number, self._loop.check_caller
        self.cancel, self.stop, self.fail = self._loop.cancel, self._loop.stop, self._loop.fail
        self.end_session = self._loop.end_session

    def start(self, *, turned: Callable[[], None] = nothing, failed: Callable[[], None] = nothing) -> None:
        """As `Loop.start`."""
        self._loop.start(self.built.runner, turned=turned, failed=failed)

    def close(self) -> bool:
        """As `EngineClient.close`."""
        closed = self._loop.close()
        if closed:
            self.built.intake.grammars.close()
        return closed

    starting = False  # an engine on a thread that has died is not started again

    @property
    def alive(self) -> bool:
        return self._loop.alive

    def submit(self, submission: Submission, deliver: Callable[[EngineEvent], None]) -> None:
        if self._loop.backlog >= self.card.max_waiting and not submission.goes_on:
            raise Overloaded(f"{self._loop.backlog} requests are waiting already; try again later")
        self.built.intake.submit(submission, deliver, self._loop.submit)
