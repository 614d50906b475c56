"""collector: the garbage collector of the process does not look at what was loaded while requests are served.

A collection of all objects holds the interpreter while it looks at them: about 1 µs for each that was not touched
lately, so 0.3 s for what torch and transformers make when they are imported, and 0.15 s for a prefix tree of 50 000
entries. CPython has one each time that the objects which outlived two collections are a quarter more, and at least
some 77 000. Requests leave nothing in cycles in an engine, so there they come while memory fills. They do in a server,
whose collections are short as long as it has no engine in its own process.
"""

import gc

# Collections of the middle generation before one of all objects, where CPython has 10. Each moves at most 7 700
# objects, so that what is in cycles, and outlived two collections, is at most 770 000 objects.
RARE = 100


def settle(*, rarely: bool) -> None:
    """Look at no object again that exists now. To be called when what stays is loaded. `rarely`: look at all others
    rarely, where an engine and a server are in one process."""
    gc.collect()
    gc.freeze()
    if rarely:
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, RARE)
