-- What onceward says to PostgreSQL. One statement per name; `:name` is a parameter.
--
-- Every write of an identity first tries its advisory lock, which ends with the transaction. Without it an INSERT
-- would block behind an uncommitted twin for as long as that one's handler runs; with it "in flight" is known at once.
--
-- JSON and uuid travel as text: a pool that the user gives may have codecs of its own for those types.

-- name: claim
INSERT INTO onceward_records (
    identity, consumer, tenant, scope, key, message_id, type, source, topic, origin, state, attempts,
    payload_hash, handler, host, processed_at, occurred_at, stream, position)
SELECT
    :identity::text::uuid, :consumer::text, :tenant::text, :scope::text, :key::text, :message_id::text, :type::text,
    :source::text, :topic::text, :origin::text, 'processed', 1,
    :payload_hash::bytea, :handler::text, :host::text, now(), :occurred_at::timestamptz, :stream::text,
    :position::bigint
WHERE pg_try_advisory_xact_lock(:lock::bigint)
ON CONFLICT (identity) DO NOTHING

-- name: find
SELECT
    consumer, tenant, scope, key, message_id, type, source, topic, origin, state, attempts, started,
    errors::text, result::text, payload::text, body, headers::text, payload_hash, extra::text, handler, host,
    received_at, processed_at, duration_ms, occurred_at, expires_at, next_try_at, stream, position,
    depends_on::text, received_position, processed_position,
    clock_timestamp() AS now
FROM onceward_records WHERE identity = :identity::text::uuid

-- name: position_done
SELECT 1 FROM onceward_records
WHERE consumer = :consumer::text AND tenant = :tenant::text AND stream = :stream::text
  AND position = :position::bigint AND state = 'processed'
LIMIT 1

-- name: take
UPDATE onceward_records
SET state = 'processed', attempts = attempts + 1, started = greatest(0, started - :unmark::int), processed_at = now(),
    payload = NULL, body = NULL, headers = NULL, payload_hash = :payload_hash::bytea, next_try_at = NULL,
    origin = :origin::text, handler = :handler::text, host = :host::text
WHERE identity = :identity::text::uuid
  AND state = :was_state::text AND attempts = :was_attempts::int AND started = :was_started::int
  AND pg_try_advisory_xact_lock(:lock::bigint)

-- name: complete
UPDATE onceward_records
SET result = :result::text::json, extra = :extra::text::json, duration_ms = :duration_ms::float8
WHERE identity = :identity::text::uuid

-- For a second the mark keeps others away, until its runner has made its claim.
-- name: mark
INSERT INTO onceward_records (
    identity, consumer, tenant, scope, key, message_id, type, source, topic, origin, state, attempts, started,
    payload, body, headers, payload_hash, handler, host, occurred_at, stream, position, depends_on,
    next_try_at)
SELECT
    :identity::text::uuid, :consumer::text, :tenant::text, :scope::text, :key::text, :message_id::text, :type::text,
    :source::text, :topic::text, :origin::text, 'running', 0, 1,
    :payload::text::json, :body::bytea, :headers::text::json, :payload_hash::bytea, :handler::text, :host::text,
    :occurred_at::timestamptz, :stream::text, :position::bigint, :depends_on::text::json,
    clock_timestamp() + interval '1 second'
WHERE pg_try_advisory_xact_lock(:lock::bigint)
ON CONFLICT (identity) DO UPDATE
SET state = 'running', started = onceward_records.started + 1, handler = excluded.handler, host = excluded.host,
    next_try_at = excluded.next_try_at
WHERE onceward_records.state = ANY (string_to_array(:from_states::text, ','))
  AND onceward_records.attempts = :was_attempts::int AND onceward_records.started = :was_started::int

-- name: unmark
UPDATE onceward_records
SET started = greatest(0, started - 1),
    next_try_at = CASE WHEN state = 'running' THEN NULL ELSE next_try_at END,
    state = CASE WHEN state = 'running' THEN 'failed' ELSE state END
WHERE identity = :identity::text::uuid AND started > 0 AND pg_try_advisory_xact_lock(:lock::bigint)

-- The error is appended to the last nine. A record that changed meanwhile (somebody else succeeded) is left alone.
-- name: fail
INSERT INTO onceward_records (
    identity, consumer, tenant, scope, key, message_id, type, source, topic, origin, state, attempts,
    errors, payload, body, headers, payload_hash, handler, host, duration_ms, occurred_at, next_try_at,
    stream, position, depends_on)
SELECT
    :identity::text::uuid, :consumer::text, :tenant::text, :scope::text, :key::text, :message_id::text, :type::text,
    :source::text, :topic::text, :origin::text, :state::text, :counted::int,
    jsonb_build_array(:error::text::jsonb || jsonb_build_object('at', clock_timestamp())),
    :payload::text::json, :body::bytea, :headers::text::json, :payload_hash::bytea, :handler::text, :host::text,
    :duration_ms::float8, :occurred_at::timestamptz, clock_timestamp() + :delay::float8 * interval '1 second',
    :stream::text, :position::bigint, :depends_on::text::json
