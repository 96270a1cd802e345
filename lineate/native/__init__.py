"""The CPU backend in C: compiled for the machine it runs on at first use, never needed to import lineate."""
