"""process: which process an object belongs to that a fork of the process cannot use.

A forked process has the memory of its parent, and of its threads only the one that forked. A lock that another thread
held is held for ever there, and a call that waits for another thread never returns. So such objects compare the process
that they were made in before they touch a lock or wait: after a fork there is nothing to repair, and there is no hook.
"""

import os


class Origin:
    """The process that made an object."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def here(self) -> bool:
        """Is this the process that made it, and not a fork of that?"""
        return os.getpid() == self._process

    def __str__(self) -> str:
        return f"process {self._process}, which this process ({os.getpid()}) was forked from"
