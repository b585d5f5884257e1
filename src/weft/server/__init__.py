"""The HTTP server: the OpenAI API in front of the engine process. It parses, validates, tokenises and streams."""
