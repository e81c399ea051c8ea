-- The stored inbox. What is said where: a record (onceward_records) is the message and what became of it; a row here is
-- what is still to be done. All of these tables are empty when there is nothing to do.

-- The oldest code that works with what a migration made; NULL: none but its own.
ALTER TABLE onceward_schema ADD COLUMN since integer;

-- The order of arrival and of completion.
CREATE SEQUENCE onceward_received;
CREATE SEQUENCE onceward_processed;

-- One row per lane that has messages. It is what workers look for: one is due when run_at has come.
CREATE TABLE onceward_lanes (
    lane      uuid PRIMARY KEY,   -- onceward_id(consumer, tenant, 'lane', name), or the identity of a message without one
    consumer  text NOT NULL,
    tenant    text NOT NULL,
    name      text,
    share     bigint NOT NULL,    -- 32 bits, unsigned, the same for ever: fixed shares split lanes by it
    state     text NOT NULL DEFAULT 'ready',   -- ready, running, retrying, later, waiting or blocked
    run_at    timestamptz,        -- NULL: somebody has to wake it
    owner     text,               -- the worker that claimed it last
    until     timestamptz,        -- and has it until then, unless its turn takes longer; NULL: nobody has it
    claims    integer NOT NULL DEFAULT 0,   -- claims that nobody gave back
    blocker   uuid,               -- the dead letter that holds it up
    seq       bigint,             -- of a message without a lane: this row is all that it has here
    record    text                -- and where its record was when it was accepted (ctid): nearly always it still is there
) WITH (fillfactor = 40);
-- A claim changes nothing that is indexed, and there is room for it in the same page: it costs no index anything.
-- Sleeping lanes are not in it; those that are due later are at its end. So their number costs a worker nothing.
-- Those of one list have the same time. As one entry for all of them, which deduplication makes, it would have to be read
-- until the last of them has ended.
CREATE INDEX onceward_lanes_due ON onceward_lanes (consumer, run_at) WITH (deduplicate_items = off)
    WHERE run_at IS NOT NULL;
CREATE INDEX onceward_lanes_asleep ON onceward_lanes (consumer) WHERE run_at IS NULL;

-- One row per message of a lane that is not settled.
CREATE TABLE onceward_pending (
    seq       bigint PRIMARY KEY,
    identity  uuid NOT NULL,
    lane      uuid NOT NULL,
    rank      bigint NOT NULL,
    track     text,
    position  bigint,
    aside     boolean NOT NULL DEFAULT false,
    due       timestamptz,
    record    text                -- as in onceward_lanes
);
CREATE INDEX onceward_pending_next ON onceward_pending (lane, rank, seq) WHERE NOT aside;
CREATE INDEX onceward_pending_aside ON onceward_pending (lane) WHERE aside;
CREATE INDEX onceward_pending_track ON onceward_pending (lane, track, position, seq) WHERE track IS NOT NULL;

-- One row per message that waits for a position.
CREATE TABLE onceward_waits (
    seq       bigint PRIMARY KEY,
    consumer  text NOT NULL,
    tenant    text NOT NULL,
    stream    text NOT NULL,
    position  bigint NOT NULL,
    place     text NOT NULL,      -- onceward_place: all four of them
    lane      uuid NOT NULL,
    deadline  timestamptz
);
-- A hash: everything that is settled is looked up here, and nearly always in vain. It costs the same however many wait.
CREATE INDEX onceward_waits_place ON onceward_waits USING hash (place);
CREATE INDEX onceward_waits_deadline ON onceward_waits (consumer, deadline) WHERE deadline IS NOT NULL;

-- Up to here a stream is done, although its records are gone.
CREATE TABLE onceward_floors (
    consumer  text NOT NULL,
    tenant    text NOT NULL,
    stream    text NOT NULL,
    position  bigint NOT NULL,
    PRIMARY KEY (consumer, tenant, stream)
);

-- Positions that were settled in a transaction that could not see who waits for them (REPEATABLE READ and above).
CREATE TABLE onceward_arrivals (
    consumer  text NOT NULL,
    tenant    text NOT NULL,
    stream    text NOT NULL,
    position  bigint NOT NULL
);

-- Always empty: SQLite counts here, having no sequences. Both have the same tables, so that one set of models is true.
CREATE TABLE onceward_counters (
    name      text PRIMARY KEY,
    value     bigint NOT NULL
);

-- How the functions below are planned. A worker's session keeps their plans for as long as it lives, and makes them
-- when the tables may be empty; so a plan must be right whatever is in the tables later. Therefore:
-- * One plan, and not a new one for each call (plan_cache_mode).
-- * No table is read from end to end where there is another way (enable_seqscan), nor all that an index has on something
--   before the first of it is used (enable_bitmapscan). Where there is no other way, its price must not make PostgreSQL
--   compile the plan (jit).
-- * A row is looked up by `key = ANY (array)`, by `key = ANY (ARRAY[line.key])` where it is joined, or in a subquery
--   that ends in LIMIT. An equals sign in a join would allow to read a whole index and to join the other way round, and
--   so would a condition that a partial index promises, unless it is hidden (coalesce): while a table is small, that
--   looks cheap.

CREATE FUNCTION onceward_place(consumer text, tenant text, stream text, "position" bigint) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ SELECT $1 || chr(31) || $2 || chr(31) || $3 || chr(31) || $4::text $$;

CREATE FUNCTION onceward_position_lock(consumer text, tenant text, stream text, "position" bigint) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$ SELECT hashtextextended(onceward_place($1, $2, $3, $4), 7) $$;

CREATE FUNCTION onceward_is_done(consumer text, tenant text, stream text, "position" bigint) RETURNS boolean
    LANGUAGE sql STABLE
    SET search_path FROM CURRENT
    AS $$
        SELECT EXISTS (SELECT FROM onceward_records r
                       WHERE r.consumer = $1 AND r.tenant = $2 AND r.stream = $3 AND r.position = $4
                         AND r.state = 'processed')
            OR EXISTS (SELECT FROM onceward_floors f
                       WHERE f.consumer = $1 AND f.tenant = $2 AND f.stream = $3 AND f.position >= $4)
    $$;

-- Who adds something to a lane holds it with KEY SHARE until the end of the transaction, so that nobody can put it to
-- sleep or end it meanwhile; what sleeps is woken. How many of the lanes exist.
CREATE FUNCTION onceward_touch(touched uuid[]) RETURNS integer
    LANGUAGE plpgsql
    SET search_path FROM CURRENT
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
    SET jit = off
    AS $$
    DECLARE
        found_lanes integer;
        asleep uuid[];
    BEGIN
        PERFORM FROM onceward_lanes WHERE lane = ANY (touched) ORDER BY lane FOR KEY SHARE;
        GET DIAGNOSTICS found_lanes = ROW_COUNT;
        -- A statement of its own: it sees what those did whom the lock had to wait for.
        asleep := ARRAY (
            SELECT lane FROM onceward_lanes WHERE lane = ANY (touched) AND state IN ('waiting', 'later')
            ORDER BY lane FOR NO KEY UPDATE);
        IF cardinality(asleep) > 0 THEN
            UPDATE onceward_lanes SET state = 'ready', run_at = clock_timestamp() WHERE lane = ANY (asleep);
        END IF;
        RETURN found_lanes;
    END $$;

