"""The HTTP server: the APIs of `server/api` in front of the engine processes. It checks requests, tokenises them and
streams answers, and it runs batches and vector stores."""
