"""failures: errors that the engine did not expect, and how memory is made consistent with the completions after them.

An error ends the request that it belongs to, with `EngineFailed`; completions of others lose what is not in memory, and
compute it again. A step may still be between its forward and its draw when an error is recorded, so memory is not
touched before `recover`.

Where the device computes nothing any more, no request is at fault: that ends the engine (`DeviceLost`), before requests
are told of errors, so that they can go on in another one.

Always true: completions of a request that is in `pending` are done.
"""

import logging
from collections.abc import Callable, Mapping

import torch

from kvcellar.engine.core.request import Request, Status
from kvcellar.engine.core.scheduler import Scheduler
from kvcellar.engine.core.sequence_manager import SequenceManager
from kvcellar.errors import EngineFailed

log = logging.getLogger("kvcellar.engine")


class DeviceLost(BaseException):
    """A device computes nothing any more, as after an error that CUDA does not recover from. What handles errors of
    requests does not catch it."""


def check_device(device: torch.device) -> None:
    """After an error. Raises `DeviceLost`."""
    try:
        torch.ones(1, device=device).sum().item()
    except torch.OutOfMemoryError:
        pass
    except Exception as error:
        raise DeviceLost(f"{device} computes nothing any more: {type(error).__name__}: {error}") from error


class Failures:
    """Those of one engine, on its thread."""

    def __init__(self, manager: SequenceManager, scheduler: Scheduler) -> None:
        self._manager, self._scheduler = manager, scheduler
        self.pending: list[tuple[Request | None, EngineFailed]] = []  # since the last `recover`
        self._at = -1  # number of steps at the last error of a step that belongs to no request

    def record(self, what: str, request: Request | None, error: Exception) -> EngineFailed:
        """Record that `what` raised `error`, and mark the completions of `request`, if any, as done. Raises
        `DeviceLost`."""
        check_device(self._manager.memory.device)
        log.error("%s failed", what, exc_info=error)
        failure = EngineFailed(f"{what} failed with {type(error).__name__}: {error}")
        self.pending.append((request, failure))
        for completion in request.completions if request is not None else ():
            completion.status = Status.DONE  # from any status
        return failure

    def record_step(self, error: Exception, steps: int) -> None:
        """Record the error of a step, the one after so many. It belongs to the request of the scheduler's current
        completion, if any; else it is raised if there was another before the next step."""
        at = self._scheduler.current
        if at is None and self._at == steps:
            raise error
        if at is None:
            self._at = steps
        self.record("a step", at.request if at is not None else None, error)

    def recover(self, requests: Mapping[int, Request], conclude: Callable[[Request], None]) -> None:
        """Make memory consistent with the completions of `requests`, and fail those that errors belong to: `conclude`
        is called with each of them.

        Raises the error of `check` if memory is still inconsistent. The time is linear in the cells in use.
        """
        failures, self.pending = self.pending, []
        try:
            every = [one for request in requests.values() for one in request.completions]
            completions = [one for one in every if one.status is not Status.DONE]
            self._manager.recover(completions)
            self._scheduler.reset(completions)
            self._scheduler.check()
            self._manager.check(self._scheduler.running)
        finally:
            for request, failure in failures:
                if request is not None:
                    for completion in request.completions:
                        self._manager.drafting.close(completion)
                    request.fail(failure)
                    conclude(request)

    def check(self) -> None:
        """Assert what is always true."""
        ended = [one.status for request, _ in self.pending if request is not None for one in request.completions]
        assert set(ended) <= {Status.DONE}
