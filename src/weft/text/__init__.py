"""Text in and text out: chat templates and tokenising before the engine, detokenising after it."""
