"""Registration of ops with torch: shapes, tracing, precision, operation counts."""
