"""Experiments that show what each memory keeps, and the pictures and tables made of their numbers."""
