"""OpenAI's API over an engine: what a body may say, what the answers look like."""
