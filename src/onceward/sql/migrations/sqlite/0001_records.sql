-- One row per identity. Rows are appended; only the small unique index is written at random places.
CREATE TABLE onceward_records (
    identity            BLOB NOT NULL UNIQUE,  -- the first 16 bytes of SHA-256, see onceward.identity
    consumer            TEXT NOT NULL,
    tenant              TEXT NOT NULL,
    scope               TEXT NOT NULL,
    key                 TEXT NOT NULL,
    message_id          TEXT NOT NULL,
    type                TEXT NOT NULL,
    source              TEXT NOT NULL DEFAULT '',
    topic               TEXT NOT NULL DEFAULT '',
    origin              TEXT,
    state               TEXT NOT NULL
                        CHECK (state IN ('accepted', 'running', 'processed', 'failed', 'dead', 'discarded')),
    attempts            INTEGER NOT NULL DEFAULT 0,
    started             INTEGER NOT NULL DEFAULT 0,   -- marked starts that never ended
    errors              TEXT,   -- JSON, as result, payload, headers, extra and depends_on
    result              TEXT,
    payload             TEXT,
    body                BLOB,
    headers             TEXT,
    payload_hash        BLOB,
    extra               TEXT,
    handler             TEXT,
    host                TEXT,
    received_at         TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
    processed_at        TEXT,
    duration_ms         REAL,
    occurred_at         TEXT,
    expires_at          TEXT,
    next_try_at         TEXT,
    stream              TEXT,
    position            INTEGER,
    depends_on          TEXT,
    received_position   INTEGER,
    processed_position  INTEGER
);

-- What operators look for. Processed rows, nearly all of them, are not in it.
CREATE INDEX onceward_records_unfinished ON onceward_records (consumer, state, received_at)
    WHERE state <> 'processed';

-- Where a dependency is looked up. Messages without a stream are not in it, nor what is still to be done.
CREATE INDEX onceward_records_position ON onceward_records (consumer, tenant, stream, position)
    WHERE stream IS NOT NULL AND state IN ('processed', 'discarded');
