//! The loop: run the phase that leaves the point where the flow stands, until the flow is finished
//! or something is in the way; then say what happened, and let the lease go.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use serde::Deserialize;
use tracing::Instrument;
use uuid::Uuid;

use super::claim::Claim;
use super::{Answer, Handle, Prepared};
use crate::attempt::{Attempt, Halt, Why};
use crate::error::RunError;
use crate::failure::{Disposition, Failure, Kind, Rejection};
use crate::flow::Flow;
use crate::graph::{Graph, Phase};
use crate::store::Parting;

/// How often the database may ask for a phase to be run again before the client is asked instead.
pub(crate) const CONFLICTS: u32 = 5;

/// How often a request claims again after it lost its lease.
const LOST_LEASES: u32 = 3;

/// When to try again after a failure that does not say.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// How an attempt ended without an answer.
pub(super) enum Ended {
    Lost,
    Failed(RunError),
}

impl<F: Flow> Handle<F> {
    /// The whole way of a request, from the claim to the answer.
    pub(super) async fn serve(&self, prepared: &Prepared) -> Result<Answer, RunError> {
        let way = async {
            for _ in 0..LOST_LEASES {
                let attempt = match self.claim(prepared).await? {
                    Claim::Finished(reply) => {
                        let replayed = true;
                        let reply = reply.into();
                        return Ok(Answer { reply, replayed });
                    }
                    Claim::Granted(attempt) => attempt,
                };
                match self.attempt(*attempt, &prepared.body).await {
                    Ok(answer) => return Ok(answer),
                    Err(Ended::Failed(error)) => return Err(error),
                    // Another attempt has it, or had it: ask again, like everybody who waits with us.
                    Err(Ended::Lost) => {}
                }
            }
            Err(RunError::InProgress {
                retry_after: RETRY_AFTER,
            })
        };
        // The types of a flow are the user's, and so is what they do when they are read or written.
        catch_panic(way).await.unwrap_or_else(|panic| {
            tracing::error!(
                flow = self.graph.flow(),
                panic,
                "a request panicked outside its phases"
            );
            Err(RunError::Stopped {
                phase: "none",
                point: "unknown",
                reason: panic,
                retry_after: RETRY_AFTER,
            })
        })
    }

    /// One attempt, from the lease to its end.
    pub(super) async fn attempt(
        &self,
        mut attempt: Attempt,
        request: &serde_json::Value,
    ) -> Result<Answer, Ended> {
        let key = attempt.key().clone();
        let span = tracing::info_span!(
            "flow",
            flow = self.graph.flow(),
            key_id = %key.id(),
            attempt = key.attempt(),
            fence = key.fence()
        );
        let ended = async {
            // What the phases see is what a later attempt will read, to the last digit: the outside
            // refuses a key that comes with other parameters.
            let driven = match F::Request::deserialize(request) {
                Ok(request) => self.drive(&mut attempt, &request).await,
                Err(error) => Err(Halt(Why::Failed(Failure::stop(
                    "none",
                    format!("its request was written as JSON and cannot be read back: {error}"),
                )))),
            };
            match driven {
                Ok(answer) => Ok(answer),
                Err(halt) => Err(self.end(attempt, halt).await),
            }
        };
        let ended = ended.instrument(span).await;
        if let Some(announcer) = &self.inner.announcer {
            announcer.announce(&key.user, &key.path, &key.key);
        }
        ended
    }

