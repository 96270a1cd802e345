"""Small tasks that tell the rules apart: what each can recall, overwrite and keep track of."""
