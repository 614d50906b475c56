"""trial: the process in which a constraint is compiled before the engine's process does it: `python -m
kvcellar.engine.sample.trial SOCKET`. See `worker`. No torch.

It has a quarter of the stack that the engine's process has for the same (`compiling.STACK`): what compiles here does so
there. The library recurses where it compiles, and not where it computes masks.
"""

from collections.abc import Callable

from msgspec import Raw

from kvcellar.constraint import Constraint
from kvcellar.engine.sample.compiler import Compiler, Vocabulary
from kvcellar.engine.sample.compiling import STACK
from kvcellar.wire import decode
from kvcellar.worker import serve

MEMORY = 2**30  # bytes


def opened(vocabulary: Vocabulary) -> Callable[[Raw], str]:
    """What is called with each constraint, and returns `Compiler.source_of` of it."""
    compiler = Compiler(vocabulary)
    return lambda what: compiler.source_of(decode(what, Constraint))


if __name__ == "__main__":
    serve(Vocabulary, opened, stack=STACK // 4, memory=MEMORY)
