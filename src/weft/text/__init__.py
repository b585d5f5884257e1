"""Chat templates and tokenising before the engine; detokenising, stop strings and answer parsing after it."""
