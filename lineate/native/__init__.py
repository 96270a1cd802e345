"""The CPU backend in C. Its first use compiles it for the machine it runs on; importing lineate never needs it."""
