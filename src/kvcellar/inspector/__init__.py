"""inspector: read-only views of an engine's events and memory, and the page that shows them."""
