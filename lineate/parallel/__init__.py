"""Parallelism over ranks: context (one sequence), tensor (one model), and the processes of a job."""
