"""Serving: an engine that reads and writes many sequences at once, a cache of states, and a server in front of it."""
