"""Preference data: rows from files, folders, the Hub or memory, turned into tokenized pairs."""
