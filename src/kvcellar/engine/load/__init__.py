"""load: opens what an engine is made of, in order, and closes it if anything raises.

Settings, the model with its text, drafts, stores, and how much memory each gets; `build` wires them.
Used by the clients that start an engine, by `verify`, and by commands that say how a model would be served.
"""
