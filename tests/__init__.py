"""A package for the sake of `tests.support`; the folders of tests are none, so files have names of their own."""
