"""Memory: what a step needs, before it is run, and the largest step that fits."""
