"""The `weft` command: `main` declares the commands and turns errors into exit codes; every other module implements one."""
