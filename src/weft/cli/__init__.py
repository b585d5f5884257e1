"""The `weft` command: `main` declares the commands, `entry` turns errors into exit codes, the other modules do the
work."""
