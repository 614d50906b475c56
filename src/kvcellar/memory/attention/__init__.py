"""attention: how new tokens look back. Tensors and a plan in, tensors out; one file per backend.

`choose` lists the backends, and why one refuses a model. Used by the seam to models and by `verify`.
"""
