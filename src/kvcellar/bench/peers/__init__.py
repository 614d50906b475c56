"""peers: what `kvcellar bench --against` compares: an adapter for each engine, run in a Python environment of its own.

`serve` runs an adapter as a process. An adapter imports nothing of kvcellar unless it runs in our environment.
"""
