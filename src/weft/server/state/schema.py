"""The tables of the database. A change of a table is a new entry at the end of `MIGRATIONS`; earlier entries never change.

Columns that every table has: `owner` is the API key that made the row (`ApiKey.owner`), "" without keys; times are seconds
since 1970.
"""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """
        CREATE TABLE responses (
            id TEXT PRIMARY KEY,
            owner TEXT NOT NULL,
            created_at REAL NOT NULL,
            expires_at REAL NOT NULL,
            previous_id TEXT,
            input BLOB NOT NULL,
            response BLOB NOT NULL
        ) WITHOUT ROWID
        """,
        "CREATE INDEX responses_by_owner ON responses (owner, created_at)",
        "CREATE INDEX responses_by_expiry ON responses (expires_at)",
        """
        CREATE TABLE files (
            id TEXT PRIMARY KEY,
            owner TEXT NOT NULL,
            created_at REAL NOT NULL,
            expires_at REAL,
            name TEXT NOT NULL,
            purpose TEXT NOT NULL,
            num_bytes INTEGER NOT NULL
        ) WITHOUT ROWID
        """,
        "CREATE INDEX files_by_owner ON files (owner, created_at, id)",
        # result_bytes: the sum over the rows of the batch in batch_lines. details: JSON of `BatchDetails`.
        """
        CREATE TABLE batches (
            id TEXT PRIMARY KEY,
            owner TEXT NOT NULL,
            created_at REAL NOT NULL,
            expires_at REAL NOT NULL,
            status TEXT NOT NULL,
            input_file_id TEXT NOT NULL,
            total INTEGER NOT NULL DEFAULT 0,
            completed INTEGER NOT NULL DEFAULT 0,
            failed INTEGER NOT NULL DEFAULT 0,
            result_bytes INTEGER NOT NULL DEFAULT 0,
            details BLOB NOT NULL
        ) WITHOUT ROWID
        """,
        "CREATE INDEX batches_by_owner ON batches (owner, created_at, id)",
        "CREATE INDEX batches_by_status ON batches (status, created_at)",
        # One row for each line that has a result. The rows are removed when the files of the batch are complete.
        """
        CREATE TABLE batch_lines (
            batch_id TEXT NOT NULL REFERENCES batches (id) ON DELETE CASCADE,
            line INTEGER NOT NULL,
            is_error INTEGER NOT NULL,
            result BLOB NOT NULL,
            PRIMARY KEY (batch_id, line)
        ) WITHOUT ROWID
        """,
    ),
    (
        "ALTER TABLE responses ADD COLUMN status TEXT NOT NULL DEFAULT 'completed'",
        # The process that works on a background response.
        "ALTER TABLE responses ADD COLUMN worker TEXT",
        # Its request. The column is empty when the response has a final status.
        "ALTER TABLE responses ADD COLUMN request BLOB",
        "ALTER TABLE responses ADD COLUMN num_items INTEGER NOT NULL DEFAULT 0",
    ),
)

EXPIRING = ("responses",)
"""Tables whose rows are deleted at their `expires_at`."""
