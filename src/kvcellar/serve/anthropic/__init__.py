"""anthropic: Anthropic's API of messages."""
