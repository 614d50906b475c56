"""prefix: the prefix tree: which tokens are in memory, what of them a request can use, and what is evicted first."""
