"""The processes of a job, and the connections between them."""
