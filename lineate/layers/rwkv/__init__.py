"""RWKV-7: its mixer, its feed-forward, and the token shift that both begin with."""
