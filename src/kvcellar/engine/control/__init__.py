"""control: what is asked of an engine beside requests: statistics, a picture, its cache, its adapters.

Bounded parts of it run on the engine's thread, between two steps. Used by the clients of an engine.
"""
