"""recording: steps of a model, traced once, lowered to our kernels or captured as CUDA graphs, and replayed.

`record` and `trace` look at the modules, `capture` and `doors` make a program of them, the `recorded_*` files bind it
to addresses and compile it, `saved` keeps it for later starts. Used by `load`; models know the protocol of a recording.
"""
