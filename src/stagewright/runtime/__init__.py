"""Real training over uneven stages: workers that run their orders."""