    async fn drive(&self, attempt: &mut Attempt, request: &F::Request) -> Result<Answer, Halt> {
        let (mut repeated, mut tried) = (0, 0);
        // With the point at which it was made: anywhere else it says nothing.
        let mut rejection: Option<(&'static str, Rejection)> = None;
        loop {
            if let Some(finished) = attempt.finished() {
                return Ok(Answer {
                    reply: finished.reply.clone(),
                    replayed: finished.by_another,
                });
            }
            let at = attempt.point();
            let phase = self.graph.phase_from(at).map_or(at, Phase::name);
            let stop = |reason: String| Halt(Why::Failed(Failure::stop(phase, reason)));
            let Ok(point) = at.parse::<F::RecoveryPoint>() else {
                return Err(stop("this version has no such recovery point".to_owned()));
            };
            rejection = rejection.filter(|(rejected_at, _)| *rejected_at == at);
            let span = tracing::info_span!("phase", name = phase, at);
            let stepped = match &rejection {
                None => {
                    let step = self.flow.advance(point, attempt, request);
                    catch_panic(step).instrument(span).await
                }
                Some((_, rejection)) => {
                    let step = self.flow.reject(point, attempt, rejection, request);
                    catch_panic(step).instrument(span).await
                }
            };
            let failure = match stepped {
                Ok(Ok(())) => {
                    if attempt.point() != at {
                        (repeated, tried) = (0, 0);
                    }
                    continue;
                }
                Ok(Err(Halt(Why::Failed(failure)))) => failure,
                Ok(Err(halt)) => return Err(halt),
                // A panic in a phase is a failure of that phase, not of the task.
                Err(panic) => return Err(stop(panic)),
            };
            if let Kind::Retry { after } = failure.disposition.0
                && let Some(pause) = pause_before_retry(self.graph, at, tried, after)
            {
                tracing::debug!(phase, tried, reason = failure.message, "trying it again");
                attempt.pause(pause).await?;
                tried += 1;
                continue;
            }
            match failure.disposition.0 {
                Kind::Again(_) if repeated < CONFLICTS => {
                    tracing::debug!(
                        phase,
                        repeated,
                        reason = failure.message,
                        "running it again"
                    );
                    tokio::time::sleep(backoff(repeated)).await;
                    repeated += 1;
                }
                Kind::Reject(_) if is_unhandled_behind_external(self.graph, at) => {
                    return Err(stop(format!(
                        "it rejected the request after something was done outside, and the flow has \
                         no `#[on_reject]` for `{at}`: {}",
                        failure.message
                    )));
                }
                Kind::Reject(reply) => {
                    tracing::debug!(phase, "rejected");
                    let made = Rejection::new(failure.phase, failure.message, *reply);
                    rejection = Some((at, made));
                    repeated = 0;
                }
                _ => return Err(Halt(Why::Failed(failure))),
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
            Why::Closing => {
                tracing::info!("the process is going away; the flow is handed on");
                let parting = Parting::without_failure(&self.settings.limits);
                attempt.release(parting).await;
                return Ended::Failed(RunError::ShuttingDown);
            }
            Why::Failed(failure) => failure,
        };
        let Failure {
            phase,
            disposition: Disposition(kind),
            message,
        } = failure;
        let point = attempt.point();
        let kind = match kind {
            Kind::Again(tried_often_enough) => *tried_often_enough,
            kind => kind,
        };
        let (class, not_before) = match kind {
            Kind::Retry { after } => ("retry", after.unwrap_or_default()),
            Kind::Wait { after } => ("wait", after),
            Kind::Park => ("park", Duration::ZERO),
            Kind::Again(_) | Kind::Reject(_) | Kind::Stop | Kind::Unstorable(_) => {
                ("stop", Duration::ZERO)
            }
        };
        let reason = match kind {
            Kind::Unstorable(why) => format!("{message} (its reply cannot be stored: {why})"),
            _ => message,
        };
        let parting = Parting {
            class,
            phase,
            message: &storable(&reason),
            not_before,
            jitter: 0.5 + random() * 0.5,
            limits: &self.settings.limits,
        };
        let retry_after = not_before.max(RETRY_AFTER);
        if attempt.release(parting).await {
            tracing::error!(phase, reason, "the flow is stuck and waits for an operator");
            return Ended::Failed(RunError::Stuck);
        }
        Ended::Failed(if class == "stop" {
            tracing::error!(phase, reason, "the phase stopped");
            RunError::Stopped {
                phase,
                point,
                reason,
                retry_after,
            }
        } else {
            tracing::info!(
                phase,
                reason,
                "the phase did not end; a retry goes on from its recovery point"
            );
            RunError::Retry {
                phase,
                point,
                reason,
                retry_after,
            }
        })
    }
}

/// How long to wait before a phase that asks for a retry is run again within the request; none where
/// the client is to be asked instead. Full jitter, but never before the outside wants it.
fn pause_before_retry(
    graph: &Graph,
    point: &str,
    tried: u32,
    after: Option<Duration>,
) -> Option<Duration> {
    let retries = graph.phase_from(point)?.in_request_retries()?;
    let asked = after.unwrap_or_default();
    if tried >= retries.times || asked > retries.longest {
        return None;
    }
    let ceiling = retries.first.saturating_mul(1 << tried.min(16));
    Some(ceiling.min(retries.longest).mul_f64(random()).max(asked))
}

/// A `?` must not end a flow with the money taken.
fn is_unhandled_behind_external(graph: &Graph, point: &str) -> bool {
    graph.is_behind_external(point) && !graph.handles_rejection_at(point)
}

/// The outcome, or what the panic said.
async fn catch_panic<T>(step: impl Future<Output = T>) -> Result<T, String> {
    let mut step = pin!(step);
    std::future::poll_fn(|context| {
        // What is used afterwards serves only to let the lease go: by writes that are conditional on
        // what the row says, not on what was half done in memory.
        match std::panic::catch_unwind(AssertUnwindSafe(|| step.as_mut().poll(context))) {
            Ok(poll) => poll.map(Ok),
            Err(panic) => Poll::Ready(Err(format!(
                "it panicked: {}",
                panic_message(panic.as_ref())
            ))),
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
pub(crate) fn backoff(tries: u32) -> Duration {
    Duration::from_millis(5 << tries.min(7)).mul_f64(random())
}

/// From 0 to 1. For jitter, which needs no better source than the one that names attempts.
pub(crate) fn random() -> f64 {
    let (_, low) = Uuid::new_v4().as_u64_pair();
    f64::from(u32::try_from(low & u64::from(u32::MAX)).unwrap_or_default()) / f64::from(u32::MAX)
}
