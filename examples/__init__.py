"""Example projects, and the demo that runs them."""
