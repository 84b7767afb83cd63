"""The recorded batch order: replay.order is the file, `python -m replay` inspects, checks and imports it."""
