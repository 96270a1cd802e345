"""One model over many ranks: the ranks, and the division of parameters."""
