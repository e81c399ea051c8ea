-- What onceward says to PostgreSQL. One statement per name; `:name` is a parameter.
--
-- Every write of an identity first tries its advisory lock, which ends with the transaction. Without it an INSERT
-- would block behind an uncommitted twin for as long as that one's handler runs; with it "in flight" is known at once.
--
-- JSON and uuid travel as text: a pool that the user gives may have codecs of its own for those types.

-- name: claim
INSERT INTO onceward_records (
    identity, consumer, tenant, scope, key, message_id, type, source, topic, origin, state, attempts,
    payload_hash, handler, host, processed_at, occurred_at, expires_at, stream, position)
SELECT
    :identity::text::uuid, :consumer::text, :tenant::text, :scope::text, :key::text, :message_id::text, :type::text,
    :source::text, :topic::text, :origin::text, 'processed', 1,
    :payload_hash::bytea, :handler::text, :host::text, now(), :occurred_at::timestamptz,
    now() + :keep_ms::bigint * interval '1 millisecond', :stream::text, :position::bigint
WHERE pg_try_advisory_xact_lock(:lock::bigint)
ON CONFLICT (identity) DO NOTHING

-- The same for a message that has nothing but what all of them have: each parameter costs both sides. All of them are
-- texts, which are the cheapest to say.
-- name: claim_plain
INSERT INTO onceward_records (
    identity, consumer, tenant, scope, key, message_id, type, source, topic, state, attempts,
    payload_hash, handler, host, processed_at)
SELECT
    :identity::text::uuid, :consumer::text, :tenant::text, :scope::text, :key::text, :message_id::text, :type::text,
    :source::text, :topic::text, 'processed', 1, decode(:payload_hash::text, 'hex'), :handler::text, :host::text, now()
WHERE pg_try_advisory_xact_lock(:lock::text::bigint)
ON CONFLICT (identity) DO NOTHING

-- name: find
SELECT
    consumer, tenant, scope, key, message_id, type, source, topic, origin, state, attempts, started,
    errors::text, result::text, payload::text, body, headers::text, payload_hash, extra::text, handler, host,
    received_at, processed_at, duration_ms, occurred_at, expires_at, next_try_at, stream, position,
    depends_on::text, received_position, processed_position, lane,
    clock_timestamp() AS now
FROM onceward_records WHERE identity = :identity::text::uuid

-- Its state, and what it needs itself. Each half has its index.
-- name: position_look
SELECT state, depends_on::text AS depends_on FROM onceward_records
WHERE consumer = :consumer::text AND tenant = :tenant::text AND stream = :stream::text AND position = :position::bigint
  AND state IN ('processed', 'discarded')
UNION ALL
SELECT state, depends_on::text AS depends_on FROM onceward_records
WHERE consumer = :consumer::text AND tenant = :tenant::text AND stream = :stream::text AND position = :position::bigint
  AND state IN ('accepted', 'running', 'failed', 'dead')
LIMIT 1

-- name: position_done
SELECT 1 WHERE EXISTS (
    SELECT FROM onceward_records
    WHERE consumer = :consumer::text AND tenant = :tenant::text AND stream = :stream::text
      AND position = :position::bigint AND state = 'processed')
OR EXISTS (
    SELECT FROM onceward_floors
    WHERE consumer = :consumer::text AND tenant = :tenant::text AND stream = :stream::text
      AND position >= :position::bigint)

-- name: take
UPDATE onceward_records
SET state = 'processed', attempts = attempts + 1, started = greatest(0, started - :unmark::int), processed_at = now(),
    payload = NULL, body = NULL, headers = NULL, payload_hash = :payload_hash::bytea, next_try_at = NULL,
    origin = :origin::text, handler = :handler::text, host = :host::text,
    expires_at = now() + :keep_ms::bigint * interval '1 millisecond'
