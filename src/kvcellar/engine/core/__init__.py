"""core: the loop that owns a device: requests, the scheduler, the runner of a step, failures, statistics.

Everything in it runs on the engine's thread. Used by `load`, which wires it, and by the clients that start it.
"""
