"""models: someone else's network. Load it, learn its shape, run it on our memory. No other room knows transformers."""
