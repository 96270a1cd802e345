"""lineate inside other libraries, one module for each; importing this package imports none of them."""
