"""responses: OpenAI's API of responses, which are kept and continued."""
