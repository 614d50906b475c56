"""thread_client: an engine on a thread of this process, as its front end sees it."""

import logging
import time
from collections.abc import Callable

from kvcellar.engine.control.controls import Controls
from kvcellar.engine.control.count_stats import stats
from kvcellar.engine.core.loop import nothing
from kvcellar.engine.load.build import Built, card_of
from kvcellar.engine.messages import Beat, EngineEvent, Submission
from kvcellar.engine.stats import EngineStats
from kvcellar.errors import Overloaded

LOOK = 0.25  # seconds between two looks at the statistics, at least
log = logging.getLogger("kvcellar.engine")


class ThreadClient:
    """An engine on a thread of this process, which delivers events at the end of each step."""

    def __init__(self, built: Built) -> None:
        """The engine does not run before `start`."""
        self.built, self._loop, controls = built, built.loop, Controls(built)
        self.ask, self.parts = controls.run, controls.parts
        self.card = card_of(built)
        self.number, self.check_caller = self._loop.number, self._loop.check_caller
        self.cancel, self.stop, self.fail = self._loop.cancel, self._loop.stop, self._loop.fail
        self.last_stats, self._looked = stats(built), time.monotonic()

    def start(
        self,
        *,
        turned: Callable[[], None] = nothing,
        counted: Callable[[EngineStats], None] = lambda stats: None,
        failed: Callable[[], None] = nothing,
    ) -> None:
        """`turned` and `failed` as `Loop.start` has them. `counted` is called with `last_stats`, first by this call and
        then on the engine's thread; it must not block."""
        self._counted = counted
        counted(self.last_stats)
        self._loop.start(self.built.runner, turned=turned, observed=self._look, failed=failed)

    def _look(self) -> float | None:
        """On the engine's thread, after a turn: something may have changed."""
        now = time.monotonic()
        if (left := self._looked + LOOK - now) > 0:
            return left
        self._looked = now
        if self._loop.alive:
            try:
                self.last_stats = stats(self.built)
                self._counted(self.last_stats)
            except Exception:  # a defect of a count ends no engine: what was told before stays, and becomes stale
                log.exception("the statistics of the engine could not be read")
        return None

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

    @property
    def beat(self) -> Beat:
        """As it is told to front ends in other processes."""
        began = self._loop.turn_began
        return Beat(time.perf_counter() - began if began is not None else 0.0)

    def submit(self, submission: Submission, deliver: Callable[[EngineEvent], None]) -> None:
        if self._loop.backlog >= self.card.max_waiting and not submission.goes_on:
            raise Overloaded(f"{self._loop.backlog} requests are waiting already; try again later")
        self.built.intake.submit(submission, deliver, self._loop.submit)
