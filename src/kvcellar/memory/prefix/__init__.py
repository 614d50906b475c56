"""prefix: which tokens were computed before, what a request can use of them, and what is evicted first.

The tree and its order, pins, the catalogue of what is stored, why a prompt missed, and events for others; no torch.
Used by the prefix cache of a memory.
"""
