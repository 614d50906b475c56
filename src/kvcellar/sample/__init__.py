"""sample: which token comes next? `params` says how, `choice` remembers, `draw` decides.

`params`, `noise` and `choice` import without torch, so that what only checks a request stays light.
"""
