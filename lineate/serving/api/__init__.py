"""OpenAI's API over an engine: request bodies and answers."""