-- Keep messages. `lines` are those of onceward.queue.QueueLine; the lanes come sorted, each once.
CREATE FUNCTION onceward_accept(of_consumer text, on_host text, lines json, of_lanes json)
    RETURNS TABLE (place bigint, how text, known_hash bytea)
    LANGUAGE plpgsql
    SET search_path FROM CURRENT
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
    SET jit = off
    AS $$
    #variable_conflict use_column
    DECLARE
        expected bigint;
        fresh uuid[];        -- what is new
        parked uuid[];       -- and records that failed inline, or whose runner died there: they join the queue
        kept_lanes uuid[];
        more_lanes uuid[];
        made_lanes uuid[] := '{}';
        old_lanes uuid[];    -- those that were there, and have to be held
    BEGIN
        WITH input AS MATERIALIZED (
            SELECT line.*, nextval('onceward_received') AS seq
            FROM ROWS FROM (json_to_recordset(lines) AS (
                identity uuid, lock bigint, tenant text, scope text, key text, type text, lane uuid, rank bigint,
                track text, message_id text, source text, topic text, origin text, payload text, body text,
                headers text, payload_hash text, occurred_at timestamptz, stream text, "position" bigint,
                depends_on text, not_before timestamptz, lane_name text, share bigint)) AS line),
        inserted AS (
            INSERT INTO onceward_records (
                identity, consumer, tenant, scope, key, message_id, type, source, topic, origin, state, payload, body,
                headers, payload_hash, host, occurred_at, stream, "position", depends_on, received_position,
                next_try_at, lane)
            SELECT
                identity, of_consumer, tenant, scope, key, coalesce(message_id, key), type, coalesce(source, ''),
                coalesce(topic, ''), origin, 'accepted', payload::json, decode(body, 'base64'), headers::json,
                decode(payload_hash, 'base64'), on_host, occurred_at, stream, "position", depends_on::json, seq,
                not_before, lane_name
            FROM input
            WHERE pg_try_advisory_xact_lock(lock)
            ORDER BY identity      -- so that two lists that share messages cannot wait for each other
            ON CONFLICT (identity) DO NOTHING
            RETURNING identity, ctid::text AS record),
        alone AS (
            INSERT INTO onceward_lanes (lane, consumer, tenant, share, run_at, state, seq, record)
            SELECT identity, of_consumer, tenant, share, greatest(coalesce(not_before, now()), now()),
                   CASE WHEN not_before > now() THEN 'later' ELSE 'ready' END, seq, record
            FROM input JOIN inserted USING (identity) WHERE lane_name IS NULL
            ON CONFLICT (lane) DO UPDATE   -- of a record that somebody has deleted
            SET seq = excluded.seq, run_at = excluded.run_at, state = excluded.state, record = excluded.record),
        kept AS (
            INSERT INTO onceward_pending (seq, identity, lane, rank, track, "position", due, record)
            SELECT seq, identity, lane, rank, track, "position", not_before, record
            FROM input JOIN inserted USING (identity) WHERE lane_name IS NOT NULL
            RETURNING lane)
        SELECT (SELECT count(*) FROM input), (SELECT array_agg(identity) FROM inserted), array_agg(DISTINCT lane)
        INTO expected, fresh, kept_lanes FROM kept;

        IF coalesce(cardinality(fresh), 0) < expected THEN
            WITH input AS MATERIALIZED (
                SELECT line.*, nextval('onceward_received') AS seq
                FROM json_to_recordset(lines) AS line(
                    identity uuid, lock bigint, tenant text, lane uuid, rank bigint, track text, "position" bigint,
                    not_before timestamptz, lane_name text, share bigint)),
            joined AS (
                UPDATE onceward_records r
                SET state = 'accepted', received_position = input.seq, lane = input.lane_name,
                    next_try_at = greatest(r.next_try_at, input.not_before)
                FROM input
                WHERE r.identity = ANY (ARRAY[input.identity]) AND r.received_position IS NULL
                  AND CASE WHEN r.state = 'failed' OR r.state = 'running' AND r.next_try_at <= now()
                           THEN pg_try_advisory_xact_lock(lock) ELSE false END
                RETURNING r.identity, r.next_try_at),
            alone AS (
                INSERT INTO onceward_lanes (lane, consumer, tenant, share, run_at, state, seq)
                SELECT identity, of_consumer, tenant, share, greatest(coalesce(next_try_at, now()), now()),
                       CASE WHEN next_try_at > now() THEN 'later' ELSE 'ready' END, seq
                FROM input JOIN joined USING (identity) WHERE lane_name IS NULL),
            kept AS (
                INSERT INTO onceward_pending (seq, identity, lane, rank, track, "position", due)
                SELECT seq, identity, lane, rank, track, "position", next_try_at
                FROM input JOIN joined USING (identity) WHERE lane_name IS NOT NULL
                RETURNING lane)
            SELECT (SELECT array_agg(identity) FROM joined), array_agg(DISTINCT lane) INTO parked, more_lanes FROM kept;
            kept_lanes := ARRAY (SELECT unnest(kept_lanes) UNION SELECT unnest(more_lanes));
        END IF;

        IF cardinality(kept_lanes) > 0 THEN
            LOOP
                WITH made AS (
                    INSERT INTO onceward_lanes (lane, consumer, tenant, name, share, run_at, state)
                    SELECT lane, of_consumer, tenant, name, share, greatest(coalesce(not_before, now()), now()),
                           CASE WHEN not_before > now() THEN 'later' ELSE 'ready' END
                    FROM json_to_recordset(of_lanes) AS (
                        lane uuid, tenant text, name text, share bigint, not_before timestamptz)
                    JOIN unnest(kept_lanes) AS kept(lane) USING (lane)
                    ORDER BY lane
                    ON CONFLICT (lane) DO NOTHING
                    RETURNING lane)
                SELECT made_lanes || array_agg(lane) INTO made_lanes FROM made;
                EXIT WHEN cardinality(made_lanes) = cardinality(kept_lanes);
                old_lanes := ARRAY (SELECT unnest(kept_lanes) EXCEPT SELECT unnest(made_lanes));
                -- Nobody can see a lane that is new. One that was there may have ended before we could hold it.
                EXIT WHEN onceward_touch(old_lanes) = cardinality(old_lanes);
            END LOOP;
        END IF;

        IF expected > coalesce(cardinality(fresh), 0) THEN
            RETURN QUERY
            SELECT line.place,
                   CASE WHEN new.identity IS NOT NULL THEN 'new'
                        WHEN joined.identity IS NOT NULL THEN 'parked'
                        WHEN r.state IS NULL THEN 'in_flight'
                        WHEN r.state IN ('dead', 'discarded') THEN 'dead'
                        WHEN r.state = 'processed' THEN 'processed'
                        WHEN r.received_position IS NOT NULL THEN 'accepted'
                        ELSE 'in_flight' END,
                   r.payload_hash
            FROM ROWS FROM (json_to_recordset(lines) AS (identity uuid)) WITH ORDINALITY AS line(identity, place)
            LEFT JOIN unnest(fresh) AS new(identity) ON new.identity = line.identity
            LEFT JOIN unnest(parked) AS joined(identity) ON joined.identity = line.identity
            LEFT JOIN LATERAL (
                SELECT r.state, r.received_position, r.payload_hash FROM onceward_records r
                WHERE r.identity = line.identity AND new.identity IS NULL LIMIT 1) r ON true;
        END IF;
    END $$;

