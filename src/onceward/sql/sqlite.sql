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

-- The same for a message that has nothing but what all of them have.
-- name: claim_plain
INSERT INTO onceward_records (
    identity, consumer, tenant, scope, key, message_id, type, source, topic, state, attempts,
    payload_hash, handler, host, processed_at)
VALUES (
    :identity, :consumer, :tenant, :scope, :key, :message_id, :type, :source, :topic, 'processed', 1,
    :payload_hash, :handler, :host, strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
ON CONFLICT (identity) DO NOTHING

-- name: find
SELECT *, strftime('%Y-%m-%dT%H:%M:%fZ', 'now') AS now FROM onceward_records WHERE identity = :identity

-- Its state, and what it needs itself. Each half has its index.
-- name: position_look
SELECT state, depends_on FROM onceward_records
WHERE consumer = :consumer AND tenant = :tenant AND stream = :stream AND position = :position
  AND state IN ('processed', 'discarded')
UNION ALL
SELECT state, depends_on FROM onceward_records
WHERE consumer = :consumer AND tenant = :tenant AND stream = :stream AND position = :position
  AND state IN ('accepted', 'running', 'failed', 'dead')
LIMIT 1

-- name: position_done
SELECT 1 WHERE EXISTS (
    SELECT 1 FROM onceward_records
    WHERE consumer = :consumer AND tenant = :tenant AND stream = :stream AND position = :position
      AND state = 'processed' AND state IN ('processed', 'discarded'))   -- as its index says
OR EXISTS (
    SELECT 1 FROM onceward_floors
    WHERE consumer = :consumer AND tenant = :tenant AND stream = :stream AND position >= :position)

-- name: take
UPDATE onceward_records
SET state = 'processed', attempts = attempts + 1, started = max(0, started - :unmark),
    processed_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now'),
    payload = NULL, body = NULL, headers = NULL, payload_hash = :payload_hash, next_try_at = NULL,
    origin = :origin, handler = :handler, host = :host,
    expires_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now', (:keep_ms / 1000.0) || ' seconds')
WHERE identity = :identity
  AND state = :was_state AND attempts = :was_attempts AND started = :was_started
  AND (received_position IS NULL OR state = 'dead')

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
  AND onceward_records.received_position IS NULL

-- name: unmark
UPDATE onceward_records
SET started = max(0, started - 1),
    next_try_at = CASE WHEN state = 'running' AND received_position IS NULL THEN NULL ELSE next_try_at END,
    state = CASE WHEN state = 'running' AND received_position IS NULL THEN 'failed' ELSE state END
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
  AND (onceward_records.received_position IS NULL OR onceward_records.state IN ('processed', 'dead'))
RETURNING *

-- name: discard
UPDATE onceward_records SET state = 'discarded', payload = NULL, body = NULL, headers = NULL
WHERE identity = :identity AND state = 'dead'

-- The writer's turn is lock enough.
-- name: sweep_lock
SELECT 1

-- A batch of processed records, the oldest first, and which of them may go. A sweep goes on where its last batch ended.
-- Who depends on a position must go on to find it done: its stream's floor is raised to it. So it stays as long as
-- something below it is not finished.
-- name: sweep_expired
SELECT identity, expires_at AS moment, tenant, stream, position,
    stream IS NULL OR position IS NULL OR NOT EXISTS (
        SELECT 1 FROM onceward_records lower
        WHERE lower.consumer = :consumer AND lower.tenant = r.tenant AND lower.stream = r.stream
          AND lower.position < r.position AND lower.state IN ('accepted', 'running', 'failed', 'dead')) AS deleted
FROM onceward_records r
WHERE consumer = :consumer AND state = 'processed' AND expires_at IS NOT NULL
  AND expires_at < strftime('%Y-%m-%dT%H:%M:%fZ', 'now')
  AND (expires_at, identity) > (coalesce(:after, ''), coalesce(:after_identity, x''))
ORDER BY expires_at, identity LIMIT :batch

-- name: sweep_old
SELECT identity, processed_at AS moment, tenant, stream, position,
    stream IS NULL OR position IS NULL OR NOT EXISTS (
        SELECT 1 FROM onceward_records lower
        WHERE lower.consumer = :consumer AND lower.tenant = r.tenant AND lower.stream = r.stream
          AND lower.position < r.position AND lower.state IN ('accepted', 'running', 'failed', 'dead')) AS deleted
FROM onceward_records r
WHERE consumer = :consumer AND state = 'processed' AND expires_at IS NULL
  AND processed_at < strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-' || :older || ' seconds')
  AND (processed_at, identity) > (coalesce(:after, ''), coalesce(:after_identity, x''))
ORDER BY processed_at, identity LIMIT :batch

-- name: sweep_floor
INSERT INTO onceward_floors (consumer, tenant, stream, position) VALUES (:consumer, :tenant, :stream, :position)
ON CONFLICT (consumer, tenant, stream) DO UPDATE SET position = excluded.position WHERE position < excluded.position

-- name: sweep_delete
WITH RECURSIVE place(at) AS (SELECT 1 UNION ALL SELECT at + 16 FROM place WHERE at + 16 < length(:identities))
DELETE FROM onceward_records WHERE identity IN (SELECT substr(:identities, at, 16) FROM place)

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

-- name: schema_applied_since
INSERT INTO onceward_schema (version, name, since) VALUES (:version, :name, :since)

-- The oldest code that works with all that is newer than what we know.
-- name: schema_since
SELECT coalesce(max(coalesce(since, version)), 0) AS since FROM onceward_schema WHERE version > :known

-- BEGIN IMMEDIATE already holds the write lock.
-- name: schema_lock
SELECT 1

-- name: schema_versions
SELECT version FROM onceward_schema

-- What there is of ours: a column of a table, or what a table is not.
-- name: schema_made
SELECT 'column' AS kind, t.name AS name, c.name AS body
FROM sqlite_master t, pragma_table_info(t.name) c
WHERE t.type = 'table' AND t.name GLOB 'onceward_*'
UNION ALL
SELECT type, name, sql FROM sqlite_master WHERE type = 'trigger' AND name GLOB 'onceward_*'

-- name: token_filled
UPDATE onceward_schema SET token = lower(hex(randomblob(16))) WHERE coalesce(token, '') = ''

-- For many messages at once these are said once for each: there is no trip to save.
-- name: find_done
SELECT identity AS digest, payload_hash, result FROM onceward_records
WHERE identity = :identity AND state = 'processed'

-- name: unclaim
DELETE FROM onceward_records WHERE identity = :identity AND state = 'processed'

-- The queue. Several statements for one step are no trips here, so most are about one row, and are run for several. Several
-- lanes are one blob, 16 bytes each.

-- name: queue_numbers
INSERT INTO onceward_counters (name, value) VALUES (:name, :many)
ON CONFLICT (name) DO UPDATE SET value = value + excluded.value
RETURNING value

-- name: queue_keep
INSERT INTO onceward_records (
    identity, consumer, tenant, scope, key, message_id, type, source, topic, origin, state, payload, body, headers,
    payload_hash, host, occurred_at, stream, position, depends_on, received_position, next_try_at, lane)
VALUES (
    :identity, :consumer, :tenant, :scope, :key, :message_id, :type, :source, :topic, :origin, 'accepted', :payload,
    :body, :headers, :payload_hash, :host, :occurred_at, :stream, :position, :depends_on, :seq, :not_before, :lane_name)
ON CONFLICT (identity) DO NOTHING

-- A record that failed inline, or whose runner died there.
-- name: queue_join
UPDATE onceward_records
SET state = 'accepted', received_position = :seq, lane = :lane_name,
    next_try_at = coalesce(max(next_try_at, :not_before), next_try_at, :not_before)
WHERE identity = :identity AND received_position IS NULL
  AND (state = 'failed' OR state = 'running' AND next_try_at <= strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
RETURNING next_try_at

-- name: queue_pend
INSERT INTO onceward_pending (seq, identity, lane, rank, track, position, due)
VALUES (:seq, :identity, :lane, :rank, :track, :place, :due)

-- name: queue_known
SELECT state, received_position, payload_hash FROM onceward_records WHERE identity = :identity

-- A lane that sleeps is woken.
-- name: queue_open
INSERT INTO onceward_lanes (lane, consumer, tenant, name, share, run_at, state)
VALUES (
    :lane, :consumer, :tenant, :name, :share,
    max(coalesce(:not_before, ''), strftime('%Y-%m-%dT%H:%M:%fZ', 'now')),
    CASE WHEN :not_before > strftime('%Y-%m-%dT%H:%M:%fZ', 'now') THEN 'later' ELSE 'ready' END)
ON CONFLICT (lane) DO UPDATE SET state = 'ready', run_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now')
WHERE state IN ('waiting', 'later')

-- name: queue_claim
UPDATE onceward_lanes
SET owner = :owner, claims = claims + 1, state = 'running',
    run_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now', :lease)
WHERE lane IN (
    SELECT lane FROM onceward_lanes
    WHERE consumer = :consumer AND run_at <= strftime('%Y-%m-%dT%H:%M:%fZ', 'now')
    ORDER BY run_at LIMIT :most)
RETURNING lane, claims

-- name: queue_claim_share
UPDATE onceward_lanes
SET owner = :owner, claims = claims + 1, state = 'running',
    run_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now', :lease)
WHERE lane IN (
    SELECT lane FROM onceward_lanes
    WHERE consumer = :consumer AND run_at <= strftime('%Y-%m-%dT%H:%M:%fZ', 'now') AND share % :shares = :number
    ORDER BY run_at LIMIT :most)
RETURNING lane, claims

-- name: queue_hold
WITH RECURSIVE place(at) AS (SELECT 1 UNION ALL SELECT at + 16 FROM place WHERE at + 16 < length(:lanes))
SELECT lane FROM onceward_lanes
WHERE lane IN (SELECT substr(:lanes, at, 16) FROM place) AND owner = :owner
ORDER BY lane

-- The first messages of each lane, lane by lane. Within a lane they are sorted by who reads them, which is cheaper.
-- name: queue_heads
WITH RECURSIVE place(at) AS (SELECT 1 UNION ALL SELECT at + 16 FROM place WHERE at + 16 < length(:lanes))
SELECT p.lane AS lane_id, p.seq, p.rank, p.track, p.position AS place, p.due, p.aside,
    strftime('%Y-%m-%dT%H:%M:%fZ', 'now') AS now, r.*
FROM place
CROSS JOIN onceward_pending p ON p.seq IN (
    SELECT seq FROM onceward_pending WHERE lane = substr(:lanes, place.at, 16) AND NOT aside
    ORDER BY rank, seq LIMIT :most)
LEFT JOIN onceward_records r ON r.identity = p.identity

-- name: queue_track
SELECT p.seq, p.rank, p.track, p.position AS place, p.due, p.aside, strftime('%Y-%m-%dT%H:%M:%fZ', 'now') AS now, r.*
FROM onceward_pending p LEFT JOIN onceward_records r ON r.identity = p.identity
WHERE p.lane = :lane AND p.track = :track
ORDER BY p.position, p.seq LIMIT :most

-- The state is that of a record which is there; done is also what is below the floor.
-- name: queue_position
SELECT
    EXISTS (SELECT 1 FROM onceward_records
            WHERE consumer = :consumer AND tenant = :tenant AND stream = :stream AND position = :position
              AND state = 'processed' AND state IN ('processed', 'discarded'))   -- as its index says
    OR EXISTS (SELECT 1 FROM onceward_floors
               WHERE consumer = :consumer AND tenant = :tenant AND stream = :stream AND position >= :position) AS done,
    (SELECT state FROM onceward_records
     WHERE consumer = :consumer AND tenant = :tenant AND stream = :stream AND position = :position
       AND state IN ('processed', 'discarded')
     UNION ALL
     SELECT state FROM onceward_records
     WHERE consumer = :consumer AND tenant = :tenant AND stream = :stream AND position = :position
       AND state IN ('accepted', 'running', 'failed', 'dead')
     LIMIT 1) AS state

-- name: queue_tracks
SELECT DISTINCT lane, track FROM onceward_pending
WHERE seq IN (SELECT value FROM json_each(:seqs)) AND track IS NOT NULL

-- name: queue_gone
DELETE FROM onceward_pending WHERE seq IN (SELECT value FROM json_each(:seqs))

-- name: queue_done
UPDATE onceward_records
SET state = 'processed', attempts = attempts + 1, started = max(0, started - :started),
    processed_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now'), processed_position = :number,
    result = :result, duration_ms = :duration_ms, payload = NULL, body = NULL, headers = NULL, next_try_at = NULL,
    expires_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now', (:keep_ms / 1000.0) || ' seconds'),
    handler = :handler, host = :host
WHERE identity = :identity AND state IN ('accepted', 'running', 'failed')

-- name: queue_put_off
UPDATE onceward_pending SET due = strftime('%Y-%m-%dT%H:%M:%fZ', 'now', :delay) WHERE seq = :seq

-- name: queue_failed
UPDATE onceward_records
SET state = :state, attempts = attempts + :counted, started = max(0, started - :started),
    errors = json_insert(
        CASE WHEN json_array_length(errors) >= 10 THEN json_remove(errors, '$[0]') ELSE coalesce(errors, '[]') END,
        '$[#]', json_set(:error, '$.at', strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))),
    duration_ms = :duration_ms, handler = :handler, host = :host,
    next_try_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now', :delay)
WHERE identity = :identity AND state IN ('accepted', 'running', 'failed')

-- What comes next in a track need not stay behind any more.
-- name: queue_next_of_track
UPDATE onceward_pending SET aside = false
WHERE aside AND seq = (
    SELECT seq FROM onceward_pending WHERE lane = :lane AND track = :track ORDER BY position, seq LIMIT 1)

-- name: queue_wait
INSERT INTO onceward_waits (seq, consumer, tenant, stream, position, place, lane, deadline)
VALUES (
    :seq, :consumer, :tenant, :stream, :position,
    :consumer || char(31) || :tenant || char(31) || :stream || char(31) || :position, :lane, :deadline)
ON CONFLICT (seq) DO UPDATE
SET tenant = excluded.tenant, stream = excluded.stream, position = excluded.position, place = excluded.place,
    deadline = excluded.deadline

-- name: queue_aside
UPDATE onceward_pending SET aside = true WHERE seq = :seq AND rank < 0

-- name: queue_behind
UPDATE onceward_pending SET aside = true WHERE seq IN (SELECT value FROM json_each(:seqs))

-- name: queue_first
SELECT seq FROM onceward_pending WHERE lane = :lane AND NOT aside ORDER BY rank, seq LIMIT 1

-- name: queue_lane_gone
DELETE FROM onceward_lanes
WHERE lane = :lane AND owner = :owner
  AND NOT EXISTS (SELECT 1 FROM onceward_pending p WHERE p.lane = :lane AND NOT p.aside)
  AND NOT EXISTS (SELECT 1 FROM onceward_pending p WHERE p.lane = :lane AND p.aside)

-- name: queue_lane_end
UPDATE onceward_lanes
SET state = :state, run_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now', :delay), blocker = :blocker, owner = NULL, claims = 0
WHERE lane = :lane AND owner = :owner

-- name: queue_release
WITH RECURSIVE place(at) AS (SELECT 1 UNION ALL SELECT at + 16 FROM place WHERE at + 16 < length(:lanes))
UPDATE onceward_lanes
SET owner = NULL, claims = max(0, claims - :forgiven), state = 'ready',
    run_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now', :delay)
WHERE lane IN (SELECT substr(:lanes, at, 16) FROM place) AND owner = :owner

-- name: queue_extend
WITH RECURSIVE place(at) AS (SELECT 1 UNION ALL SELECT at + 16 FROM place WHERE at + 16 < length(:lanes))
UPDATE onceward_lanes SET run_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now', :lease)
WHERE lane IN (SELECT substr(:lanes, at, 16) FROM place) AND owner = :owner
RETURNING lane

-- name: queue_mark_start
UPDATE onceward_records SET started = started + 1, state = 'running'
WHERE identity = :identity AND state IN ('accepted', 'running', 'failed')
  AND EXISTS (SELECT 1 FROM onceward_lanes WHERE lane = :lane AND owner = :owner)
RETURNING *

-- name: queue_unmark_start
UPDATE onceward_records
SET started = max(0, started - 1), state = CASE WHEN state = 'running' THEN 'accepted' ELSE state END
WHERE identity = :identity AND started > 0

-- Those of them that have messages; and a line without a lane where any lane has.
-- name: queue_busy
WITH RECURSIVE place(at) AS (SELECT 1 UNION ALL SELECT at + 16 FROM place WHERE at + 16 < length(:lanes))
SELECT lane FROM onceward_lanes WHERE lane IN (SELECT substr(:lanes, at, 16) FROM place)
UNION ALL
SELECT NULL
WHERE EXISTS (SELECT 1 FROM onceward_lanes WHERE consumer = :consumer AND run_at IS NOT NULL)
   OR EXISTS (SELECT 1 FROM onceward_lanes WHERE consumer = :consumer AND run_at IS NULL)

-- name: queue_due_in
SELECT (julianday(run_at) - julianday('now')) * 86400.0 AS seconds FROM onceward_lanes
WHERE consumer = :consumer AND run_at IS NOT NULL
ORDER BY run_at LIMIT 1

-- name: queue_due_in_share
SELECT (julianday(run_at) - julianday('now')) * 86400.0 AS seconds FROM onceward_lanes
WHERE consumer = :consumer AND run_at IS NOT NULL AND share % :shares = :number
ORDER BY run_at LIMIT 1

-- name: queue_late
SELECT seq FROM onceward_waits
WHERE consumer = :consumer AND deadline <= strftime('%Y-%m-%dT%H:%M:%fZ', 'now')
ORDER BY deadline LIMIT 1000

-- name: queue_late_back
UPDATE onceward_pending SET aside = false WHERE aside AND seq IN (SELECT value FROM json_each(:seqs))

-- name: queue_late_lanes
UPDATE onceward_lanes SET state = 'ready', run_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now')
WHERE state IN ('waiting', 'later')
  AND lane IN (SELECT w.lane FROM onceward_waits w WHERE w.seq IN (SELECT value FROM json_each(:seqs)))

-- name: queue_late_ended
DELETE FROM onceward_waits WHERE seq IN (SELECT value FROM json_each(:seqs))

-- name: queue_requeue
UPDATE onceward_records
SET state = 'accepted', attempts = 0, started = 0, next_try_at = NULL,
    received_position = coalesce(received_position, :seq)
WHERE identity = :identity AND state = 'dead'
RETURNING received_position, consumer

-- name: queue_unblock
UPDATE onceward_lanes SET state = 'ready', run_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now'), blocker = NULL
WHERE lane = :lane AND state = 'blocked' AND blocker = :identity

-- Counts end at :most, so that a long queue costs no more than a short one.
-- name: queue_stats_lanes
SELECT state, count(*) AS lanes, min(run_at) AS next_at
FROM (
    SELECT * FROM (SELECT state, run_at FROM onceward_lanes
                   WHERE consumer = :consumer AND run_at IS NOT NULL ORDER BY run_at LIMIT :most) due
    UNION ALL
    SELECT * FROM (SELECT state, run_at FROM onceward_lanes
                   WHERE consumer = :consumer AND run_at IS NULL LIMIT :most) asleep) l
GROUP BY state

-- name: queue_stats_pending
SELECT
    (SELECT count(*) FROM (
        SELECT 1 FROM (
            SELECT * FROM (SELECT lane FROM onceward_lanes
                           WHERE consumer = :consumer AND run_at IS NOT NULL ORDER BY run_at LIMIT :most) due
            UNION ALL
            SELECT * FROM (SELECT lane FROM onceward_lanes
                           WHERE consumer = :consumer AND run_at IS NULL LIMIT :most) asleep) l
        CROSS JOIN onceward_pending p WHERE p.lane = l.lane AND NOT p.aside LIMIT :most) few)
    + (SELECT count(*) FROM (
        SELECT 1 FROM (
            SELECT * FROM (SELECT lane FROM onceward_lanes
                           WHERE consumer = :consumer AND run_at IS NOT NULL ORDER BY run_at LIMIT :most) due
            UNION ALL
            SELECT * FROM (SELECT lane FROM onceward_lanes
                           WHERE consumer = :consumer AND run_at IS NULL LIMIT :most) asleep) l
        CROSS JOIN onceward_pending p WHERE p.lane = l.lane AND p.aside LIMIT :most) few) AS pending

-- name: queue_stats_messages
SELECT
    (SELECT count(*) FROM (
        SELECT 1 FROM onceward_records WHERE consumer = :consumer AND state <> 'processed' AND state = 'dead'
          AND received_position IS NOT NULL LIMIT :most) few) AS dead,
    (SELECT received_at FROM onceward_records WHERE consumer = :consumer AND state <> 'processed' AND state = 'accepted'
     ORDER BY received_at LIMIT 1) AS accepted,
    (SELECT received_at FROM onceward_records WHERE consumer = :consumer AND state <> 'processed' AND state = 'failed'
       AND received_position IS NOT NULL ORDER BY received_at LIMIT 1) AS failed,
    (SELECT received_at FROM onceward_records WHERE consumer = :consumer AND state <> 'processed' AND state = 'running'
       AND received_position IS NOT NULL ORDER BY received_at LIMIT 1) AS running

-- What is known of some lanes that do not go on by themselves: those that wait for a person first, then the oldest.
-- name: queue_stats_worst
SELECT
    c.tenant, c.name, c.state, c.run_at,
    (SELECT count(*) FROM (SELECT 1 FROM onceward_pending p
                           WHERE p.lane = c.lane AND NOT p.aside LIMIT 1000) few)
    + (SELECT count(*) FROM (SELECT 1 FROM onceward_pending p
                             WHERE p.lane = c.lane AND p.aside LIMIT 1000) few) AS pending,
    coalesce((SELECT r.received_at FROM onceward_pending p JOIN onceward_records r ON r.identity = p.identity
              WHERE p.seq = c.first), dead.received_at) AS oldest,
    dead.message_id AS dead_letter, w.stream, w.position
FROM (
    SELECT l.*,
        coalesce(
            (SELECT p.seq FROM onceward_pending p JOIN onceward_waits w ON w.seq = p.seq
             WHERE p.lane = l.lane AND p.aside LIMIT 1),
            (SELECT p.seq FROM onceward_pending p WHERE p.lane = l.lane AND NOT p.aside
             ORDER BY p.rank, p.seq LIMIT 1)) AS first
    FROM (
        SELECT * FROM (SELECT * FROM onceward_lanes
                       WHERE consumer = :consumer AND run_at IS NULL LIMIT 1000) asleep
        UNION ALL
        SELECT * FROM (SELECT * FROM onceward_lanes
                       WHERE consumer = :consumer AND run_at IS NOT NULL ORDER BY run_at LIMIT 1000) due
        WHERE state = 'retrying') l) c
LEFT JOIN onceward_records dead ON dead.identity = c.blocker
LEFT JOIN onceward_waits w ON w.seq = c.first
ORDER BY c.state <> 'blocked', c.first LIMIT :worst

-- Of all consumers.
-- name: queue_stats_estimate
SELECT count(*) AS pending FROM onceward_pending