WHERE identity = :identity::text::uuid
  AND state = :was_state::text AND attempts = :was_attempts::int AND started = :was_started::int
  AND (received_position IS NULL OR state = 'dead')
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
  AND onceward_records.received_position IS NULL

-- name: unmark
UPDATE onceward_records
SET started = greatest(0, started - 1),
    next_try_at = CASE WHEN state = 'running' AND received_position IS NULL THEN NULL ELSE next_try_at END,
    state = CASE WHEN state = 'running' AND received_position IS NULL THEN 'failed' ELSE state END
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
    jsonb_build_array(:error::text::jsonb || jsonb_build_object('at', clock_timestamp()))::json,
    :payload::text::json, :body::bytea, :headers::text::json, :payload_hash::bytea, :handler::text, :host::text,
    :duration_ms::float8, :occurred_at::timestamptz, clock_timestamp() + :delay::float8 * interval '1 second',
    :stream::text, :position::bigint, :depends_on::text::json
WHERE pg_try_advisory_xact_lock(:lock::bigint)
ON CONFLICT (identity) DO UPDATE
SET state = excluded.state, attempts = onceward_records.attempts + :counted::int,
    -- a record that says processed has taken its mark back already
    started = greatest(0, onceward_records.started
                          - CASE WHEN onceward_records.state = 'processed' THEN 0 ELSE :unmark::int END),
    errors = (jsonb_path_query_array(coalesce(onceward_records.errors::jsonb, '[]'), '$[last - 8 to last]')
              || excluded.errors::jsonb)::json,
    payload = excluded.payload, body = excluded.body, headers = excluded.headers,
    payload_hash = excluded.payload_hash, origin = excluded.origin, handler = excluded.handler,
    host = excluded.host, duration_ms = excluded.duration_ms, processed_at = NULL, expires_at = NULL,
    next_try_at = excluded.next_try_at
WHERE onceward_records.state = ANY (string_to_array(:from_states::text, ','))
  AND (onceward_records.received_position IS NULL OR onceward_records.state IN ('processed', 'dead'))
RETURNING
    consumer, tenant, scope, key, message_id, type, source, topic, origin, state, attempts, started,
    errors::text, result::text, payload::text, body, headers::text, payload_hash, extra::text, handler, host,
    received_at, processed_at, duration_ms, occurred_at, expires_at, next_try_at, stream, position,
    depends_on::text, received_position, processed_position, lane

-- name: discard
UPDATE onceward_records SET state = 'discarded', payload = NULL, body = NULL, headers = NULL
WHERE identity = :identity::text::uuid AND state = 'dead' AND pg_try_advisory_xact_lock(:lock::bigint)

-- One sweeper at a time and consumer; the lock ends with the transaction.
-- name: sweep_lock
SELECT 1 WHERE pg_try_advisory_xact_lock(:lock::bigint)

-- A batch of processed records, the oldest first, and none that a transaction holds. The advisory locks are those of
-- the identities: a delivery of one of them finds it locked, reads the record and goes on; nobody waits for this.
-- A sweep goes on where its last batch ended: what was deleted is still in the index until a vacuum.
-- Who depends on a position must go on to find it done: its stream's floor is raised to it. So it stays as long as
-- something below it is not finished.
-- name: sweep_expired
WITH found AS MATERIALIZED (
    SELECT identity, expires_at AS moment, tenant, stream, position FROM onceward_records
    WHERE consumer = :consumer::text AND state = 'processed' AND expires_at < now()
      AND (expires_at, identity) > (coalesce(:after::timestamptz, '-infinity'),
                                  coalesce(:after_identity::text::uuid, '00000000-0000-0000-0000-000000000000'))
    ORDER BY expires_at, identity LIMIT :batch::int
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM onceward_records AS old USING found
    WHERE old.identity = found.identity
      AND (found.stream IS NULL OR found.position IS NULL OR NOT EXISTS (
          SELECT FROM onceward_records lower
          WHERE lower.consumer = :consumer::text AND lower.tenant = found.tenant AND lower.stream = found.stream
            AND lower.position < found.position AND lower.state IN ('accepted', 'running', 'failed', 'dead')))
      AND pg_try_advisory_xact_lock(('x' || left(replace(found.identity::text, '-', ''), 16))::bit(64)::bigint)
    RETURNING old.identity, old.tenant, old.stream, old.position
), floors AS (
    INSERT INTO onceward_floors (consumer, tenant, stream, position)
    SELECT :consumer::text, tenant, stream, max(position) FROM gone
    WHERE stream IS NOT NULL AND position IS NOT NULL
    GROUP BY tenant, stream
    ON CONFLICT (consumer, tenant, stream) DO UPDATE SET position = excluded.position
    WHERE onceward_floors.position < excluded.position
)
SELECT found.identity::text AS identity, found.moment, (gone.identity IS NOT NULL)::int AS deleted
FROM found LEFT JOIN gone USING (identity)