-- Own up to so many lanes that are due, the longest due first. Nothing is lost if a server that crashes forgets a claim:
-- so it does not wait for the disk.
--
-- A lane that has ended stays in the index until VACUUM, and at its beginning, where everybody looks. So whoever has
-- claimed something before begins with the time that it found there (`since`), and looks from the beginning only now
-- and then, and when there is nothing: for lanes that were committed late. And where it wants one lane, of many that are
-- due, it is told the places of the next ones (`hints`), and need not look at all for a while.
--
-- What was claimed is remembered in the session too, for those who begin their turn in the same trip (onceward_open):
-- lanes by their places, apart from those whose last worker died, which have turns of their own.
CREATE FUNCTION onceward_claim(
        of_consumer text, by_owner text, most integer, lease float8, since timestamptz, shares bigint, number bigint,
        hints tid[], OUT lanes uuid[], OUT claims integer[], OUT first_due timestamptz)
    LANGUAGE plpgsql
    SET search_path FROM CURRENT
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET enable_hashjoin = off
    SET enable_mergejoin = off
    SET plan_cache_mode = force_generic_plan
    SET datestyle = 'ISO'
    SET jit = off
    AS $$
    #variable_conflict use_column
    DECLARE
        at timestamptz := clock_timestamp();   -- now() is as of before the turn that has ended in the same trip
        due tid[];
        sound tid[];
        suspect uuid[];
        place tid;
        hint tid;
        tried integer := 0;
        lane uuid;
        times integer;
    BEGIN
        IF since IS NULL OR most > 1 THEN
            hints := NULL;
        END IF;
        WHILE place IS NULL AND tried < cardinality(hints) LOOP
            tried := tried + 1;
            hint := hints[tried];
            SELECT ctid, run_at INTO place, first_due FROM onceward_lanes
            WHERE ctid = hint AND consumer = of_consumer AND run_at <= at
              AND (until IS NULL OR until <= at) AND share % shares = number
            FOR NO KEY UPDATE SKIP LOCKED;
        END LOOP;
        IF tried > 0 THEN
            hints := nullif(hints[tried + 1:], '{}');
        END IF;
        WHILE place IS NULL LOOP
            IF most = 1 THEN   -- as below, without arrays
                SELECT ctid, run_at INTO place, first_due FROM onceward_lanes
                WHERE consumer = of_consumer AND run_at >= coalesce(since, '-infinity') AND run_at <= at
                  AND (until IS NULL OR until <= at) AND share % shares = number
                ORDER BY run_at LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED;
                -- Not where there were none when somebody looked last: it is one lane that is due again and again.
                IF place IS NOT NULL AND since IS NOT NULL AND hints IS NULL THEN
                    hints := ARRAY (
                        SELECT ctid FROM onceward_lanes
                        WHERE consumer = of_consumer AND run_at >= first_due AND run_at <= at
                          AND (until IS NULL OR until <= at) AND share % shares = number AND ctid <> place
                        ORDER BY run_at LIMIT 10);
                END IF;
                EXIT WHEN place IS NOT NULL OR since IS NULL;
                since := NULL;
                CONTINUE;
            END IF;
            SELECT array_agg(place), min(run_at) INTO due, first_due
            FROM (SELECT ctid AS place, run_at FROM onceward_lanes
                  WHERE consumer = of_consumer AND run_at >= coalesce(since, '-infinity') AND run_at <= at
                    AND (until IS NULL OR until <= at) AND share % shares = number
                  ORDER BY run_at LIMIT most FOR NO KEY UPDATE SKIP LOCKED) lanes;
            EXIT WHEN due IS NOT NULL OR since IS NULL;
            since := NULL;
        END LOOP;
        IF place IS NOT NULL THEN
            UPDATE onceward_lanes
            SET owner = by_owner, claims = claims + 1, state = 'running',
                until = clock_timestamp() + lease * interval '1 second'
            WHERE ctid = place
            RETURNING lane, claims, ctid INTO lane, times, place;
            lanes := ARRAY[lane];
            claims := ARRAY[times];
            IF times = 1 THEN
                sound := ARRAY[place];
            ELSE
                suspect := lanes;
            END IF;
        ELSIF due IS NOT NULL THEN
            WITH claimed AS (
                UPDATE onceward_lanes
                SET owner = by_owner, claims = claims + 1, state = 'running',
                    until = clock_timestamp() + lease * interval '1 second'
                WHERE ctid = ANY (due)
                RETURNING lane, claims, ctid AS place)
            SELECT array_agg(lane), array_agg(claims),
                   array_agg(place) FILTER (WHERE claims = 1), array_agg(lane) FILTER (WHERE claims > 1)
            INTO lanes, claims, sound, suspect FROM claimed;
        END IF;
        PERFORM set_config('synchronous_commit', 'off', true),
                set_config('onceward.claimed', coalesce(sound::text, '{}'), false),
                set_config('onceward.suspect', coalesce(suspect::text, '{}'), false),
                set_config('onceward.hints', coalesce(hints::text, ''), false),
                set_config('onceward.first_due', coalesce(first_due::text, ''), false);   -- hence datestyle
    END $$;

-- The first position in `depends_on` that is not processed, and the state of the record there.
CREATE FUNCTION onceward_unmet(of_consumer text, of_tenant text, depends_on json)
    RETURNS TABLE (tenant text, stream text, "position" bigint, state text)
    LANGUAGE plpgsql STABLE STRICT
    SET search_path FROM CURRENT
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
    SET jit = off
    AS $$
    #variable_conflict use_column
    BEGIN
        RETURN QUERY
        SELECT coalesce(n.tenant, of_tenant), n.stream, n."position",
               (SELECT r.state FROM onceward_records r
                WHERE r.consumer = of_consumer AND r.tenant = coalesce(n.tenant, of_tenant) AND r.stream = n.stream
                  AND r."position" = n."position" AND r.state IN ('processed', 'discarded')
                UNION ALL
                SELECT r.state FROM onceward_records r
                WHERE r.consumer = of_consumer AND r.tenant = coalesce(n.tenant, of_tenant) AND r.stream = n.stream
                  AND r."position" = n."position" AND r.state IN ('accepted', 'running', 'failed', 'dead')
                LIMIT 1)
        FROM ROWS FROM (json_to_recordset(depends_on) AS (stream text, "position" bigint, tenant text))
             WITH ORDINALITY AS n(stream, "position", tenant, nth)
        WHERE NOT onceward_is_done(of_consumer, coalesce(n.tenant, of_tenant), n.stream, n."position")
        ORDER BY n.nth LIMIT 1;
    END $$;

-- Begin a turn: hold the lanes that are still ours. Which they are is remembered until the end of the transaction, by
-- their places, which nobody can change now.
CREATE FUNCTION onceward_hold(by_owner text, claimed uuid[]) RETURNS uuid[]
    LANGUAGE plpgsql
    SET search_path FROM CURRENT
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
    SET jit = off
    AS $$
    DECLARE
        places tid[];
        held uuid[];
    BEGIN
        SELECT array_agg(place), array_agg(lane) INTO places, held FROM (
            SELECT ctid AS place, lane FROM onceward_lanes WHERE lane = ANY (claimed) AND owner = by_owner
            ORDER BY lane FOR NO KEY UPDATE) ours;
        PERFORM set_config('onceward.turn', coalesce(places::text, '{}'), true);
        RETURN held;
    END $$;

