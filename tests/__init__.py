"""A package, so that `tests.helpers` is this project's whatever else is installed."""