-- name: sweep_old
WITH found AS MATERIALIZED (
    SELECT identity, processed_at AS moment, tenant, stream, position FROM onceward_records
    WHERE consumer = :consumer::text AND state = 'processed' AND expires_at IS NULL
      AND processed_at < now() - :older::float8 * interval '1 second'
      AND (processed_at, identity) > (coalesce(:after::timestamptz, '-infinity'),
                                  coalesce(:after_identity::text::uuid, '00000000-0000-0000-0000-000000000000'))
    ORDER BY processed_at, identity LIMIT :batch::int
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM onceward_records AS old USING found
    WHERE old.identity = found.identity
      AND (found.stream IS NULL OR found.position IS NULL OR NOT EXISTS (
          SELECT FROM onceward_records lower
          WHERE lower.consumer = :consumer::text AND lower.tenant = found.tenant AND lower.stream = found.stream
            AND lower.position < found.position AND lower.state IN ('accepted', 'running', 'failed', 'dead')))
      AND pg_try_advisory_xact_lock(('x' || left(replace(found.identity::text, '-', ''), 16))::bit(64)::bigint)
    RETURNING old.identity, old.tenant, old.stream, old.position
), floors AS (
    INSERT INTO onceward_floors (consumer, tenant, stream, position)
    SELECT :consumer::text, tenant, stream, max(position) FROM gone
    WHERE stream IS NOT NULL AND position IS NOT NULL
    GROUP BY tenant, stream
    ON CONFLICT (consumer, tenant, stream) DO UPDATE SET position = excluded.position
    WHERE onceward_floors.position < excluded.position
)
SELECT found.identity::text AS identity, found.moment, (gone.identity IS NOT NULL)::int AS deleted
FROM found LEFT JOIN gone USING (identity)

-- name: sweep_count
SELECT
    (SELECT count(*) FROM onceward_records
     WHERE consumer = :consumer::text AND state = 'processed' AND expires_at < now())
    + (SELECT count(*) FROM onceward_records
       WHERE consumer = :consumer::text AND state = 'processed' AND expires_at IS NULL
         AND processed_at < now() - :older::float8 * interval '1 second') AS records

-- The time of a record is when it was processed, or else received. Each part is in an index of its own.
-- name: stats
SELECT 'processed' AS state, count(*) AS records,
    count(*) FILTER (WHERE processed_at > now() - interval '1 day') AS last_day,
    count(*) FILTER (WHERE processed_at > now() - interval '1 hour') AS last_hour,
    min(processed_at) AS oldest
FROM onceward_records WHERE consumer = :consumer::text AND state = 'processed' AND expires_at IS NULL
UNION ALL
SELECT 'processed' AS state, count(*) AS records,
    count(*) FILTER (WHERE processed_at > now() - interval '1 day') AS last_day,
    count(*) FILTER (WHERE processed_at > now() - interval '1 hour') AS last_hour,
    min(processed_at) AS oldest