WHERE pg_try_advisory_xact_lock(:lock::bigint)
ON CONFLICT (identity) DO UPDATE
SET state = excluded.state, attempts = onceward_records.attempts + :counted::int,
    -- a record that says processed has taken its mark back already
    started = greatest(0, onceward_records.started
                          - CASE WHEN onceward_records.state = 'processed' THEN 0 ELSE :unmark::int END),
    errors = jsonb_path_query_array(coalesce(onceward_records.errors, '[]'), '$[last - 8 to last]') || excluded.errors,
    payload = excluded.payload, body = excluded.body, headers = excluded.headers,
    payload_hash = excluded.payload_hash, origin = excluded.origin, handler = excluded.handler,
    host = excluded.host, duration_ms = excluded.duration_ms, processed_at = NULL,
    next_try_at = excluded.next_try_at
WHERE onceward_records.state = ANY (string_to_array(:from_states::text, ','))
RETURNING
    consumer, tenant, scope, key, message_id, type, source, topic, origin, state, attempts, started,
    errors::text, result::text, payload::text, body, headers::text, payload_hash, extra::text, handler, host,
    received_at, processed_at, duration_ms, occurred_at, expires_at, next_try_at, stream, position,
    depends_on::text, received_position, processed_position

-- name: discard
UPDATE onceward_records SET state = 'discarded', payload = NULL, body = NULL, headers = NULL
WHERE identity = :identity::text::uuid AND state = 'dead' AND pg_try_advisory_xact_lock(:lock::bigint)

-- One sweeper at a time and consumer; the lock ends with the transaction.
-- name: sweep_lock
SELECT 1 WHERE pg_try_advisory_xact_lock(:lock::bigint)

-- Only processed records, the oldest first, and none that a transaction holds: traffic never waits for this.
-- name: sweep
DELETE FROM onceward_records WHERE identity IN (
    SELECT identity FROM onceward_records
    WHERE consumer = :consumer::text AND state = 'processed'
      AND processed_at < clock_timestamp() - :older::float8 * interval '1 second'
    ORDER BY processed_at, identity LIMIT :batch::int
    FOR UPDATE SKIP LOCKED)

-- name: schema_version
SELECT coalesce(max(version), 0) AS version FROM onceward_schema

-- CREATE TABLE IF NOT EXISTS would ask for the right to create, even where there is nothing to do.
-- name: schema_exists
SELECT 1 WHERE to_regclass('onceward_schema') IS NOT NULL

-- name: schema_table
CREATE TABLE IF NOT EXISTS onceward_schema (
    version integer PRIMARY KEY, name text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())

-- name: schema_applied
INSERT INTO onceward_schema (version, name) VALUES (:version::int, :name::text)

-- One migration at a time, whoever starts; the number is the first 8 bytes of sha256('onceward_schema').
-- name: schema_lock
SELECT pg_advisory_xact_lock(x'c60b09ae02fc7685'::bigint)

-- Many messages at once. One parameter has all of them as JSON, sorted by identity; identities travel back as one value.
-- name: claim_many
WITH claimed AS (
    INSERT INTO onceward_records (
        identity, consumer, tenant, scope, key, message_id, type, source, topic, origin, state, attempts,
        payload_hash, handler, host, processed_at, occurred_at, stream, position)
    SELECT
        identity, :consumer::text, tenant, scope, key, coalesce(message_id, key), type, coalesce(source, ''),
        coalesce(topic, ''), origin, 'processed', 1,
        decode(payload_hash, 'base64'), handler, :host::text, now(), occurred_at, stream, position
    FROM json_to_recordset(:claims::text::json) AS claims(
        identity uuid, lock bigint, tenant text, scope text, key text, message_id text, type text, source text,
        topic text, origin text, payload_hash text, handler text, occurred_at timestamptz, stream text,
        position bigint)
    WHERE pg_try_advisory_xact_lock(lock)
    ON CONFLICT (identity) DO NOTHING
    RETURNING identity)
SELECT string_agg(uuid_send(identity), ''::bytea) AS digests FROM claimed

-- name: find_many
SELECT
    consumer, tenant, scope, key, message_id, type, source, topic, origin, state, attempts, started,
    errors::text, result::text, payload::text, body, headers::text, payload_hash, extra::text, handler, host,
    received_at, processed_at, duration_ms, occurred_at, expires_at, next_try_at, stream, position,
    depends_on::text, received_position, processed_position,
    uuid_send(identity) AS digest, clock_timestamp() AS now
FROM onceward_records WHERE identity = ANY (string_to_array(:identities::text, ',')::uuid[])

-- Only what a duplicate is answered with.
-- name: find_done
SELECT uuid_send(identity) AS digest, payload_hash, result::text AS result
FROM onceward_records
WHERE identity = ANY (string_to_array(:identities::text, ',')::uuid[]) AND state = 'processed'

-- name: complete_many
UPDATE onceward_records
SET result = closing.result::json, duration_ms = closing.duration_ms
FROM json_to_recordset(:closings::text::json) AS closing(identity uuid, result text, duration_ms float8)
WHERE onceward_records.identity = closing.identity

-- name: unclaim
DELETE FROM onceward_records
WHERE identity = ANY (string_to_array(:identities::text, ',')::uuid[]) AND state = 'processed'
