-- The stored inbox. What is said where: a record (onceward_records) is the message and what became of it; a row here is
-- what is still to be done. All of these tables but the first are empty when there is nothing to do.

-- The order of arrival ('received') and of completion ('processed'): the last number that was given out.
CREATE TABLE onceward_counters (
    name      TEXT NOT NULL PRIMARY KEY,
    value     INTEGER NOT NULL
);

-- The name of its lane, of a message that was accepted; it finds back into it.
ALTER TABLE onceward_records ADD COLUMN lane TEXT;

-- One row per lane that has messages. It is what workers look for: one is due when run_at has come.
CREATE TABLE onceward_lanes (
    lane      BLOB NOT NULL PRIMARY KEY,   -- of consumer, tenant and name, or the identity of a message without one
    consumer  TEXT NOT NULL,
    tenant    TEXT NOT NULL,
    name      TEXT,
    share     INTEGER NOT NULL,   -- 32 bits, unsigned, the same for ever: fixed shares split lanes by it
    state     TEXT NOT NULL DEFAULT 'ready'
              CHECK (state IN ('ready', 'running', 'retrying', 'later', 'waiting', 'blocked')),
    run_at    TEXT,               -- NULL: somebody has to wake it
    owner     TEXT,               -- the worker that claimed it last
    until     TEXT,               -- always NULL: here a claim moves run_at, which costs nobody anything
    claims    INTEGER NOT NULL DEFAULT 0,   -- claims that nobody gave back
    blocker   BLOB,               -- the dead letter that holds it up
    seq       INTEGER,            -- always NULL: here each message has a row in onceward_pending
    record    TEXT                -- always NULL: there are no places to be remembered
);
-- Sleeping lanes are not in it; those that are due later are at its end. So their number costs a worker nothing.
CREATE INDEX onceward_lanes_due ON onceward_lanes (consumer, run_at) WHERE run_at IS NOT NULL;
CREATE INDEX onceward_lanes_asleep ON onceward_lanes (consumer) WHERE run_at IS NULL;

-- One row per message that is not settled.
CREATE TABLE onceward_pending (
    seq       INTEGER NOT NULL PRIMARY KEY,
    identity  BLOB NOT NULL,
    lane      BLOB NOT NULL,
    rank      INTEGER NOT NULL,
    track     TEXT,
    position  INTEGER,
    aside     BOOLEAN NOT NULL DEFAULT false,
    due       TEXT,
    record    TEXT                -- as in onceward_lanes
);
CREATE INDEX onceward_pending_next ON onceward_pending (lane, rank, seq) WHERE NOT aside;
CREATE INDEX onceward_pending_aside ON onceward_pending (lane) WHERE aside;
CREATE INDEX onceward_pending_track ON onceward_pending (lane, track, position, seq) WHERE track IS NOT NULL;

-- One row per message that waits for a position.
CREATE TABLE onceward_waits (
    seq       INTEGER NOT NULL PRIMARY KEY,
    consumer  TEXT NOT NULL,
    tenant    TEXT NOT NULL,
    stream    TEXT NOT NULL,
    position  INTEGER NOT NULL,
    place     TEXT NOT NULL,      -- all four of them
    lane      BLOB NOT NULL,
    deadline  TEXT
);
CREATE INDEX onceward_waits_place ON onceward_waits (place);
CREATE INDEX onceward_waits_deadline ON onceward_waits (consumer, deadline) WHERE deadline IS NOT NULL;

-- Up to here a stream is done, although its records are gone.
CREATE TABLE onceward_floors (
    consumer  TEXT NOT NULL,
    tenant    TEXT NOT NULL,
    stream    TEXT NOT NULL,
    position  INTEGER NOT NULL,
    PRIMARY KEY (consumer, tenant, stream)
);

-- Always empty: it is of use where transactions cannot see each other. Both databases have the same tables, so that one
-- set of models is true.
CREATE TABLE onceward_arrivals (
    consumer  TEXT NOT NULL,
    tenant    TEXT NOT NULL,
    stream    TEXT NOT NULL,
    position  INTEGER NOT NULL
);
-- What holds up its stream.
CREATE INDEX onceward_records_open ON onceward_records (consumer, tenant, stream, position)
    WHERE stream IS NOT NULL AND state IN ('accepted', 'running', 'failed', 'dead');

-- Whoever settles a record that has a position wakes what waits for it. There is one writer, so nobody can begin to
-- wait meanwhile.
CREATE TRIGGER onceward_settled_first
    AFTER INSERT ON onceward_records
    WHEN NEW.stream IS NOT NULL AND NEW.position IS NOT NULL AND NEW.state IN ('processed', 'dead', 'discarded')
    BEGIN
        UPDATE onceward_lanes SET state = 'ready', run_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now')
        WHERE state IN ('waiting', 'later') AND lane IN (
            SELECT lane FROM onceward_waits
            WHERE place = NEW.consumer || char(31) || NEW.tenant || char(31) || NEW.stream || char(31) || NEW.position);
        UPDATE onceward_pending SET aside = false
        WHERE aside AND seq IN (
            SELECT seq FROM onceward_waits
            WHERE place = NEW.consumer || char(31) || NEW.tenant || char(31) || NEW.stream || char(31) || NEW.position);
        DELETE FROM onceward_waits
        WHERE place = NEW.consumer || char(31) || NEW.tenant || char(31) || NEW.stream || char(31) || NEW.position;
    END;

CREATE TRIGGER onceward_settled
    AFTER UPDATE OF state ON onceward_records
    WHEN NEW.stream IS NOT NULL AND NEW.position IS NOT NULL AND NEW.state IN ('processed', 'dead', 'discarded')
    BEGIN
        UPDATE onceward_lanes SET state = 'ready', run_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now')
        WHERE state IN ('waiting', 'later') AND lane IN (
            SELECT lane FROM onceward_waits
            WHERE place = NEW.consumer || char(31) || NEW.tenant || char(31) || NEW.stream || char(31) || NEW.position);
        UPDATE onceward_pending SET aside = false
        WHERE aside AND seq IN (
            SELECT seq FROM onceward_waits
            WHERE place = NEW.consumer || char(31) || NEW.tenant || char(31) || NEW.stream || char(31) || NEW.position);
        DELETE FROM onceward_waits
        WHERE place = NEW.consumer || char(31) || NEW.tenant || char(31) || NEW.stream || char(31) || NEW.position;
    END;

-- The oldest code that works with what a migration made; NULL: none but its own.
ALTER TABLE onceward_schema ADD COLUMN since INTEGER;