FROM onceward_records WHERE consumer = :consumer::text AND state = 'processed' AND expires_at IS NOT NULL
UNION ALL
SELECT state AS state, count(*) AS records,
    count(*) FILTER (WHERE received_at > now() - interval '1 day') AS last_day,
    count(*) FILTER (WHERE received_at > now() - interval '1 hour') AS last_hour,
    min(received_at) AS oldest
FROM onceward_records WHERE consumer = :consumer::text AND state <> 'processed'
GROUP BY state

-- name: consumers
SELECT DISTINCT consumer FROM onceward_records ORDER BY consumer

-- name: records_unfinished
SELECT
    consumer, tenant, scope, key, message_id, type, source, topic, origin, state, attempts, started,
    errors::text, result::text, payload::text, body, headers::text, payload_hash, extra::text, handler, host,
    received_at, processed_at, duration_ms, occurred_at, expires_at, next_try_at, stream, position,
    depends_on::text, received_position, processed_position, lane
FROM onceward_records
WHERE consumer = :consumer::text AND state <> 'processed' AND state = ANY (string_to_array(:states::text, ','))
  AND received_at <= coalesce(now() - :older::float8 * interval '1 second', 'infinity')
ORDER BY received_at, identity LIMIT :limit::int

-- name: records_processed
SELECT
    consumer, tenant, scope, key, message_id, type, source, topic, origin, state, attempts, started,
    errors::text, result::text, payload::text, body, headers::text, payload_hash, extra::text, handler, host,
    received_at, processed_at, duration_ms, occurred_at, expires_at, next_try_at, stream, position,
    depends_on::text, received_position, processed_position, lane
FROM onceward_records
WHERE consumer = :consumer::text AND state = 'processed' AND expires_at IS NULL
  AND processed_at <= coalesce(now() - :older::float8 * interval '1 second', 'infinity')
ORDER BY processed_at, identity LIMIT :limit::int

-- name: records_expiring
SELECT
    consumer, tenant, scope, key, message_id, type, source, topic, origin, state, attempts, started,
    errors::text, result::text, payload::text, body, headers::text, payload_hash, extra::text, handler, host,
    received_at, processed_at, duration_ms, occurred_at, expires_at, next_try_at, stream, position,
    depends_on::text, received_position, processed_position, lane
FROM onceward_records
WHERE consumer = :consumer::text AND state = 'processed' AND expires_at IS NOT NULL
  AND processed_at <= coalesce(now() - :older::float8 * interval '1 second', 'infinity')
ORDER BY processed_at, identity LIMIT :limit::int

-- name: now
SELECT clock_timestamp() AS now

-- Which database this is.
-- name: schema_token
SELECT token FROM onceward_schema WHERE version = 1

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

-- name: schema_applied_since
INSERT INTO onceward_schema (version, name, since) VALUES (:version::int, :name::text, :since::int)

-- The oldest code that works with all that is newer than what we know.
-- name: schema_since
SELECT coalesce(max(coalesce(since, version)), 0) AS since FROM onceward_schema WHERE version > :known::int

-- One migration at a time, whoever starts; the number is the first 8 bytes of sha256('onceward_schema').
-- name: schema_lock
SELECT pg_advisory_xact_lock(x'c60b09ae02fc7685'::bigint)

-- name: schema_versions
SELECT version FROM onceward_schema

-- What there is of ours, in the schema that we are in: a column of a table, or what a table is not.
-- name: schema_made
SELECT 'column' AS kind, t.relname::text AS name, a.attname::text AS body
FROM pg_class t JOIN pg_namespace n ON n.oid = t.relnamespace JOIN pg_attribute a ON a.attrelid = t.oid
WHERE n.nspname = current_schema() AND t.relname ~ '^onceward_' AND t.relkind IN ('r', 'p')
  AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL
