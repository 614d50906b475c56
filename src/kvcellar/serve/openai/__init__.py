"""openai: OpenAI's API for chats, completions, embeddings and models, with the fields of vLLM."""
