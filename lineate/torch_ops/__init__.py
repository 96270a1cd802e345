"""How torch sees our ops: registration, shapes, tracing, precision, operation counts."""
