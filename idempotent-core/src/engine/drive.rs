//! The loop: run the phase that leaves the point where the flow stands, until the flow is finished
//! or something is in the way; then say what happened, and let the lease go.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use serde_json::json;
use tracing::Instrument;
use uuid::Uuid;

use super::claim::Claim;
use super::{Answer, Handle, Prepared};
use crate::attempt::{Attempt, Halt, Why};
use crate::error::RunError;
use crate::failure::{Disposition, Failure, Kind, Rejection};
use crate::flow::Flow;
use crate::graph::Phase;

/// How often the database may ask for a phase to be run again before the client is asked instead.
const CONFLICTS: u32 = 5;

/// How often a request claims again after it lost its lease.
const LOST_LEASES: u32 = 3;

/// When to try again after a failure that does not say.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// How an attempt ended without an answer.
enum Ended {
    Lost,
    Failed(RunError),
}

impl<F: Flow> Handle<F> {
    /// The whole way of a request, from the claim to the answer.
    pub(super) async fn serve(&self, prepared: &Prepared<F::Request>) -> Result<Answer, RunError> {
        for _ in 0..LOST_LEASES {
            let mut attempt = match self.claim(prepared).await? {
                Claim::Finished(reply) => {
                    return Ok(Answer {
                        reply: reply.into(),
                        replayed: true,
                    });
                }
                Claim::Granted(attempt) => attempt,
            };
            let key = attempt.key();
            let span = tracing::info_span!(
                "flow",
                flow = F::GRAPH.flow(),
                key_id = %key.id(),
                attempt = key.attempt(),
                fence = key.fence()
            );
            let ended = async {
                match self.drive(&mut attempt, &prepared.request).await {
                    Ok(answer) => Ok(answer),
                    Err(halt) => Err(self.end(*attempt, halt).await),
                }
            };
            match ended.instrument(span).await {
                Ok(answer) => return Ok(answer),
                Err(Ended::Failed(error)) => return Err(error),
                // Another attempt has it, or had it: ask again, like everybody who waits with us.
                Err(Ended::Lost) => {}
            }
        }
        Err(RunError::InProgress {
            retry_after: RETRY_AFTER,
        })
    }

    async fn drive(&self, attempt: &mut Attempt, request: &F::Request) -> Result<Answer, Halt> {
        let mut conflicts = 0;
        let mut rejection: Option<Rejection> = None;
        loop {
            if let Some(finished) = attempt.finished() {
                return Ok(Answer {
                    reply: finished.reply.clone(),
                    replayed: finished.by_another,
                });
            }
            let at = attempt.point();
            let Ok(point) = at.parse::<F::RecoveryPoint>() else {
                return Err(Halt(Why::Failed(Failure::stop(
                    at,
                    "this version has no such recovery point",
                ))));
            };
            let phase = F::GRAPH.phase_from(at).map_or(at, Phase::name);
            tracing::debug!(phase, at, "entering");
            let stepped = match &rejection {
                None => catch_panic(phase, self.flow.advance(point, attempt, request)).await,
                Some(rejection) => {
                    catch_panic(phase, self.flow.reject(point, attempt, rejection, request)).await
                }
            };
            match stepped {
                Ok(()) => conflicts = 0,
                Err(Halt(Why::Failed(failure))) => match failure.disposition.0 {
                    Kind::Conflict if conflicts < CONFLICTS => {
                        tracing::debug!(
                            phase,
                            conflicts,
                            "the database asks for the phase to be run again"
                        );
                        tokio::time::sleep(backoff(conflicts)).await;
                        conflicts += 1;
                    }
                    Kind::Reject(reply) => {
                        if F::GRAPH.is_behind_external(at) && !F::GRAPH.handles_rejection_at(at) {
                            return Err(Halt(Why::Failed(Failure::stop(
                                phase,
                                format!(
                                    "it rejected the request after something was done outside, and the flow has no \
                                 `#[on_reject]` for `{at}`: {}",
                                    failure.message
                                ),
                            ))));
                        }
                        tracing::debug!(phase, "rejected");
                        rejection = Some(Rejection::new(failure.phase, failure.message, *reply));
                        conflicts = 0;
                    }
                    _ => return Err(Halt(Why::Failed(failure))),
                },
                Err(halt) => return Err(halt),
            }
        }
    }

    /// Ends an attempt that did not finish its flow: lets the lease go where it is still ours to let
    /// go, and says what the caller is told.
    async fn end(&self, attempt: Attempt, halt: Halt) -> Ended {
        let failure = match halt.0 {
            Why::Lost => {
                tracing::info!("the lease is lost; another attempt goes on with the flow");
                return Ended::Lost;
            }
            Why::Unresolved(reason) => {
                tracing::warn!(
                    reason,
                    "nobody could say what became of a commit; the lease runs out by itself"
                );
                return Ended::Failed(RunError::Unavailable { reason });
            }
            Why::Failed(failure) => failure,
        };
        let Failure {
            phase,
            disposition: Disposition(kind),
            message,
        } = failure;
        let point = attempt.point();
        let (class, retry_after) = match kind {
            Kind::Retry { after } => ("retry", after.unwrap_or(RETRY_AFTER)),
            Kind::Conflict => ("retry", RETRY_AFTER),
            Kind::Reject(_) | Kind::Stop | Kind::Unstorable(_) => ("stop", RETRY_AFTER),
        };
        let reason = match kind {
            Kind::Unstorable(why) => format!("{message} (its reply cannot be stored: {why})"),
            _ => message,
        };
        let last_error = json!({ "class": class, "phase": phase, "message": storable(&reason) });
        attempt.release(&last_error).await;
        Ended::Failed(if class == "retry" {
            tracing::info!(
                phase,
                reason,
                "the phase failed; a retry goes on from its recovery point"
            );
            RunError::Retry {
                phase,
                point,
                reason,
                retry_after,
            }
        } else {
            tracing::error!(phase, reason, "the phase stopped");
            RunError::Stopped {
                phase,
                point,
                reason,
                retry_after,
            }
        })
    }
}

/// A panic in a phase is a failure of that phase, not of the task: the lease is let go at once.
async fn catch_panic(
    phase: &'static str,
    step: impl Future<Output = Result<(), Halt>>,
) -> Result<(), Halt> {
    let mut step = pin!(step);
    std::future::poll_fn(|context| {
        // The attempt is used afterwards only to let the lease go: by writes that are conditional on
        // what the row says, not on what was half done in memory.
        match std::panic::catch_unwind(AssertUnwindSafe(|| step.as_mut().poll(context))) {
            Ok(poll) => poll,
            Err(panic) => Poll::Ready(Err(Halt(Why::Failed(Failure::stop(
                phase,
                format!("it panicked: {}", panic_message(panic.as_ref())),
            ))))),
        }
    })
    .await
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    if let Some(message) = panic.downcast_ref::<&'static str>() {
        message
    } else if let Some(message) = panic.downcast_ref::<String>() {
        message
    } else {
        "with a value that is not text"
    }
}

/// What an error says, so that PostgreSQL can store it and a page can show it.
fn storable(message: &str) -> String {
    message
        .replace('\0', "\u{fffd}")
        .chars()
        .take(2000)
        .collect()
}

/// Full jitter: anything from nothing to 5 ms doubled with every try, at most 640 ms.
pub(super) fn backoff(tries: u32) -> Duration {
    let ceiling = 5_000_u64 << tries.min(7);
    let random = u64::from_be_bytes(Uuid::new_v4().as_u64_pair().1.to_be_bytes());
    Duration::from_micros(random % ceiling)
}