-- The same with the lanes at these places, or else with the first `number` of those that were just claimed. It is said
-- for each turn, so it is one statement.
CREATE FUNCTION onceward_open(by_owner text, at tid[], number integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path FROM CURRENT
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
    SET jit = off
    AS $$
    BEGIN
        IF at IS NULL THEN
            at := (current_setting('onceward.claimed')::tid[])[:number];
        END IF;
        PERFORM set_config('onceward.turn', coalesce(array_agg(place)::text, '{}'), true)
        FROM (SELECT ctid AS place FROM onceward_lanes
              WHERE ctid = ANY (at) AND owner = by_owner FOR NO KEY UPDATE) ours;
    END $$;

-- Read what the lanes of the turn have, up to `most` messages of each, or about so many in all (`together`). It is a
-- statement of its own, after onceward_open: in one statement the reading would be as of before the lock.
--
-- A row for each message, in the order in which they may run; one for a lane without messages. Where the lanes were just
-- claimed (`together`) also one for each that has to have its own turn: because its last worker died (`claims` above 1),
-- or because it came after the first `number` of them (`claims` 0). What is the same for all is said in the first.
CREATE FUNCTION onceward_take(most integer, together boolean, number integer)
    RETURNS TABLE (
        lane_id bytea, claims integer, first_due timestamptz, hints text, xid bigint, now timestamptz,
        seq bigint, rank bigint, track text, due timestamptz, behind boolean, unmet text, record_place text,
        row_place text, identity bytea, consumer text, tenant text, scope text, key text, message_id text, type text,
        source text, topic text, origin text, attempts integer, started integer, payload text, body bytea, headers text,
        received_at timestamptz, occurred_at timestamptz, stream text, "position" bigint, depends_on text)
    LANGUAGE plpgsql
    SET search_path FROM CURRENT
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET enable_hashjoin = off
    SET enable_mergejoin = off
    SET plan_cache_mode = force_generic_plan
    SET datestyle = 'ISO'
    SET jit = off
    AS $$
    #variable_conflict use_column
    DECLARE
        turn tid[] := current_setting('onceward.turn');
        first timestamptz;
        hints_left text;
        told boolean := false;
        -- One entry for each message, in the order in which they may run; one for a lane without messages.
        lanes uuid[];
        seqs bigint[];       -- of messages without a lane
        records tid[];       -- and where their records were
        places tid[];        -- of the others, in onceward_pending
        behinds boolean[];
        has_tracks boolean;
        has_aside boolean := false;   -- something that comes next in a track is
        more bigint;         -- lanes in which there is another message after these
    BEGIN
        IF together THEN
            most := greatest(1, most / greatest(1, cardinality(turn)));
            first := nullif(current_setting('onceward.first_due'), '');
            hints_left := nullif(current_setting('onceward.hints'), '');
        END IF;
        IF cardinality(turn) = 1 THEN   -- as below, without arrays, where it is a message without a lane
            RETURN QUERY
            SELECT
                uuid_send(l.lane), 1, first, hints_left, txid_current(), clock_timestamp(),
                l.seq, -1::bigint, NULL::text, NULL::timestamptz, false,
                CASE WHEN r.depends_on IS NOT NULL
                     THEN (SELECT row_to_json(d)::text FROM onceward_unmet(r.consumer, r.tenant, r.depends_on) d) END,
                r.ctid::text, NULL::text,
                uuid_send(r.identity), r.consumer, r.tenant, r.scope, r.key, r.message_id, r.type, r.source, r.topic,
                r.origin, r.attempts, r.started, r.payload::text, r.body, r.headers::text, r.received_at, r.occurred_at,
                r.stream, r."position", r.depends_on::text
            FROM onceward_lanes l JOIN onceward_records r ON r.ctid = l.record::tid AND (r.identity = l.lane) IS TRUE
            WHERE l.ctid = turn[1] AND l.seq IS NOT NULL;
            told := FOUND;   -- where somebody has written to the record since it is looked up below
        END IF;
        IF NOT told THEN
            -- One more than is wanted: then onceward_close need not look whether there is another.
            SELECT array_agg(lane) FILTER (WHERE nth <= most), array_agg(seq) FILTER (WHERE nth <= most),
                   array_agg(record) FILTER (WHERE nth <= most), array_agg(place) FILTER (WHERE nth <= most),
                   bool_or(track IS NOT NULL), count(*) FILTER (WHERE nth > most)
            INTO lanes, seqs, records, places, has_tracks, more
            FROM (
                SELECT l.lane, l.seq, l.record::tid AS record, p.place, p.track, coalesce(p.nth, 0) AS nth
                FROM onceward_lanes l
                LEFT JOIN LATERAL (
                    SELECT first.*, row_number() OVER () AS nth
                    FROM (SELECT p.ctid AS place, p.track FROM onceward_pending p
                          WHERE p.lane = l.lane AND NOT p.aside AND l.seq IS NULL
                          ORDER BY p.rank, p.seq LIMIT most + 1) first) p ON true
                WHERE l.ctid = ANY (turn)) first;
            IF has_tracks THEN
                -- Of a track its lowest positions, in the places of those that came first, up to one that is set aside.
                -- What is left of the track is behind that.
                SELECT array_agg(lane), array_agg(lone), array_agg(lone_at), array_agg(at), array_agg(behind),
                       bool_or(has_aside)
                INTO lanes, seqs, records, places, behinds, has_aside
                FROM (
                    SELECT h.lane, h.lone, h.lone_at, lowest.has_aside, lowest.aside IS NOT NULL AS behind,
                           CASE WHEN h.track IS NULL OR lowest.aside IS NOT NULL THEN h.at ELSE lowest.at END AS at
                    FROM (
                        SELECT first.lane, first.lone, first.lone_at, first.at, first.place, p.track, p."position", p.seq,
                               row_number() OVER (PARTITION BY first.lane, p.track ORDER BY first.place) AS nth
                        FROM unnest(lanes, seqs, records, places) WITH ORDINALITY
                             AS first(lane, lone, lone_at, at, place)
                        LEFT JOIN onceward_pending p ON p.ctid = first.at) h
                    LEFT JOIN LATERAL (
                        SELECT (array_agg(at))[h.nth::int] AS at, bool_or(aside) AS has_aside,
                               min(place) FILTER (WHERE aside AND nth <= h.nth) AS aside
                        FROM (
                            SELECT of_track.*, row_number() OVER () AS nth
                            FROM (SELECT ARRAY[coalesce(p."position", 9223372036854775807), p.seq] AS place, p.aside,
                                         p.ctid AS at
                                  FROM onceward_pending p WHERE p.lane = h.lane AND p.track = h.track
                                  ORDER BY p."position", p.seq LIMIT h.nth + 1) of_track) of_track
                        ) lowest ON h.track IS NOT NULL
                    WHERE lowest.aside IS NULL
                       OR lowest.aside < ARRAY[coalesce(h."position", 9223372036854775807), h.seq]
                    ORDER BY h.place) h;
            END IF;
            PERFORM set_config('onceward.more', CASE WHEN more = cardinality(turn) THEN 'on' ELSE '' END, true),
                    set_config('onceward.aside', CASE WHEN has_aside THEN '' ELSE 'off' END, true);
            -- Nested loops, and the other joins are off: so what comes out is in the order of the arrays.
            RETURN QUERY
            SELECT
                uuid_send(h.lane), 1, CASE WHEN nth = 1 THEN first END, CASE WHEN nth = 1 THEN hints_left END,
                CASE WHEN nth = 1 THEN txid_current() END, CASE WHEN nth = 1 THEN clock_timestamp() END,
                coalesce(h.seq, p.seq), coalesce(p.rank, -1), p.track, p.due, coalesce(h.behind, false),
                CASE WHEN r.depends_on IS NOT NULL
                     THEN (SELECT row_to_json(d)::text FROM onceward_unmet(r.consumer, r.tenant, r.depends_on) d) END,
                r.at::text, p.ctid::text,
                uuid_send(r.identity), r.consumer, r.tenant, r.scope, r.key, r.message_id, r.type, r.source, r.topic,
                r.origin, r.attempts, r.started, r.payload::text, r.body, r.headers::text, r.received_at, r.occurred_at,
                r.stream, r."position", r.depends_on::text
            FROM unnest(lanes, seqs, records, places, behinds) WITH ORDINALITY AS h(lane, seq, record, place, behind, nth)
            LEFT JOIN onceward_pending p ON p.ctid = h.place
            LEFT JOIN LATERAL (
                SELECT c.*, c.ctid AS at FROM onceward_records c
                WHERE c.ctid = coalesce(h.record, p.record::tid) AND (c.identity = coalesce(p.identity, h.lane)) IS TRUE
                UNION ALL   -- somebody has written to it since
                SELECT c.*, c.ctid AS at FROM onceward_records c
                WHERE c.identity = ANY (ARRAY[coalesce(p.identity, h.lane)])
                LIMIT 1) r ON true;
        END IF;
        IF together AND (number IS NOT NULL OR current_setting('onceward.suspect') <> '{}') THEN
            RETURN QUERY
            SELECT uuid_send(one.lane), one.claims, first, hints_left, NULL::bigint, clock_timestamp(),
                   NULL::bigint, NULL::bigint, NULL, NULL::timestamptz, false, NULL, NULL, one.place,
                   NULL::bytea, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                   NULL, NULL::integer, NULL::integer, NULL, NULL::bytea, NULL, NULL::timestamptz, NULL::timestamptz,
                   NULL, NULL::bigint, NULL
            FROM (SELECT lane, 2 AS claims, NULL AS place
                  FROM unnest(current_setting('onceward.suspect')::uuid[]) AS suspect(lane)
                  UNION ALL
                  SELECT l.lane, 0, l.ctid::text FROM onceward_lanes l
                  WHERE number IS NOT NULL AND l.ctid = ANY ((current_setting('onceward.claimed')::tid[])[number + 1:])) one;
        END IF;
    END $$;

-- End a turn; what it came to are the lines of onceward.queue.TurnClosing, NULL where there are none. The order in it
-- matters: first what may have to wait for others, then what others may have to wait for; so nobody waits in a circle.
-- `ends` are lanes that do not simply go on; `lone`: each lane is a message without a lane, and done. Where a message is
-- gone, or the transaction is not the one that `of_token` was set in, it raises OW001. Nothing may be settled in the
-- transaction after this. It is a procedure, because CALL is not planned.
CREATE PROCEDURE onceward_close(
        of_token text, of_consumer text, on_host text, by_owner text, lone boolean, ends json, failed json, blocked json,
        behind json,
        -- the positions that are settled, a column each
        tenants text[], streams text[], positions bigint[],
        -- what is done, a column each; records and rows are the places where they were read
        seqs bigint[], identities uuid[], handlers text[], results text[], durations float8[], keeps bigint[],
        starts integer[], records tid[], rows tid[])
    LANGUAGE plpgsql
    SET search_path FROM CURRENT
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET enable_hashjoin = off
    SET enable_mergejoin = off
    SET plan_cache_mode = force_generic_plan
    SET jit = off
    AS $$
    #variable_conflict use_column
    DECLARE
        unfinished text[] := '{accepted,running,failed}';
        turn tid[] := nullif(current_setting('onceward.turn', true), '');   -- the lanes that we hold
        alone tid[];                 -- and those of them that nobody is adding to
        -- What is done: a record each, and a row unless it has no lane.
        missing integer := coalesce(cardinality(seqs), 0) + coalesce(cardinality(array_remove(rows, NULL)), 0);
        looked_up boolean := false;
        found_rows integer;
        ended record;
        waiting record;
        parked bigint[] := '{}';     -- those that wait now
        too_early uuid[] := '{}';    -- lanes of those whose position is being settled this very moment
        tracks jsonb := '[]';        -- in which something is done, each a lane and a name
        places tid[];                -- the lanes that we hold, once more
        firsts bigint[];             -- and what comes next in each
    BEGIN
        IF of_token <> coalesce(current_setting('onceward.token', true), '') THEN
            RAISE 'this is not the transaction of the turn' USING ERRCODE = 'OW001';
        END IF;
        IF positions IS NOT NULL THEN
            PERFORM set_config('onceward.settles', 'all', true);   -- the trigger has nothing to do
        END IF;
        WHILE missing > 0 LOOP
            UPDATE onceward_records r
            SET state = 'processed', attempts = r.attempts + 1,
                started = greatest(0, r.started - coalesce(line.started, 0)),
                processed_at = clock_timestamp(), processed_position = nextval('onceward_processed'),
                result = line.result::json, duration_ms = line.duration_ms,
                payload = NULL, body = NULL, headers = NULL, next_try_at = NULL,
                expires_at = clock_timestamp() + line.keep_ms * interval '1 millisecond',
                handler = line.handler, host = on_host
            FROM unnest(records, identities, handlers, results, durations, keeps, starts)
                 AS line(record, identity, handler, result, duration_ms, keep_ms, started)
            WHERE r.ctid = line.record AND (r.identity = line.identity) IS TRUE AND r.state = ANY (unfinished);
            GET DIAGNOSTICS found_rows = ROW_COUNT;
            missing := missing - found_rows;
            IF rows IS NOT NULL THEN
                WITH gone AS (
                    DELETE FROM onceward_pending p USING unnest(rows, seqs) AS line("row", seq)
                    WHERE p.ctid = line."row" AND (p.seq = line.seq) IS TRUE
                    RETURNING p.lane, p.track)
                SELECT tracks || coalesce(jsonb_agg(DISTINCT jsonb_build_object('lane', lane, 'track', track))
                                              FILTER (WHERE track IS NOT NULL), '[]'), count(*)
                INTO tracks, found_rows FROM gone;
                missing := missing - found_rows;
            END IF;
            EXIT WHEN missing = 0 OR looked_up;
            -- Not where they were read: somebody has written to them. Where are they now?
            looked_up := true;
            SELECT array_agg((SELECT r.ctid FROM onceward_records r WHERE r.identity = line.identity LIMIT 1) ORDER BY nth),
                   array_agg((SELECT p.ctid FROM onceward_pending p WHERE p.seq = line.seq LIMIT 1) ORDER BY nth)
            INTO records, rows FROM unnest(identities, seqs) WITH ORDINALITY AS line(identity, seq, nth);
        END LOOP;

        IF failed IS NOT NULL THEN
            WITH line AS MATERIALIZED (
                SELECT * FROM json_to_recordset(failed) AS (
                    seq bigint, identity uuid, error text, handler text, delay float8, dead boolean, counted boolean,
                    duration_ms float8, started integer)),
            gone AS (
                DELETE FROM onceward_pending p USING line WHERE p.seq = ANY (ARRAY[line.seq]) AND line.dead
                RETURNING p.lane, p.track),
            put_off AS (
                UPDATE onceward_pending p SET due = clock_timestamp() + line.delay * interval '1 second'
                FROM line WHERE p.seq = ANY (ARRAY[line.seq]) AND line.dead IS NOT TRUE RETURNING p.seq),
            written AS (
                UPDATE onceward_records r
                SET state = CASE WHEN line.dead THEN 'dead' ELSE 'failed' END,
                    attempts = r.attempts + CASE WHEN coalesce(line.counted, true) THEN 1 ELSE 0 END,
                    started = greatest(0, r.started - coalesce(line.started, 0)),
                    errors = (jsonb_path_query_array(coalesce(r.errors::jsonb, '[]'), '$[last - 8 to last]')
                              || jsonb_build_array(line.error::jsonb
                                                   || jsonb_build_object('at', clock_timestamp())))::json,
                    duration_ms = line.duration_ms, handler = line.handler, host = on_host,
                    next_try_at = CASE WHEN line.dead IS NOT TRUE
                                       THEN clock_timestamp() + line.delay * interval '1 second' END
                FROM line
                WHERE r.identity = ANY (ARRAY[line.identity]) AND r.state = ANY (unfinished)
                RETURNING r.identity)
            SELECT (SELECT count(*) FROM line) * 2 - (SELECT count(*) FROM gone) - (SELECT count(*) FROM put_off)
                       - (SELECT count(*) FROM written)
                       - (SELECT count(l.seq) FROM line, onceward_lanes l WHERE l.lane = ANY (ARRAY[line.identity])
                          AND l.seq = line.seq) AS missing,
                   (SELECT jsonb_agg(DISTINCT jsonb_build_object('lane', lane, 'track', track)) FROM gone
                    WHERE track IS NOT NULL) AS tracks
            INTO ended;
            missing := missing + ended.missing;
            tracks := tracks || coalesce(ended.tracks, '[]');
        END IF;

        IF missing > 0 THEN
            RAISE '% of the messages and their rows are gone', missing USING ERRCODE = 'OW001';
        END IF;

        -- What comes next in a track need not stay behind any more.
        IF tracks <> '[]' AND coalesce(current_setting('onceward.aside', true), '') <> 'off' THEN
            UPDATE onceward_pending SET aside = false
            WHERE seq = ANY (ARRAY (
                SELECT seq FROM onceward_pending
                WHERE coalesce(aside, false) AND seq = ANY (ARRAY (
                    SELECT (SELECT p.seq FROM onceward_pending p WHERE p.lane = t.lane AND p.track = t.track
                            ORDER BY p."position", p.seq LIMIT 1)
                    FROM jsonb_to_recordset(tracks) AS t(lane uuid, track text)))
                FOR NO KEY UPDATE SKIP LOCKED));   -- somebody is waking it
        END IF;

        -- What onceward_settled does for one record, for all of ours. Now, and not at COMMIT: whom we wake must not wait for
        -- what we are about to lock.
        IF positions IS NOT NULL THEN
            PERFORM pg_advisory_xact_lock_shared(lock)
            FROM (SELECT onceward_position_lock(of_consumer, tenant, stream, at) AS lock
                  FROM unnest(tenants, streams, positions) AS one(tenant, stream, at) ORDER BY 1) locks;
            -- A statement of its own: it sees those whom the lock had to wait for. Nearly always nobody waits.
            FOR waiting IN
                SELECT DISTINCT tenant, stream, at
                FROM unnest(tenants, streams, positions) AS one(tenant, stream, at)
                WHERE (SELECT w.seq FROM onceward_waits w
                       WHERE w.place = onceward_place(of_consumer, one.tenant, one.stream, one.at) LIMIT 1) IS NOT NULL
            LOOP
                PERFORM onceward_wake(of_consumer, waiting.tenant, waiting.stream, waiting.at);
            END LOOP;
        END IF;

        -- Nobody can have added to a lane that is one message.
        IF lone THEN
            DELETE FROM onceward_lanes WHERE ctid = ANY (turn) AND owner = by_owner;
            RETURN;
        END IF;
        SET CONSTRAINTS onceward_settled IMMEDIATE;   -- what handlers have settled by themselves

        -- Waiting for a position, and settling it, exclude each other: who waits has its lock alone, who settles shares
        -- it (onceward_settled). We do not wait for the lock: who has it is about to settle it.
        IF blocked IS NOT NULL THEN
            FOR waiting IN
                SELECT * FROM json_to_recordset(blocked) AS (
                    seq bigint, identity uuid, lane uuid, tenant text, stream text, "position" bigint,
                    deadline timestamptz)
            LOOP
                IF NOT pg_try_advisory_xact_lock(
                        onceward_position_lock(of_consumer, waiting.tenant, waiting.stream, waiting."position")) THEN
                    too_early := too_early || waiting.lane;
                ELSIF NOT onceward_is_done(of_consumer, waiting.tenant, waiting.stream, waiting."position") THEN
                    INSERT INTO onceward_waits (seq, consumer, tenant, stream, "position", place, lane, deadline)
                    VALUES (waiting.seq, of_consumer, waiting.tenant, waiting.stream, waiting."position",
                            onceward_place(of_consumer, waiting.tenant, waiting.stream, waiting."position"),
                            waiting.lane, waiting.deadline)
                    ON CONFLICT (seq) DO UPDATE
                    SET tenant = excluded.tenant, stream = excluded.stream, "position" = excluded."position",
                        place = excluded.place, deadline = excluded.deadline;
                    UPDATE onceward_pending SET aside = true WHERE seq = waiting.seq AND rank < 0;
                    parked := parked || waiting.seq;
                END IF;
            END LOOP;
        END IF;

        IF behind IS NOT NULL THEN
            UPDATE onceward_pending SET aside = true
            WHERE seq = ANY (ARRAY (SELECT value::bigint FROM json_array_elements_text(behind)));
        END IF;

        -- Nearly always in a backlog: they simply go on. Should it not be so, somebody looks in vain.
        IF current_setting('onceward.more', true) = 'on' AND ends IS NULL AND blocked IS NULL AND behind IS NULL THEN
            UPDATE onceward_lanes
            SET state = 'ready', run_at = clock_timestamp(), blocker = NULL, owner = NULL, until = NULL, claims = 0
            WHERE ctid = ANY (turn) AND owner = by_owner;
            RETURN;
        END IF;

        -- To sleep, or to end, a lane must be ours alone. Where somebody is adding to it, it is looked at again soon.
        alone := ARRAY (
            SELECT ctid FROM onceward_lanes
            WHERE ctid = ANY (turn) AND owner = by_owner AND NOT lane = ANY (too_early)
              AND (ends IS NULL OR NOT lane = ANY (ARRAY (
                    SELECT e.lane FROM json_to_recordset(ends) AS e(lane uuid, "then" text) WHERE e."then" <> 'wait')))
            FOR UPDATE SKIP LOCKED);
        -- A statement of its own: it sees what was added before they were ours alone.
        SELECT array_agg(l.ctid), array_agg(coalesce(l.seq, first.seq)) INTO places, firsts
        FROM onceward_lanes l
        LEFT JOIN LATERAL (
            SELECT p.seq FROM onceward_pending p WHERE p.lane = l.lane AND NOT p.aside AND l.seq IS NULL
            ORDER BY p.rank, p.seq LIMIT 1) first ON true
        WHERE l.ctid = ANY (turn) AND l.owner = by_owner;
        DELETE FROM onceward_lanes l USING unnest(places, firsts) AS ours(place, first)
        WHERE l.ctid = ours.place AND l.ctid = ANY (alone)
          AND CASE WHEN l.seq IS NULL
                   THEN ours.first IS NULL
                        AND (SELECT p.seq FROM onceward_pending p WHERE p.lane = l.lane AND p.aside LIMIT 1) IS NULL
                   ELSE NOT coalesce((SELECT r.state = ANY (unfinished) FROM onceward_records r
                                      WHERE r.identity = l.lane LIMIT 1), false) END;
        GET DIAGNOSTICS found_rows = ROW_COUNT;
        IF found_rows = cardinality(turn) THEN
            RETURN;
        END IF;
        UPDATE onceward_lanes l
        SET state = CASE WHEN e."then" = 'blocked' THEN 'blocked'
                         WHEN e."then" = 'retry' THEN 'retrying'
                         WHEN e."then" = 'later' THEN 'later'
                         WHEN e.sleeps AND e.place = ANY (alone) THEN 'waiting'
                         ELSE 'ready' END,
            run_at = CASE WHEN e."then" = 'blocked' THEN NULL
                          WHEN e."then" IN ('retry', 'later')
                          THEN clock_timestamp() + coalesce(e.delay, 0) * interval '1 second'
                          WHEN e.sleeps AND e.place = ANY (alone) THEN NULL
                          WHEN e.sleeps OR l.lane = ANY (too_early) THEN clock_timestamp() + interval '20 milliseconds'
                          ELSE clock_timestamp() END,
            blocker = e.blocker, owner = NULL, until = NULL, claims = 0
        FROM (
            -- It sleeps when nothing in it may run: all are set aside, or the first of its stream waits.
            SELECT ours.place, e.*, ours.first IS NULL OR ours.first = ANY (parked) AS sleeps
            FROM unnest(places, firsts) AS ours(place, first)
            JOIN onceward_lanes l ON l.ctid = ours.place
            LEFT JOIN json_to_recordset(ends) AS e(lane uuid, "then" text, delay float8, blocker uuid)
                ON e.lane = l.lane
            WHERE coalesce(e."then", 'next') <> 'kept'
            OFFSET 0) e
        WHERE l.ctid = e.place;
        RETURN;
    END $$;

-- The same for a turn of one message that has no lane and no position, and is done. It is what a worker says most often
-- when there is little to do, and each argument and each step above costs it as much as the writing.
CREATE PROCEDURE onceward_close_one(
        of_token text, by_owner text, on_host text, of_identity uuid, place tid, by_handler text, of_result json,
        duration float8, keep bigint, starts integer)
    LANGUAGE plpgsql
    SET search_path FROM CURRENT
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
    SET jit = off
    AS $$
    DECLARE
        looked_up boolean := false;
    BEGIN
        IF of_token <> coalesce(current_setting('onceward.token', true), '') THEN
            RAISE 'this is not the transaction of the turn' USING ERRCODE = 'OW001';
        END IF;
        LOOP
            UPDATE onceward_records r
            SET state = 'processed', attempts = r.attempts + 1, started = greatest(0, r.started - starts),
                processed_at = clock_timestamp(), processed_position = nextval('onceward_processed'),
                result = of_result, duration_ms = duration,
                payload = NULL, body = NULL, headers = NULL, next_try_at = NULL,
                expires_at = clock_timestamp() + keep * interval '1 millisecond',
                handler = by_handler, host = on_host
            WHERE r.ctid = place AND (r.identity = of_identity) IS TRUE
              AND r.state IN ('accepted', 'running', 'failed');
            EXIT WHEN FOUND;
            IF looked_up THEN
                RAISE 'the message is gone' USING ERRCODE = 'OW001';
            END IF;
            looked_up := true;   -- not where it was read: somebody has written to it
            place := (SELECT r.ctid FROM onceward_records r WHERE r.identity = of_identity LIMIT 1);
        END LOOP;
        -- Nobody can have added to a lane that is one message.
        DELETE FROM onceward_lanes
        WHERE ctid = ANY (nullif(current_setting('onceward.turn', true), '')::tid[]) AND owner = by_owner;
    END $$;

-- Whoever settles a record that has a position wakes what waits for it: at COMMIT, so that nothing is held for long.
CREATE FUNCTION onceward_settled() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path FROM CURRENT
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
    SET jit = off
    AS $$
    BEGIN
        IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
            INSERT INTO onceward_arrivals VALUES (NEW.consumer, NEW.tenant, NEW.stream, NEW."position");
            RETURN NULL;
        END IF;
        PERFORM pg_advisory_xact_lock_shared(
            onceward_position_lock(NEW.consumer, NEW.tenant, NEW.stream, NEW."position"));
        -- Nearly always nobody waits for it.
        PERFORM FROM onceward_waits w
        WHERE w.place = onceward_place(NEW.consumer, NEW.tenant, NEW.stream, NEW."position") LIMIT 1;
        IF FOUND THEN
            PERFORM onceward_wake(NEW.consumer, NEW.tenant, NEW.stream, NEW."position");
        END IF;
        RETURN NULL;
    END $$;

-- Wake what waits for a position. It waits only for those who end a lane, and they wait for nobody: a lane that somebody
-- else is waking is left to onceward_overdue.
CREATE FUNCTION onceward_wake(of_consumer text, of_tenant text, of_stream text, at bigint) RETURNS uuid[]
    LANGUAGE plpgsql
    SET search_path FROM CURRENT
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
    SET jit = off
    AS $$
    #variable_conflict use_column
    DECLARE
        its_place text := onceward_place(of_consumer, of_tenant, of_stream, at);
        waiting bigint;
        woken uuid[];
        held bigint[];
    BEGIN
        SELECT count(*), array_agg(DISTINCT lane) INTO waiting, woken FROM onceward_waits WHERE place = its_place;
        IF waiting = 0 THEN
            RETURN NULL;
        END IF;
        PERFORM FROM onceward_lanes WHERE lane = ANY (woken) ORDER BY lane FOR KEY SHARE;
        -- A statement of its own: it sees what those did whom the lock had to wait for.
        UPDATE onceward_lanes SET state = 'ready', run_at = clock_timestamp()
        WHERE lane = ANY (ARRAY (SELECT lane FROM onceward_lanes WHERE lane = ANY (woken) AND state IN ('waiting', 'later')
                       ORDER BY lane FOR NO KEY UPDATE SKIP LOCKED));
        held := ARRAY (
            SELECT seq FROM onceward_waits w
            WHERE place = its_place
              AND coalesce((SELECT l.state FROM onceward_lanes l WHERE l.lane = w.lane LIMIT 1), '')
                  NOT IN ('waiting', 'later')
            FOR UPDATE OF w SKIP LOCKED);
        IF cardinality(held) < waiting THEN
            INSERT INTO onceward_arrivals VALUES (of_consumer, of_tenant, of_stream, at);
        END IF;
        DELETE FROM onceward_waits WHERE seq = ANY (held);
        UPDATE onceward_pending SET aside = false WHERE seq = ANY (held) AND coalesce(aside, false);
        RETURN woken;
    END $$;

-- What waits for too long is looked at again, and so is what was settled by a transaction that could not see it. How
-- many. Nobody waits for another who does the same.
CREATE FUNCTION onceward_overdue(of_consumer text) RETURNS integer
    LANGUAGE plpgsql
    SET search_path FROM CURRENT
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
    SET jit = off
    AS $$
    #variable_conflict use_column
    DECLARE
        at timestamptz := clock_timestamp();   -- the index cannot be asked for a time that changes as it is read
        seqs bigint[];
        overdue uuid[];
        arrived record;
        woken integer := 0;
    BEGIN
        WITH late AS (
            SELECT seq, lane FROM onceward_waits
            WHERE consumer = of_consumer AND deadline <= at
            ORDER BY deadline LIMIT 1000 FOR UPDATE SKIP LOCKED),
        ended AS (DELETE FROM onceward_waits w USING late WHERE w.seq = ANY (ARRAY[late.seq]))
        SELECT array_agg(seq), array_agg(DISTINCT lane), count(*) INTO seqs, overdue, woken FROM late;
        IF overdue IS NOT NULL THEN
            UPDATE onceward_pending SET aside = false WHERE seq = ANY (seqs) AND coalesce(aside, false);
            PERFORM onceward_touch(overdue);
        END IF;
        FOR arrived IN
            DELETE FROM onceward_arrivals WHERE ctid = ANY (ARRAY (
                SELECT ctid FROM onceward_arrivals
                WHERE consumer = of_consumer AND pg_try_advisory_xact_lock_shared(
                    onceward_position_lock(consumer, tenant, stream, "position"))   -- nobody is about to wait for it
                LIMIT 1000 FOR UPDATE SKIP LOCKED))
            RETURNING *
        LOOP
            woken := woken + coalesce(cardinality(onceward_wake(
                of_consumer, arrived.tenant, arrived.stream, arrived."position")), 0);
        END LOOP;
        RETURN woken;
    END $$;

-- A dead letter goes back to its place in the queue. `lines` is the one line of it, as it was accepted.
CREATE FUNCTION onceward_requeue(dead uuid, lines json) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path FROM CURRENT
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
    SET jit = off
    AS $$
    #variable_conflict use_column
    DECLARE
        record_seq bigint;
        to_lane uuid;
    BEGIN
        UPDATE onceward_records
        SET state = 'accepted', attempts = 0, started = 0, next_try_at = NULL,
            received_position = coalesce(received_position, nextval('onceward_received'))
        WHERE identity = dead AND state = 'dead'
        RETURNING received_position INTO record_seq;
        IF record_seq IS NULL THEN
            RETURN false;
        END IF;
        SELECT lane INTO to_lane FROM json_to_recordset(lines) AS (lane uuid);
        INSERT INTO onceward_pending (seq, identity, lane, rank, track, "position")
        SELECT record_seq, dead, lane, rank, track, "position"
        FROM json_to_recordset(lines) AS (lane uuid, rank bigint, track text, "position" bigint, lane_name text)
        WHERE lane_name IS NOT NULL;
        LOOP
            INSERT INTO onceward_lanes (lane, consumer, tenant, name, share, run_at, seq)
            SELECT to_lane, r.consumer, r.tenant, line.lane_name, line.share, clock_timestamp(),
                   CASE WHEN line.lane_name IS NULL THEN record_seq END
            FROM json_to_recordset(lines) AS line(lane_name text, share bigint), onceward_records r
            WHERE r.identity = dead
            ON CONFLICT (lane) DO NOTHING;
            EXIT WHEN onceward_touch(ARRAY[to_lane]) = 1;
        END LOOP;
        UPDATE onceward_lanes SET state = 'ready', run_at = clock_timestamp(), blocker = NULL
        WHERE lane = to_lane AND state = 'blocked' AND blocker = dead;
        RETURN true;
    END $$;

-- A dead letter will never run, and its lane goes on.
CREATE FUNCTION onceward_drop(dead uuid, from_lane uuid) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path FROM CURRENT
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET plan_cache_mode = force_generic_plan
    SET jit = off
    AS $$
    BEGIN
        UPDATE onceward_records SET state = 'discarded', payload = NULL, body = NULL, headers = NULL
        WHERE identity = dead AND state = 'dead';
        IF NOT FOUND THEN
            RETURN false;
        END IF;
        UPDATE onceward_lanes SET state = 'ready', run_at = clock_timestamp(), blocker = NULL
        WHERE lane = from_lane AND state = 'blocked' AND blocker = dead;
        RETURN true;
    END $$;

-- The numbers of a queue. Counts end at `most`, and everything is read from indexes, so that a long queue costs no more
-- than a short one.
CREATE FUNCTION onceward_count_lanes(of_consumer text, most integer)
    RETURNS TABLE (state text, lanes bigint, next_at timestamptz)
    LANGUAGE sql STABLE
    SET search_path FROM CURRENT
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET enable_hashjoin = off
    SET enable_mergejoin = off
    SET jit = off
    AS $$
        SELECT state, count(*) AS lanes, min(run_at) AS next_at
        FROM (
            SELECT * FROM (SELECT state, run_at FROM onceward_lanes
                           WHERE consumer = $1 AND run_at IS NOT NULL ORDER BY run_at LIMIT $2) due
            UNION ALL
            SELECT * FROM (SELECT state, run_at FROM onceward_lanes
                           WHERE consumer = $1 AND run_at IS NULL LIMIT $2) asleep) l
        GROUP BY state
    $$;

CREATE FUNCTION onceward_count_pending(of_consumer text, most integer)
    RETURNS TABLE (pending bigint)
    LANGUAGE sql STABLE
    SET search_path FROM CURRENT
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET enable_hashjoin = off
    SET enable_mergejoin = off
    SET jit = off
    AS $$
        WITH l AS MATERIALIZED (
            SELECT * FROM (SELECT lane, seq FROM onceward_lanes
                           WHERE consumer = $1 AND run_at IS NOT NULL ORDER BY run_at LIMIT $2) due
            UNION ALL
            SELECT * FROM (SELECT lane, seq FROM onceward_lanes WHERE consumer = $1 AND run_at IS NULL LIMIT $2) asleep)
        SELECT
            (SELECT count(seq) FROM l)
            + (SELECT count(*) FROM (
                SELECT 1 FROM l CROSS JOIN onceward_pending p
                WHERE l.seq IS NULL AND p.lane = l.lane AND NOT p.aside LIMIT $2) few)
            + (SELECT count(*) FROM (
                SELECT 1 FROM l CROSS JOIN onceward_pending p
                WHERE l.seq IS NULL AND p.lane = l.lane AND p.aside LIMIT $2) few) AS pending
    $$;

CREATE FUNCTION onceward_count_messages(of_consumer text, most integer)
    RETURNS TABLE (dead bigint, accepted timestamptz, failed timestamptz, running timestamptz)
    LANGUAGE sql STABLE
    SET search_path FROM CURRENT
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET enable_hashjoin = off
    SET enable_mergejoin = off
    SET jit = off
    AS $$
        SELECT
            (SELECT count(*) FROM (
                SELECT 1 FROM onceward_records WHERE consumer = $1 AND state <> 'processed' AND state = 'dead'
                  AND received_position IS NOT NULL LIMIT $2) few) AS dead,
            (SELECT received_at FROM onceward_records WHERE consumer = $1 AND state <> 'processed' AND state = 'accepted'
             ORDER BY received_at LIMIT 1) AS accepted,
            (SELECT received_at FROM onceward_records WHERE consumer = $1 AND state <> 'processed' AND state = 'failed'
               AND received_position IS NOT NULL ORDER BY received_at LIMIT 1) AS failed,
            (SELECT received_at FROM onceward_records WHERE consumer = $1 AND state <> 'processed' AND state = 'running'
               AND received_position IS NOT NULL ORDER BY received_at LIMIT 1) AS running
    $$;

-- Some lanes that do not go on at once: those that wait for a person first, then the oldest.
CREATE FUNCTION onceward_worst_lanes(of_consumer text, worst integer)
    RETURNS TABLE (
        tenant text, name text, state text, run_at timestamptz, pending bigint, oldest timestamptz, dead_letter text,
        stream text, "position" bigint)
    LANGUAGE sql STABLE
    SET search_path FROM CURRENT
    SET enable_seqscan = off
    SET enable_bitmapscan = off
    SET enable_hashjoin = off
    SET enable_mergejoin = off
    SET jit = off
    AS $$
        SELECT
            c.tenant, c.name, c.state, c.run_at,
            (c.seq IS NOT NULL)::int
            + (SELECT count(*) FROM (SELECT 1 FROM onceward_pending p
                                     WHERE p.lane = c.lane AND NOT p.aside LIMIT 1000) few)
            + (SELECT count(*) FROM (SELECT 1 FROM onceward_pending p
                                     WHERE p.lane = c.lane AND p.aside LIMIT 1000) few) AS pending,
            coalesce((SELECT r.received_at FROM onceward_records r WHERE c.seq IS NOT NULL AND r.identity = c.lane),
                     (SELECT r.received_at FROM onceward_pending p JOIN onceward_records r ON r.identity = p.identity
                      WHERE p.seq = c.first), dead.received_at) AS oldest,
            dead.message_id AS dead_letter, w.stream, w.position
        FROM (
            SELECT l.*,
                coalesce(
                    l.seq,
                    (SELECT p.seq FROM onceward_pending p JOIN onceward_waits w ON w.seq = p.seq
                     WHERE p.lane = l.lane AND p.aside LIMIT 1),
                    (SELECT p.seq FROM onceward_pending p WHERE p.lane = l.lane AND NOT p.aside
                     ORDER BY p.rank, p.seq LIMIT 1)) AS first
            FROM (
                SELECT * FROM (SELECT * FROM onceward_lanes
                               WHERE consumer = $1 AND run_at IS NULL LIMIT 1000) asleep
                UNION ALL
                SELECT * FROM (SELECT * FROM onceward_lanes
                               WHERE consumer = $1 AND run_at IS NOT NULL ORDER BY run_at LIMIT 1000) due
                WHERE state = 'retrying') l) c
        LEFT JOIN onceward_records dead ON dead.identity = c.blocker
        LEFT JOIN onceward_waits w ON w.seq = c.first
        ORDER BY c.state <> 'blocked', c.first LIMIT $2
    $$;

-- The functions find the tables where they are themselves, whatever the search path was here, or is in a handler.
DO $$
    DECLARE
        one record;
    BEGIN
        FOR one IN
            SELECT f.oid::regprocedure AS name, n.nspname AS place
            FROM pg_proc f JOIN pg_namespace n ON n.oid = f.pronamespace
            WHERE n.nspname = current_schema() AND f.proname ~ '^onceward_' AND f.proconfig::text ~ 'search_path='
        LOOP
            EXECUTE format('ALTER ROUTINE %s SET search_path = %I, pg_temp', one.name, one.place);
        END LOOP;
    END $$;

-- Whoever may write records may use the queue, and whoever may read them may look at it: the trigger below works with
-- the rights of the one who writes.
DO $$
    DECLARE
        role record;
        one record;
    BEGIN
        FOR role IN
            SELECT CASE WHEN acl.grantee = 0 THEN 'PUBLIC' ELSE acl.grantee::regrole::text END AS name,
                   bool_or(acl.privilege_type = 'INSERT') AS writes
            FROM pg_class t, aclexplode(coalesce(t.relacl, acldefault('r', t.relowner))) acl
            WHERE t.oid = 'onceward_records'::regclass AND acl.privilege_type IN ('SELECT', 'INSERT')
            GROUP BY acl.grantee
        LOOP
            FOR one IN
                SELECT t.oid::regclass AS name, t.relkind
                FROM pg_class t JOIN pg_namespace n ON n.oid = t.relnamespace
                WHERE n.nspname = current_schema() AND t.relname ~ '^onceward_' AND t.relkind IN ('r', 'S')
                  AND t.relname NOT IN ('onceward_records', 'onceward_schema')
            LOOP
                EXECUTE format(
                    CASE WHEN one.relkind = 'S' AND role.writes THEN 'GRANT USAGE ON SEQUENCE %s TO %s'
                         WHEN one.relkind = 'S' THEN 'GRANT SELECT ON SEQUENCE %s TO %s'
                         WHEN role.writes THEN 'GRANT SELECT, INSERT, UPDATE, DELETE ON %s TO %s'
                         ELSE 'GRANT SELECT ON %s TO %s' END, one.name, role.name);
            END LOOP;
            FOR one IN
                SELECT f.oid::regprocedure AS name FROM pg_proc f JOIN pg_namespace n ON n.oid = f.pronamespace
                WHERE role.writes AND n.nspname = current_schema() AND f.proname ~ '^onceward_'
            LOOP
                EXECUTE format('GRANT EXECUTE ON ROUTINE %s TO %s', one.name, role.name);
            END LOOP;
        END LOOP;
    END $$;

-- Last what needs the table of records to itself: it is written to meanwhile.

-- What holds up its stream.
CREATE INDEX onceward_records_open ON onceward_records (consumer, tenant, stream, position)
    WHERE stream IS NOT NULL AND state IN ('accepted', 'running', 'failed', 'dead');


-- The name of its lane, of a message that was accepted; it finds back into it.
ALTER TABLE onceward_records ADD COLUMN lane text;

CREATE CONSTRAINT TRIGGER onceward_settled
    AFTER INSERT OR UPDATE OF state ON onceward_records
    DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW
    WHEN (NEW.stream IS NOT NULL AND NEW."position" IS NOT NULL AND NEW.state IN ('processed', 'dead', 'discarded')
          AND coalesce(current_setting('onceward.settles', true), '') = '')
    EXECUTE FUNCTION onceward_settled();
