"""openai: OpenAI's API. `chat` and `completions` have the fields of requests, `fields` what both have in common;
`response_writer` writes the responses, with what `chat_format` and `completion_format` have of their own.
"""
