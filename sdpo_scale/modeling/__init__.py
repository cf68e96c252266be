"""What runs inside the model: attention over packs, token log-probabilities, loading."""