SELECT 'sequence', t.relname::text, NULL
FROM pg_class t JOIN pg_namespace n ON n.oid = t.relnamespace
WHERE n.nspname = current_schema() AND t.relname ~ '^onceward_' AND t.relkind = 'S'
UNION ALL
SELECT 'function', f.proname::text, f.prosrc
FROM pg_proc f JOIN pg_namespace n ON n.oid = f.pronamespace
WHERE n.nspname = current_schema() AND f.proname ~ '^onceward_'
UNION ALL
SELECT 'trigger', g.tgname::text, NULL
FROM pg_trigger g JOIN pg_class t ON t.oid = g.tgrelid JOIN pg_namespace n ON n.oid = t.relnamespace
WHERE n.nspname = current_schema() AND t.relname ~ '^onceward_' AND NOT g.tgisinternal

-- name: token_filled
UPDATE onceward_schema SET token = gen_random_uuid()::text WHERE coalesce(token, '') = ''

-- Many messages at once, sorted by identity: an array for each column. What they have in common is a parameter of its own,
-- and not read again in each line. Nothing comes back, so it rides with BEGIN.
-- `digests` has 48 bytes for each: its identity, and the hash of its payload.
-- name: claim_many
INSERT INTO onceward_records (
    identity, consumer, tenant, scope, key, message_id, type, source, topic, origin, state, attempts,
    payload_hash, handler, host, processed_at, occurred_at, expires_at, stream, position)
SELECT
    encode(substring(:digests::bytea, n::int * 48 - 47, 16), 'hex')::uuid, :consumer::text,
    coalesce(tenant, :tenant::text), coalesce(scope, :scope::text), key, coalesce(message_id, key),
    coalesce(type, :type::text), coalesce(source, :source::text), coalesce(topic, :topic::text), origin,
    'processed', 1, substring(:digests::bytea, n::int * 48 - 31, 32), coalesce(handler, :handler::text),
    :host::text, now(), occurred_at, now() + keep_ms * interval '1 millisecond', stream, position
FROM unnest(
    :keys::text::text[], :own_message_id::text::text[], :own_origin::text::text[],
    :own_occurred_at::text::timestamptz[], :own_stream::text::text[], :own_position::text::bigint[],
    :own_keep_ms::text::bigint[], :own_tenant::text::text[], :own_scope::text::text[], :own_type::text::text[],
    :own_source::text::text[], :own_topic::text::text[], :own_handler::text::text[])
    WITH ORDINALITY AS claims(
        key, message_id, origin, occurred_at, stream, position, keep_ms, tenant, scope, type, source, topic, handler, n)
WHERE pg_try_advisory_xact_lock(('x' || encode(substring(:digests::bytea, n::int * 48 - 47, 8), 'hex'))::bit(64)::bigint)
ON CONFLICT (identity) DO NOTHING

-- Which of them were inserted, when it was not all. All of those have the time of this transaction. Not by xmin: that would
-- be another one inside of a savepoint.
-- name: claimed_of_many
SELECT uuid_send(identity) AS digest FROM onceward_records
WHERE identity = ANY (string_to_array(:identities::text, ',')::uuid[])
  AND state = 'processed' AND processed_at = now() AND host = :host::text

-- name: find_many
SELECT
    consumer, tenant, scope, key, message_id, type, source, topic, origin, state, attempts, started,
    errors::text, result::text, payload::text, body, headers::text, payload_hash, extra::text, handler, host,
    received_at, processed_at, duration_ms, occurred_at, expires_at, next_try_at, stream, position,
    depends_on::text, received_position, processed_position, lane,
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

-- The queue. Accepting, taking and closing have several steps, each of which must see what the ones before it waited
-- for: they are functions (migrations/postgresql/0004_queue.sql), so that all of it is one trip.

-- name: queue_accept
SELECT place, how, known_hash
FROM onceward_accept(:consumer::text, :host::text, :lines::text::json, :lanes::text::json)

