-- The payment gateway's own ledger. It stands for a company elsewhere: nothing in the application's
-- tables refers to it, and it refers to nothing of the application's.
--
-- The schema itself is made by the migrator, which keeps its own table in it.

-- Money that was taken. A row is never changed and never deleted.
CREATE TABLE gateway.charges (
    id text PRIMARY KEY,
    -- SHA-256 of the API key that charged: keys are never stored.
    account bytea NOT NULL CHECK (octet_length(account) = 32),
    idempotency_key text,
    amount bigint NOT NULL CHECK (amount > 0),
    currency text NOT NULL,
    source text NOT NULL,
    description text,
    metadata jsonb NOT NULL,
    created_at timestamptz NOT NULL,
    -- The last line of defence: whatever else breaks, one key takes money once. Calls without a key
    -- are null here and so never collide.
    UNIQUE (account, idempotency_key)
);

CREATE INDEX charges_newest_first ON gateway.charges (account, created_at DESC, id DESC);

-- What was asked under each idempotency key, who works on it, and the remembered answer.
-- Rows are never deleted: a retry that comes after days must not charge again.
CREATE TABLE gateway.idempotency_keys (
    account bytea NOT NULL CHECK (octet_length(account) = 32),
    key text NOT NULL,
    -- SHA-256 of the first call's parameters.
    parameters bytea NOT NULL CHECK (octet_length(parameters) = 32),
    -- The call working on the key, until when at the latest, and since when. A marker past its time was
    -- left by a gateway that died: the next call takes over, and the holder fences the old one.
    holder uuid,
    in_use_until timestamptz,
    taken_at timestamptz NOT NULL,
    -- How many calls failed on purpose (tok_gatewayError).
    failures integer NOT NULL DEFAULT 0,
    -- The answer, byte for byte.
    status smallint,
    body bytea,
    PRIMARY KEY (account, key),
    CHECK ((holder IS NULL) = (in_use_until IS NULL)),
    CHECK ((status IS NULL) = (body IS NULL)),
    CHECK (status IS NULL OR holder IS NULL)
);
