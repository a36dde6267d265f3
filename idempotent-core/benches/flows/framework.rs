//! The ride through the framework: a flow as a user declares one, run by the engine.

use idempotent_core::{
    Disposition, Engine, External, Key, PhaseFailure, Reply, Tx, idempotent_flow,
};
use sqlx::postgres::PgPool;

use crate::contender::{Contender, Error, expect_answer};
use crate::ride::{Charge, INSERT_RIDE, PATH, Receipt, Ride, RideRequest, SET_CHARGED, charge};

pub(crate) const NAME: &str = "framework";
pub(crate) const REPLAY: &str = "framework, replay";

pub(crate) async fn flow(pool: PgPool) -> Result<Contender, Error> {
    contender(NAME, pool, false).await
}

pub(crate) async fn replay(pool: PgPool) -> Result<Contender, Error> {
    contender(REPLAY, pool, true).await
}

async fn contender(name: &'static str, pool: PgPool, replayed: bool) -> Result<Contender, Error> {
    let engine = Engine::builder(pool.clone()).flow(RideFlow).build().await?;
    let rides = engine.handle::<RideFlow>()?;
    Ok(Contender::new(name, pool, move |ask| {
        let rides = rides.clone();
        async move {
            let key = Key::new(ask.user, PATH, ask.key)?;
            let answer = rides.run(key, RideRequest::sample()).await?;
            expect_answer(
                answer.reply().status().as_u16(),
                answer.is_replayed(),
                replayed,
            )
        }
    }))
}

#[derive(Debug)]
struct RideFlow;

#[idempotent_flow(name = "ride", lease = "15s", retention = "48h")]
impl RideFlow {
    #[atomic(Started -> RideCreated)]
    async fn create_ride(&self, tx: &mut Tx<'_>, request: &RideRequest) -> Result<Ride, RideError> {
        let (key_id, user) = (tx.key().id(), tx.key().user().to_owned());
        let id = sqlx::query_scalar(INSERT_RIDE)
            .bind(key_id)
            .bind(user)
            .bind(request.amount_cents)
            .bind(&request.currency)
            .fetch_one(&mut **tx)
            .await?;
        Ok(Ride { id })
    }

    #[external(RideCreated -> ChargeCompleted, timeout = "10s")]
    async fn charge(
        &self,
        call: &External<'_>,
        _ride: &Ride,
        request: &RideRequest,
    ) -> Result<Charge, RideError> {
        Ok(charge(call.derived_key().as_str(), request).await)
    }

    #[atomic(ChargeCompleted -> Finished, with(RideCreated))]
    async fn finish(
        &self,
        tx: &mut Tx<'_>,
        charge: &Charge,
        ride: &Ride,
    ) -> Result<Reply<Receipt>, RideError> {
        let amount = sqlx::query_scalar(SET_CHARGED)
            .bind(ride.id)
            .bind(&charge.id)
            .fetch_one(&mut **tx)
            .await?;
        Ok(Receipt {
            ride_id: ride.id,
            amount,
            charge_id: charge.id.clone(),
        }
        .into_reply())
    }

    #[on_reject(RideCreated)]
    async fn decline(
        &self,
        tx: &mut Tx<'_>,
        ride: &Ride,
        _rejection: &idempotent_core::Rejection,
    ) -> Result<(), RideError> {
        sqlx::query("UPDATE rides SET status = 'declined' WHERE id = $1")
            .bind(ride.id)
            .execute(&mut **tx)
            .await?;
        Ok(())
    }
}

#[derive(Debug, thiserror::Error)]
#[error(transparent)]
struct RideError(#[from] sqlx::Error);

impl PhaseFailure for RideError {
    fn disposition(&self) -> Disposition {
        self.0.disposition()
    }
}