-- name: queue_claim
SELECT uuid_send(one.lane) AS lane, one.claims, first_due
FROM onceward_claim(
         :consumer::text, :owner::text, :most::int, :lease::float8, :since::timestamptz, :shares::bigint,
         :number::bigint, NULL) c,
     unnest(c.lanes, c.claims) AS one(lane, claims)

-- name: queue_claim_for_turn
SELECT onceward_claim(
    :consumer::text, :owner::text, :most::int, :lease::float8, :since::timestamptz, :shares::bigint, :number::bigint,
    :hints::text::tid[])

-- What was claimed for a turn that could not begin. Nobody knows yet what it was, and the session that knew may be gone;
-- but what was due first was claimed first.
-- name: queue_release_claimed
UPDATE onceward_lanes
SET owner = NULL, until = NULL, claims = greatest(0, claims - 1), state = 'ready', run_at = clock_timestamp()
WHERE owner = :owner::text AND ctid = ANY (ARRAY (
    SELECT first.place FROM (
        SELECT ctid AS place, owner FROM onceward_lanes
        WHERE consumer = :consumer::text AND run_at IS NOT NULL ORDER BY run_at LIMIT 10000) first
    WHERE first.owner = :owner::text))

-- name: queue_open_claimed
SELECT onceward_open(:owner::text, :at::text::tid[], :number::int)

-- name: queue_open
SELECT onceward_hold(:owner::text, string_to_array(:lanes::text, ',')::uuid[])

-- name: queue_savepoint
SAVEPOINT onceward_turn

-- name: queue_take
SELECT * FROM onceward_take(:most::int, :together::boolean, :number::int)

-- Whether a record that is not there may just be hidden from this role.
-- name: queue_records_hidden
SELECT row_security_active('onceward_records'::regclass::oid) AS hidden

-- name: queue_hold
SELECT uuid_send(lane) AS lane FROM unnest(onceward_hold(:owner::text, string_to_array(:lanes::text, ',')::uuid[])) lane

-- Said without parameters, in the trip of COMMIT: the procedure says what its arguments are.
-- name: queue_close_at_commit
CALL onceward_close(
    :token, :consumer, :host, :owner, :lone, :ends, :failed, :blocked, :behind, :tenants, :streams, :positions, :seqs,
    :identities, :handlers, :results, :durations, :keeps, :starts, :records, :rows)

-- name: queue_close_one_at_commit
CALL onceward_close_one(
    :token, :owner, :host, :identity, :record, :handler, :result, :duration_ms, :keep_ms, :started)

-- name: queue_close
CALL onceward_close(
    NULL, :consumer::text, :host::text, :owner::text, :lone::boolean, :ends::text::json, :failed::text::json,
    :blocked::text::json, :behind::text::json, :tenants::text::text[], :streams::text::text[],
    :positions::text::bigint[], :seqs::text::bigint[], :identities::text::uuid[], :handlers::text::text[],
    :results::text::text[], :durations::text::float8[], :keeps::text::bigint[], :starts::text::integer[],
    :records::text::tid[], :rows::text::tid[])

-- name: queue_release
UPDATE onceward_lanes
SET owner = NULL, until = NULL, claims = greatest(0, claims - :forgiven::int), state = 'ready',
    run_at = clock_timestamp() + :delay::float8 * interval '1 second'
WHERE lane = ANY (string_to_array(:lanes::text, ',')::uuid[]) AND owner = :owner::text

-- name: queue_extend
UPDATE onceward_lanes
SET until = clock_timestamp() + :lease::float8 * interval '1 second',
    run_at = clock_timestamp() + :lease::float8 * interval '1 second'   -- out of the way of those who look for work
WHERE lane = ANY (string_to_array(:lanes::text, ',')::uuid[]) AND owner = :owner::text
RETURNING uuid_send(lane) AS lane

-- name: queue_mark_start
UPDATE onceward_records r
SET started = r.started + 1, state = 'running'
FROM onceward_lanes l
WHERE r.identity = :identity::text::uuid AND r.state IN ('accepted', 'running', 'failed')
  AND l.lane = :lane::text::uuid AND l.owner = :owner::text
