"""bench: measures kvcellar and other engines on the same weights and tokens."""
