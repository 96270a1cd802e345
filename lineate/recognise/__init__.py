"""Recognise a written update of a fixed-size memory: `lineate check "EXPRESSION"`.

An expression is parsed with a list of what is allowed, never run as Python; it is evaluated on random inputs and
compared with the rows of lineate's table.
"""
