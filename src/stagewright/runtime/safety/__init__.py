"""What looks after a run: before it starts, while it runs, and at its end."""
