"""What the server keeps on disk: one SQLite database and a folder of files. Only the server process writes here."""
