-- What onceward says to SQLite. One statement per name; `:name` is a parameter.
--
-- The writer holds the database's one write lock (BEGIN IMMEDIATE), so nothing here can be in flight elsewhere.

-- name: claim
INSERT INTO onceward_records (
    identity, consumer, tenant, scope, key, message_id, type, source, topic, origin, state, attempts,
    payload_hash, handler, host, processed_at, occurred_at, expires_at, stream, position)
VALUES (
    :identity, :consumer, :tenant, :scope, :key, :message_id, :type, :source, :topic, :origin, 'processed', 1,
    :payload_hash, :handler, :host, strftime('%Y-%m-%dT%H:%M:%fZ', 'now'), :occurred_at,
    strftime('%Y-%m-%dT%H:%M:%fZ', 'now', (:keep_ms / 1000.0) || ' seconds'), :stream, :position)
ON CONFLICT (identity) DO NOTHING

-- name: find
SELECT *, strftime('%Y-%m-%dT%H:%M:%fZ', 'now') AS now FROM onceward_records WHERE identity = :identity

-- Its state, and what it needs itself.
-- name: position_look
SELECT state, depends_on FROM onceward_records
WHERE consumer = :consumer AND tenant = :tenant AND stream = :stream AND position = :position
LIMIT 1

-- name: position_done
SELECT 1 FROM onceward_records
WHERE consumer = :consumer AND tenant = :tenant AND stream = :stream AND position = :position
  AND state = 'processed'
LIMIT 1

-- name: take
UPDATE onceward_records
SET state = 'processed', attempts = attempts + 1, started = max(0, started - :unmark),
    processed_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now'),
    payload = NULL, body = NULL, headers = NULL, payload_hash = :payload_hash, next_try_at = NULL,
    origin = :origin, handler = :handler, host = :host,
    expires_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now', (:keep_ms / 1000.0) || ' seconds')
WHERE identity = :identity
  AND state = :was_state AND attempts = :was_attempts AND started = :was_started

-- name: complete
UPDATE onceward_records
SET result = :result, extra = :extra, duration_ms = :duration_ms
WHERE identity = :identity

-- For a second the mark keeps others away, until its runner has made its claim.
-- name: mark
INSERT INTO onceward_records (
    identity, consumer, tenant, scope, key, message_id, type, source, topic, origin, state, attempts, started,
    payload, body, headers, payload_hash, handler, host, occurred_at, stream, position, depends_on,
    next_try_at)
VALUES (
    :identity, :consumer, :tenant, :scope, :key, :message_id, :type, :source, :topic, :origin, 'running', 0, 1,
    :payload, :body, :headers, :payload_hash, :handler, :host, :occurred_at, :stream, :position, :depends_on,
    strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '1 seconds'))
ON CONFLICT (identity) DO UPDATE
SET state = 'running', started = onceward_records.started + 1, handler = excluded.handler, host = excluded.host,
    next_try_at = excluded.next_try_at
WHERE instr(',' || :from_states || ',', ',' || onceward_records.state || ',')
  AND onceward_records.attempts = :was_attempts AND onceward_records.started = :was_started

-- name: unmark
UPDATE onceward_records
SET started = max(0, started - 1),
    next_try_at = CASE WHEN state = 'running' THEN NULL ELSE next_try_at END,
    state = CASE WHEN state = 'running' THEN 'failed' ELSE state END
WHERE identity = :identity AND started > 0

-- The error is appended to the last nine. A record that changed meanwhile (somebody else succeeded) is left alone.
-- name: fail
INSERT INTO onceward_records (
    identity, consumer, tenant, scope, key, message_id, type, source, topic, origin, state, attempts,
    errors, payload, body, headers, payload_hash, handler, host, duration_ms, occurred_at, next_try_at,
    stream, position, depends_on)
VALUES (
    :identity, :consumer, :tenant, :scope, :key, :message_id, :type, :source, :topic, :origin, :state, :counted,
    json_array(json_set(:error, '$.at', strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))),
    :payload, :body, :headers, :payload_hash, :handler, :host, :duration_ms, :occurred_at,
    strftime('%Y-%m-%dT%H:%M:%fZ', 'now', :delay || ' seconds'), :stream, :position, :depends_on)
ON CONFLICT (identity) DO UPDATE
SET state = excluded.state, attempts = onceward_records.attempts + :counted,
    -- a record that says processed has taken its mark back already
    started = max(0, onceward_records.started
                     - CASE WHEN onceward_records.state = 'processed' THEN 0 ELSE :unmark END),
    errors = json_insert(
        CASE WHEN json_array_length(onceward_records.errors) >= 10
             THEN json_remove(onceward_records.errors, '$[0]')
             ELSE coalesce(onceward_records.errors, '[]') END,
        '$[#]', json_extract(excluded.errors, '$[0]')),
    payload = excluded.payload, body = excluded.body, headers = excluded.headers,
    payload_hash = excluded.payload_hash, origin = excluded.origin, handler = excluded.handler,
    host = excluded.host, duration_ms = excluded.duration_ms, processed_at = NULL, expires_at = NULL,
    next_try_at = excluded.next_try_at
WHERE instr(',' || :from_states || ',', ',' || onceward_records.state || ',')
RETURNING *

-- name: discard
UPDATE onceward_records SET state = 'discarded', payload = NULL, body = NULL, headers = NULL
WHERE identity = :identity AND state = 'dead'

-- The writer's turn is lock enough.
-- name: sweep_lock
SELECT 1

