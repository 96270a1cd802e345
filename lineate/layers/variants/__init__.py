"""Published parametrisations of the rules, and the parts that only they have."""
