"""A local page on which memories are written, corrected and asked by hand, and models are planned."""
