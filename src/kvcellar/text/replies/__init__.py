"""replies: reads what a model writes as an answer: reasoning, content and calls of tools; and constrains calls."""
