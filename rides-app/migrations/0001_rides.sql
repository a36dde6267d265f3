CREATE TABLE users (
    id         uuid PRIMARY KEY,
    name       text NOT NULL UNIQUE CHECK (name <> ''),
    -- SHA-256 of the token: who reads this table cannot use it to log in.
    token_hash bytea NOT NULL UNIQUE CHECK (octet_length(token_hash) = 32),
    created_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE rides (
    id             uuid PRIMARY KEY,
    -- The id of the idempotency key whose flow made this ride. Unique: even if the lease were broken,
    -- one key could not make two rides. Not a foreign key: keys are reaped after their retention and
    -- rides stay, so it would either block the reaper or lose the link.
    key_id         uuid NOT NULL UNIQUE,
    user_id        uuid NOT NULL REFERENCES users (id),
    amount_cents   bigint NOT NULL CHECK (amount_cents > 0),
    currency       text NOT NULL,
    origin_lat     double precision,
    origin_lon     double precision,
    target_lat     double precision,
    target_lon     double precision,
    status         text NOT NULL DEFAULT 'created' CHECK (status IN ('created', 'charged', 'declined')),
    -- Unique: no charge pays for two rides.
    charge_id      text UNIQUE,
    created_at     timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT rides_charged_with_charge CHECK ((status = 'charged') = (charge_id IS NOT NULL))
);

CREATE INDEX rides_of_user ON rides (user_id, created_at DESC, id);
