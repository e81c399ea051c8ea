-- One row per identity. The primary key is the only index that a new message pays for.
CREATE TABLE onceward_records (
    identity            uuid PRIMARY KEY,      -- onceward_id(consumer, tenant, scope, key)
    consumer            text NOT NULL,
    tenant              text NOT NULL,
    scope               text NOT NULL,
    key                 text NOT NULL,
    message_id          text NOT NULL,
    type                text NOT NULL,
    source              text NOT NULL DEFAULT '',
    topic               text NOT NULL DEFAULT '',
    origin              text,
    -- accepted, running, processed, failed, dead or discarded. There is no CHECK: PostgreSQL reads and plans it anew
    -- for each statement that writes, which costs a claim about as much as its second index.
    state               text NOT NULL,
    attempts            integer NOT NULL DEFAULT 0,
    started             integer NOT NULL DEFAULT 0,   -- marked starts that never ended
    -- json, not jsonb: it keeps what was said to the letter, and jsonb refuses \u0000
    errors              json,
    result              json,
    payload             json,
    body                bytea,
    headers             json,
    payload_hash        bytea,
    extra               json,
    handler             text,
    host                text,
    received_at         timestamptz NOT NULL DEFAULT now(),
    processed_at        timestamptz,
    duration_ms         double precision,
    occurred_at         timestamptz,
    expires_at          timestamptz,
    next_try_at         timestamptz,
    stream              text,
    position            bigint,
    depends_on          json,
    received_position   bigint,
    processed_position  bigint
);

-- What operators look for. Processed rows, nearly all of them, are not in it.
CREATE INDEX onceward_records_unfinished ON onceward_records (consumer, state, received_at)
    WHERE state <> 'processed';

-- Where a dependency is looked up. Messages without a stream are not in it, nor what is still to be done.
CREATE INDEX onceward_records_position ON onceward_records (consumer, tenant, stream, position)
    WHERE stream IS NOT NULL AND state IN ('processed', 'discarded');

-- The identity, computed in SQL: the first 16 bytes of SHA-256 over length-prefixed parts.
CREATE FUNCTION onceward_id(consumer text, tenant text, scope text, key text) RETURNS uuid
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    AS $$
        SELECT encode(substring(sha256(
            int4send(octet_length(convert_to($1, 'UTF8'))) || convert_to($1, 'UTF8') ||
            int4send(octet_length(convert_to($2, 'UTF8'))) || convert_to($2, 'UTF8') ||
            int4send(octet_length(convert_to($3, 'UTF8'))) || convert_to($3, 'UTF8') ||
            int4send(octet_length(convert_to($4, 'UTF8'))) || convert_to($4, 'UTF8')
        ) FROM 1 FOR 16), 'hex')::uuid
    $$;
