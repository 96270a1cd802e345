"""The process and the machine it runs on: folders, processors, threads, random numbers."""
