"""responses_api: OpenAI's Responses. `fields` has the fields of requests, `items` what they continue; `output` writes
items and events, `response_writer` the response, and `store` keeps responses that later requests continue.
"""
