// The flow that the examples in the documentation share. Included by doc tests only.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub struct RideRequest { pub amount_cents: i64 }

pub struct RideFlow;

#[idempotent_core::idempotent_flow(name = "ride", lease = "15s", retention = "48h")]
impl RideFlow {
    #[atomic(Started -> RideCreated)]
    async fn create_ride(&self, tx: &mut idempotent_core::Tx<'_>, request: &RideRequest) -> Result<i64, sqlx::Error> {
        let _ = tx.key();
        Ok(request.amount_cents)
    }

    #[atomic(RideCreated -> Finished)]
    async fn finish(&self, _tx: &mut idempotent_core::Tx<'_>, cents: &i64) -> Result<idempotent_core::Reply<i64>, sqlx::Error> {
        Ok(idempotent_core::Reply::created(*cents))
    }
}
