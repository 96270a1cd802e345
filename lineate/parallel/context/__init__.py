"""One sequence over many ranks: segments, the rules between them, balance."""
