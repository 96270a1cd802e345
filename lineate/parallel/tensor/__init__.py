"""One model over many ranks: the ranks, and how parameters are cut."""
