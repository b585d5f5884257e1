"""The `weft` command: `main` declares the commands and turns errors into exit codes; the other modules do their work."""
