-- Receipts that were sent: one for each idempotency key, however often it was asked for.
CREATE TABLE gateway.receipts (
    id text PRIMARY KEY,
    account bytea NOT NULL CHECK (octet_length(account) = 32),
    idempotency_key text NOT NULL,
    charge text NOT NULL,
    reference text NOT NULL,
    created_at timestamptz NOT NULL,
    UNIQUE (account, idempotency_key)
);
