"""Work shared out among ranks: one sequence, one model, one job."""
