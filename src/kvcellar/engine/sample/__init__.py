"""sample: how the next token is chosen. `sampler` is the state of a completion, and imports without torch; `draw` are
the operations on logits.
"""
