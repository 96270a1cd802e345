"""The walks of the memories that learn, on a GPU."""
