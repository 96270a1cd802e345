"""The three forms of one computation, in plain torch: the specification and the CPU path."""
