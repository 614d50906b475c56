"""lanes: the few threads on which requests are read, so that the event loop never does.

Always true:
  * a long body keeps no short one waiting, as each has threads of its own;
  * no more than `LONG` long bodies are parsed or tokenized at the same time, however many have arrived.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvcellar.serve.body import SHORT_BODY, Arrival

SHORT, LONG = 4, 2  # threads

Read = TypeVar("Read")


class Lanes:
    """Close it when nothing is read any more."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(SHORT, "kvcellar-read")
        self._long = ThreadPoolExecutor(LONG, "kvcellar-read-long")

    async def run(self, arrival: Arrival, work: Callable[[], Read]) -> Read:
        """`work` on the body that has arrived, which is `over` afterwards: also if its request was cancelled."""
        lane = self._short if len(arrival.data) <= SHORT_BODY else self._long
        future = lane.submit(work)
        arrival.handed = True
        future.add_done_callback(lambda _: arrival.over())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        for lane in (self._short, self._long):
            lane.shutdown(wait=False, cancel_futures=True)
