"""openai: OpenAI's API. `chat` and `completions` have the fields of requests, `fields` what both have in common;
`response_writer` writes the responses, with what `formats` has of each.
"""
