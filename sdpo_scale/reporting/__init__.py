"""Evidence on the user's own model and data."""
