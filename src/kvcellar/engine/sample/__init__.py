"""sample: how the next token is chosen. `params` are the parameters of a request, `sampler` the state of a completion,
`draw` the operations on logits.

`params` and `sampler` import without torch.
"""
