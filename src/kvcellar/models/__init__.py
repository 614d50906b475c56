"""models: someone else's network: load it, learn its shape, run it on our memory. Only here transformers is imported."""
