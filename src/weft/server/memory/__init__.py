"""Vector stores at work: reads attached files in the background, keeps the indexes, and searches."""
