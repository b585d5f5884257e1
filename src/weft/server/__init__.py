"""The HTTP server: the OpenAI API in front of the engine's process. Parses, checks, tokenises, streams; computes nothing."""
