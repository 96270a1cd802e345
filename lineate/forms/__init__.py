"""The three forms of one computation in plain torch: the specification of all backends, and the CPU path."""
