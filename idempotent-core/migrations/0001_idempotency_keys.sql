-- One row per key: the lease, where the flow stands, and the answer once there is one.
CREATE TABLE idempotency_keys (
    -- UUIDv7, made by the claimer before the insert: no sequence, no RETURNING needed, ordered by
    -- time, and the mark by which a claim whose acknowledgement was lost recognises its own row.
    id               uuid NOT NULL,
    user_id          text NOT NULL,
    path             text NOT NULL,
    key              text NOT NULL,
    flow             text NOT NULL,
    -- A version byte and a SHA-256.
    request_hash     bytea NOT NULL,
    -- What a worker needs to go on without the client.
    request          jsonb NOT NULL,
    recovery_point   text NOT NULL DEFAULT 'started',
    -- The values that the phases ahead ask for, by point name.
    state            jsonb NOT NULL DEFAULT '{}',
    -- Null when nobody has the lease. Never in an index, so that heartbeats stay HOT.
    holder           uuid,
    lease_expires_at timestamptz,
    fence            bigint NOT NULL DEFAULT 0,
    -- An outside call that may not be repeated at will, about to be made: its name, the holder, when.
    intent           jsonb,
    -- Counted when the lease is granted, 0 again when the flow moves on.
    attempts         integer NOT NULL DEFAULT 0,
    next_attempt_at  timestamptz,
    stuck_at         timestamptz,
    last_error       jsonb,
    history          jsonb,
    -- The key that staged this one.
    parent_id        uuid,
    response_status  smallint,
    -- An array of pairs: jsonb does not keep the order of members.
    response_headers jsonb,
    response_body    bytea,
    created_at       timestamptz NOT NULL,
    finished_at      timestamptz,
    CONSTRAINT idempotency_keys_user_path_key UNIQUE (user_id, path, key),
    -- One constraint, because each costs something at every write: names within their bounds; a
    -- lease has an end, and is over when the flow is finished; what is finished has its reply.
    CONSTRAINT idempotency_keys_sound CHECK (
        octet_length(user_id) BETWEEN 1 AND 128
        AND octet_length(path) BETWEEN 1 AND 1024
        AND octet_length(key) BETWEEN 1 AND 255
        AND (holder IS NULL) = (lease_expires_at IS NULL)
        AND (finished_at IS NULL OR (holder IS NULL AND response_status IS NOT NULL
             AND response_headers IS NOT NULL AND response_body IS NOT NULL)))
) WITH (fillfactor = 90);

-- After the unique constraint: on a table that was never analysed, `id = $1 AND user_id = $2` costs
-- the same by either index, and of two equals the planner takes the newer one.
ALTER TABLE idempotency_keys ADD CONSTRAINT idempotency_keys_pkey PRIMARY KEY (id);

-- For the completer: what is neither finished nor stuck.
CREATE INDEX idempotency_keys_unfinished ON idempotency_keys (created_at)
    WHERE finished_at IS NULL AND stuck_at IS NULL;
