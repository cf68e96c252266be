"""Planning and layout of packs: one optimizer step as micro-batches of `max_tokens` tokens."""
