"""models: someone else's network. Load it, learn its shape, run it on our memory. Only here transformers is imported."""
