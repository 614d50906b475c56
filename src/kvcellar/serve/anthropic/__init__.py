"""anthropic: Anthropic's API. `fields` are the bodies of its routes, `dialogue` turns messages of content blocks into
those of a chat template, `parse` makes the request, `message_writer` writes the response, `count_tokens` counts.
"""