-- A batch of processed records, the oldest first. A sweep goes on where its last batch ended.
-- name: sweep_expired
DELETE FROM onceward_records WHERE identity IN (
    SELECT identity FROM onceward_records
    WHERE consumer = :consumer AND state = 'processed' AND expires_at IS NOT NULL
      AND expires_at < strftime('%Y-%m-%dT%H:%M:%fZ', 'now')
      AND (expires_at, identity) > (coalesce(:after, ''), coalesce(:after_identity, x''))
    ORDER BY expires_at, identity LIMIT :batch)
RETURNING identity, expires_at AS moment, 1 AS deleted

-- name: sweep_old
DELETE FROM onceward_records WHERE identity IN (
    SELECT identity FROM onceward_records
    WHERE consumer = :consumer AND state = 'processed' AND expires_at IS NULL
      AND processed_at < strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-' || :older || ' seconds')
      AND (processed_at, identity) > (coalesce(:after, ''), coalesce(:after_identity, x''))
    ORDER BY processed_at, identity LIMIT :batch)
RETURNING identity, processed_at AS moment, 1 AS deleted

-- name: sweep_count
SELECT
    (SELECT count(*) FROM onceward_records
     WHERE consumer = :consumer AND state = 'processed' AND expires_at IS NOT NULL
       AND expires_at < strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
    + (SELECT count(*) FROM onceward_records
       WHERE consumer = :consumer AND state = 'processed' AND expires_at IS NULL
         AND processed_at < strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-' || :older || ' seconds')) AS records

-- The time of a record is when it was processed, or else received. Each part is in an index of its own.
-- name: stats
SELECT 'processed' AS state, count(*) AS records,
    count(*) FILTER (WHERE processed_at > strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-1 day')) AS last_day,
    count(*) FILTER (WHERE processed_at > strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-1 hour')) AS last_hour,
    min(processed_at) AS oldest
FROM onceward_records WHERE consumer = :consumer AND state = 'processed' AND expires_at IS NULL
UNION ALL
SELECT 'processed' AS state, count(*) AS records,
    count(*) FILTER (WHERE processed_at > strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-1 day')) AS last_day,
    count(*) FILTER (WHERE processed_at > strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-1 hour')) AS last_hour,
    min(processed_at) AS oldest
FROM onceward_records WHERE consumer = :consumer AND state = 'processed' AND expires_at IS NOT NULL
UNION ALL
SELECT state AS state, count(*) AS records,
    count(*) FILTER (WHERE received_at > strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-1 day')) AS last_day,
    count(*) FILTER (WHERE received_at > strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-1 hour')) AS last_hour,
    min(received_at) AS oldest
FROM onceward_records WHERE consumer = :consumer AND state <> 'processed'
GROUP BY state

-- name: consumers
SELECT DISTINCT consumer FROM onceward_records ORDER BY consumer

-- name: records_unfinished
SELECT * FROM onceward_records
WHERE consumer = :consumer AND state <> 'processed' AND instr(',' || :states || ',', ',' || state || ',')
  AND received_at <= coalesce(strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-' || :older || ' seconds'), 'until')
ORDER BY received_at, identity LIMIT :limit

-- name: records_processed
SELECT * FROM onceward_records
WHERE consumer = :consumer AND state = 'processed' AND expires_at IS NULL
  AND processed_at <= coalesce(strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-' || :older || ' seconds'), 'until')
ORDER BY processed_at, identity LIMIT :limit

-- name: records_expiring
SELECT * FROM onceward_records
WHERE consumer = :consumer AND state = 'processed' AND expires_at IS NOT NULL
  AND processed_at <= coalesce(strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-' || :older || ' seconds'), 'until')
ORDER BY processed_at, identity LIMIT :limit

-- name: now
SELECT strftime('%Y-%m-%dT%H:%M:%fZ', 'now') AS now

-- Which database this is.
-- name: schema_token
SELECT token FROM onceward_schema WHERE version = 1

-- name: schema_version
SELECT coalesce(max(version), 0) AS version FROM onceward_schema

-- name: schema_exists
SELECT 1 FROM sqlite_master WHERE name = 'onceward_schema'

-- name: schema_table
CREATE TABLE IF NOT EXISTS onceward_schema (
    version INTEGER NOT NULL PRIMARY KEY, name TEXT NOT NULL,
    applied_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ', 'now')))

-- name: schema_applied
INSERT INTO onceward_schema (version, name) VALUES (:version, :name)

-- BEGIN IMMEDIATE already holds the write lock.
-- name: schema_lock
SELECT 1

-- name: schema_versions
SELECT version FROM onceward_schema

-- name: record_columns
SELECT name FROM pragma_table_info('onceward_records')

-- name: token_exists
SELECT 1 FROM pragma_table_info('onceward_schema') WHERE name = 'token'

-- name: token_column
ALTER TABLE onceward_schema ADD COLUMN token TEXT NOT NULL DEFAULT ''

-- name: token_filled
UPDATE onceward_schema SET token = lower(hex(randomblob(16))) WHERE coalesce(token, '') = ''

-- SQLite has no functions of its own.
-- name: function_missing
SELECT 1 WHERE false

-- For many messages at once these are said once for each: there is no trip to save.
-- name: find_done
SELECT identity AS digest, payload_hash, result FROM onceward_records
WHERE identity = :identity AND state = 'processed'

-- name: unclaim
DELETE FROM onceward_records WHERE identity = :identity AND state = 'processed'
