"""A local page for writing, correcting and querying memories by hand, and for planning models."""
