"""The tables of the database. A change of a table is a new entry at the end of `MIGRATIONS`; earlier entries never change.

In all tables, the column `owner` has the API key that made the row (`ApiKey.owner`), "" without keys; times are seconds
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
        # The request of a background response. NULL when the response has a final status.
        "ALTER TABLE responses ADD COLUMN request BLOB",
        "ALTER TABLE responses ADD COLUMN num_items INTEGER NOT NULL DEFAULT 0",
    ),
    (
        # Rows that refer to a vector store have no column `owner`: the owner of the store owns them. `number` and the ids
        # of passages are never used twice, so that an old index cannot find a new passage. `index_file` is the file of
        # the base of its index. `details` is JSON of `StoreDetails`. Each store also has a table `words_NUMBER`.
        """
        CREATE TABLE vector_stores (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            owner TEXT NOT NULL,
            created_at REAL NOT NULL,
            expires_at REAL,
            last_active_at REAL NOT NULL,
            name TEXT NOT NULL,
            model TEXT NOT NULL,
            dimensions INTEGER NOT NULL,
            revision INTEGER NOT NULL DEFAULT 0,
            is_deleted INTEGER NOT NULL DEFAULT 0,
            index_file TEXT,
            details BLOB NOT NULL
        )
        """,
        "CREATE INDEX vector_stores_by_owner ON vector_stores (owner, created_at, id)",
        # The column `id` has the id of the file in `files`. `details` is JSON of `FileDetails`.
        """
        CREATE TABLE vector_store_files (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            store INTEGER NOT NULL REFERENCES vector_stores (number) ON DELETE CASCADE,
            id TEXT NOT NULL,
            name TEXT NOT NULL,
            created_at REAL NOT NULL,
            status TEXT NOT NULL,
            batch_id TEXT,
            num_bytes INTEGER NOT NULL DEFAULT 0,
            details BLOB NOT NULL,
            UNIQUE (store, id)
        )
        """,
        "CREATE INDEX vector_store_files_by_status ON vector_store_files (status, created_at)",
        "CREATE INDEX vector_store_files_by_id ON vector_store_files (id)",
        "CREATE INDEX vector_store_files_by_batch ON vector_store_files (batch_id) WHERE batch_id IS NOT NULL",
        """
        CREATE TABLE vector_store_batches (
            id TEXT PRIMARY KEY,
            store INTEGER NOT NULL REFERENCES vector_stores (number) ON DELETE CASCADE,
            created_at REAL NOT NULL,
            is_cancelled INTEGER NOT NULL DEFAULT 0
        ) WITHOUT ROWID
        """,
        # Documents that are no longer visible. Their passages are removed in several transactions.
        """
        CREATE TABLE removed_documents (
            number INTEGER PRIMARY KEY,
            store INTEGER NOT NULL
        )
        """,
        """
        CREATE TRIGGER vector_store_file_deleted AFTER DELETE ON vector_store_files BEGIN
            INSERT OR IGNORE INTO removed_documents VALUES (old.number, old.store);
        END
        """,
        """
        CREATE TRIGGER vector_store_file_ended AFTER UPDATE OF status ON vector_store_files
        WHEN new.status IN ('failed', 'cancelled') BEGIN
            INSERT OR IGNORE INTO removed_documents VALUES (old.number, old.store);
        END
        """,
        # The column `file` refers to `vector_store_files.number`.
        """
        CREATE TABLE passages (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            store INTEGER NOT NULL,
            file INTEGER NOT NULL,
            start INTEGER NOT NULL,
            end INTEGER NOT NULL,
            page INTEGER,
            heading TEXT NOT NULL,
            text TEXT NOT NULL
        )
        """,
        "CREATE INDEX passages_by_file ON passages (store, file)",
        # The column `vector` has float16 numbers, little endian.
        """
        CREATE TABLE vectors (
            store INTEGER NOT NULL,
            passage INTEGER NOT NULL,
            vector BLOB NOT NULL,
            PRIMARY KEY (store, passage)
        ) WITHOUT ROWID
        """,
    ),
    (
        # Answers that may get feedback. `id` is the id of the request. `input` and `answers` are JSON.
        """
        CREATE TABLE kept_answers (
            id TEXT PRIMARY KEY,
            owner TEXT NOT NULL,
            created_at REAL NOT NULL,
            expires_at REAL NOT NULL,
            model TEXT NOT NULL,
            num_answers INTEGER NOT NULL,
            num_bytes INTEGER NOT NULL,
            input BLOB NOT NULL,
            answers BLOB NOT NULL
        ) WITHOUT ROWID
        """,
        "CREATE INDEX kept_answers_by_owner ON kept_answers (owner, created_at, id)",
        "CREATE INDEX kept_answers_by_expiry ON kept_answers (expires_at)",
        # At most one row for each answer of a request. `correction` is text, `labels` a JSON list.
        """
        CREATE TABLE feedback (
            id TEXT NOT NULL REFERENCES kept_answers (id) ON DELETE CASCADE,
            answer INTEGER NOT NULL,
            owner TEXT NOT NULL,
            created_at REAL NOT NULL,
            score REAL NOT NULL,
            correction TEXT,
            labels BLOB NOT NULL,
            num_bytes INTEGER NOT NULL,
            PRIMARY KEY (id, answer)
        ) WITHOUT ROWID
        """,
        # Sums over the rows of an owner. Triggers keep them, so that no sum needs to read all rows.
        """
        CREATE TABLE feedback_totals (
            owner TEXT PRIMARY KEY,
            requests INTEGER NOT NULL DEFAULT 0,
            num_bytes INTEGER NOT NULL DEFAULT 0,
            positive INTEGER NOT NULL DEFAULT 0,
            negative INTEGER NOT NULL DEFAULT 0,
            neutral INTEGER NOT NULL DEFAULT 0,
            corrected INTEGER NOT NULL DEFAULT 0
        ) WITHOUT ROWID
        """,
        """
        CREATE TRIGGER kept_answer_added AFTER INSERT ON kept_answers BEGIN
            INSERT OR IGNORE INTO feedback_totals (owner) VALUES (new.owner);
            UPDATE feedback_totals SET requests = requests + 1, num_bytes = num_bytes + new.num_bytes
            WHERE owner = new.owner;
        END
        """,
        """
        CREATE TRIGGER kept_answer_deleted AFTER DELETE ON kept_answers BEGIN
            UPDATE feedback_totals SET requests = requests - 1, num_bytes = num_bytes - old.num_bytes
            WHERE owner = old.owner;
        END
        """,
        """
        CREATE TRIGGER feedback_added AFTER INSERT ON feedback BEGIN
            UPDATE feedback_totals SET num_bytes = num_bytes + new.num_bytes,
                positive = positive + (new.score > 0), negative = negative + (new.score < 0),
                neutral = neutral + (new.score = 0), corrected = corrected + (new.correction IS NOT NULL)
            WHERE owner = new.owner;
        END
        """,
        """
        CREATE TRIGGER feedback_deleted AFTER DELETE ON feedback BEGIN
            UPDATE feedback_totals SET num_bytes = num_bytes - old.num_bytes,
                positive = positive - (old.score > 0), negative = negative - (old.score < 0),
                neutral = neutral - (old.score = 0), corrected = corrected - (old.correction IS NOT NULL)
            WHERE owner = old.owner;
        END
        """,
    ),
    (
        # What engines learned. `kind`: costs; damaged: a row that could not be read. `name`: the model and the machine that
        # the content belongs to. `owner`: "" if it belongs to no key. `checksum` is the CRC-32 of `content`.
        """
        CREATE TABLE learned (
            id TEXT PRIMARY KEY,
            kind TEXT NOT NULL,
            name TEXT NOT NULL,
            owner TEXT NOT NULL,
            created_at REAL NOT NULL,
            updated_at REAL NOT NULL,
            expires_at REAL NOT NULL,
            version INTEGER NOT NULL,
            checksum INTEGER NOT NULL,
            content BLOB NOT NULL
        ) WITHOUT ROWID
        """,
    ),
)

EXPIRING = ("responses", "kept_answers", "learned")
"""Tables whose rows are deleted at their `expires_at`."""