RETURNING
    r.consumer, r.tenant, scope, key, message_id, type, source, topic, origin, r.state, attempts, started,
    errors::text, result::text, payload::text, body, headers::text, payload_hash, extra::text, handler, host,
    received_at, processed_at, duration_ms, occurred_at, expires_at, next_try_at, stream, position,
    depends_on::text, received_position, processed_position, r.lane

-- name: queue_unmark_start
UPDATE onceward_records
SET started = greatest(0, started - 1), state = CASE WHEN state = 'running' THEN 'accepted' ELSE state END
WHERE identity = :identity::text::uuid AND started > 0

-- Those of them that have messages; and a line without a lane where any lane has.
-- name: queue_busy
SELECT uuid_send(lane) AS lane FROM onceward_lanes WHERE lane = ANY (string_to_array(:lanes::text, ',')::uuid[])
UNION ALL
SELECT NULL::bytea
WHERE EXISTS (SELECT FROM onceward_lanes WHERE consumer = :consumer::text AND run_at IS NOT NULL)
   OR EXISTS (SELECT FROM onceward_lanes WHERE consumer = :consumer::text AND run_at IS NULL)

-- A lane whose claim is over, and that is there all the same, is locked by its turn, however long that takes; or it is
-- claimed when somebody looks the next time.
-- name: queue_due_in
SELECT extract(epoch FROM least(
    (SELECT run_at FROM onceward_lanes
     WHERE consumer = :consumer::text AND run_at IS NOT NULL AND until IS NULL
       AND share % :shares::bigint = :number::bigint
     ORDER BY run_at LIMIT 1),
    (SELECT min(until) FROM (
        SELECT until, share FROM onceward_lanes
        WHERE consumer = :consumer::text AND run_at IS NOT NULL ORDER BY run_at LIMIT 1000) first
     WHERE until > clock_timestamp() AND share % :shares::bigint = :number::bigint)
) - clock_timestamp())::float8 AS seconds

-- name: queue_overdue
SELECT onceward_overdue(:consumer::text) AS woken

-- name: queue_requeue
SELECT onceward_requeue(:identity::text::uuid, :lines::text::json) AS done

-- name: queue_drop
SELECT onceward_drop(:identity::text::uuid, :lane::text::uuid) AS done

-- name: queue_unblock
UPDATE onceward_lanes SET state = 'ready', run_at = clock_timestamp(), blocker = NULL
WHERE lane = :lane::text::uuid AND state = 'blocked' AND blocker = :identity::text::uuid

-- name: queue_stood
SELECT txid_status(:xid::bigint) AS status

-- A call that is lost in a crash of the server is no loss: it need not wait for the disk.
-- name: queue_call
SELECT set_config('synchronous_commit', 'off', true), pg_notify(:channel::text, '')

-- name: queue_stats_lanes
SELECT * FROM onceward_count_lanes(:consumer::text, :most::int)

-- name: queue_stats_pending
SELECT * FROM onceward_count_pending(:consumer::text, :most::int)

-- name: queue_stats_messages
SELECT * FROM onceward_count_messages(:consumer::text, :most::int)

-- name: queue_stats_worst
SELECT * FROM onceward_worst_lanes(:consumer::text, :worst::int)

-- Of all consumers, as of the last ANALYZE.
-- name: queue_stats_estimate
SELECT greatest(0, p.reltuples + l.reltuples * coalesce((
           SELECT 1 - s.null_frac FROM pg_stats s JOIN pg_namespace n ON n.nspname = s.schemaname
           WHERE n.oid = l.relnamespace AND s.tablename = l.relname AND s.attname = 'seq'), 0))::bigint AS pending
FROM pg_class p, pg_class l WHERE p.oid = 'onceward_pending'::regclass AND l.oid = 'onceward_lanes'::regclass
