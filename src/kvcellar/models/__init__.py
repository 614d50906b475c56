"""models: someone else's network. The only room that imports transformers: load it, learn its shape, run it on our memory."""
