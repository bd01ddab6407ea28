//! Waiting between attempts, and a connection that is made again whenever it is lost.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::connection::Connection;
use crate::endpoint::Endpoint;
use crate::error::{CloseReason, ConnectError};

/// Exponential waits with a cap. A pure function of the attempt's number, so tests and simulations can replay it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    min: Duration,
    max: Duration,
}

impl Default for Backoff {
    /// 50 ms doubling to 2 s: a restarted directory is found within moments, a missing one costs little.
    fn default() -> Self {
        Self { min: Duration::from_millis(50), max: Duration::from_secs(2) }
    }
}

impl Backoff {
    /// Waits of `min`, twice that, and so on, never above `max`.
    #[must_use]
    pub const fn new(min: Duration, max: Duration) -> Self {
        Self { min, max }
    }

    /// The wait after failure number `attempt`, counted from 0.
    #[must_use]
    pub fn delay(&self, attempt: u32) -> Duration {
        let factor = 1u32.checked_shl(attempt).unwrap_or(u32::MAX);
        self.min.saturating_mul(factor).min(self.max)
    }

    /// As [`Backoff::delay`], shortened by up to a half that depends on `seed` and `attempt` alone, so that ranks with
    /// different seeds do not come back all at once.
    #[must_use]
    pub fn delay_jittered(&self, attempt: u32, seed: u64) -> Duration {
        let delay = self.delay(attempt);
        let share = u32::try_from(mix(seed ^ (u64::from(attempt) << 32)) >> 48).unwrap_or(0);
        delay - (delay / 2).saturating_mul(share) / (1 << 16)
    }
}

/// The finaliser of SplitMix64: every input bit reaches every output bit.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// How a [`Reconnecting`] link stands.
#[derive(Clone, Debug)]
pub enum LinkState {
    /// Not connected; being tried.
    Connecting {
        /// Failures in a row.
        failures: u32,
        /// The last failure to connect.
        last_error: Option<ConnectError>,
        /// Why the connection before ended, if there was one.
        lost: Option<CloseReason>,
    },
    /// Connected.
    Connected(Connection),
}

/// A connection to one target that is made again whenever it is lost, until dropped. Every failure is retried, those
/// that need a change of settings as well, because the change may come; [`LinkState`] carries the error for those who
/// would rather give up.
#[derive(Debug)]
pub struct Reconnecting {
    target: Arc<str>,
    state: watch::Receiver<LinkState>,
    task: JoinHandle<()>,
}

impl Reconnecting {
    /// Starts connecting to `target`, `HOST:PORT`, on the current tokio runtime. `seed` spreads the attempts of
    /// different processes; a process's random incarnation will do.
    #[must_use]
    pub fn start(endpoint: Endpoint, target: &str, backoff: Backoff, seed: u64) -> Self {
        let target: Arc<str> = Arc::from(target);
        let first = LinkState::Connecting { failures: 0, last_error: None, lost: None };
        let (sender, state) = watch::channel(first);
        let task = tokio::spawn(run(endpoint, Arc::clone(&target), backoff, seed, sender));
        Self { target, state, task }
    }

    /// Where it connects to.
    #[must_use]
    pub fn target(&self) -> &str {
        &self.target
    }

    /// How it stands.
    #[must_use]
    pub fn state(&self) -> LinkState {
        self.state.borrow().clone()
    }

    /// The connection, if there is one that has not ended.
    #[must_use]
    pub fn current(&self) -> Option<Connection> {
        match &*self.state.borrow() {
            LinkState::Connected(connection) if connection.close_reason().is_none() => {
                Some(connection.clone())
            }
            _ => None,
        }
    }

    /// A receiver that sees every later state.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<LinkState> {
        self.state.clone()
    }

    /// The connection, waiting for one at most `deadline`.
    ///
    /// # Errors
    /// The last [`ConnectError`], or a timeout if there was none.
    pub async fn connection(&self, deadline: Duration) -> Result<Connection, ConnectError> {
        let mut state = self.state.clone();
        let live = |state: &LinkState| match state {
            LinkState::Connected(connection) => connection.close_reason().is_none(),
            LinkState::Connecting { .. } => false,
        };
        let found = timeout(deadline, state.wait_for(live))
            .await
            .ok()
            .and_then(Result::ok)
            .map(|state| state.clone());
        match found.unwrap_or_else(|| self.state()) {
            LinkState::Connected(connection) => Ok(connection),
            LinkState::Connecting { last_error: Some(error), .. } => Err(error),
            LinkState::Connecting { .. } => {
                Err(ConnectError::Timeout { target: self.target.to_string(), timeout: deadline })
            }
        }
    }
}

impl Drop for Reconnecting {
    fn drop(&mut self) {
        self.task.abort();
        if let LinkState::Connected(connection) = &*self.state.borrow() {
            connection.close("no longer needed");
        }
    }
}

async fn run(
    endpoint: Endpoint,
    target: Arc<str>,
    backoff: Backoff,
    seed: u64,
    state: watch::Sender<LinkState>,
) {
    let mut failures: u32 = 0;
    let mut lost = None;
    loop {
        let last_error = match endpoint.connect(&target).await {
            Ok(connection) => {
                let since = Instant::now();
                state.send_replace(LinkState::Connected(connection.clone()));
                let reason = connection.closed().await;
                tracing::info!(%target, %reason, "connection lost");
                lost = Some(reason);
                // A peer that takes connections only to drop them is not hurried.
                if since.elapsed() > backoff.max {
                    failures = 0;
                }
                None
            }
            Err(error) => {
                if failures == 0 {
                    tracing::warn!(%error, "cannot connect, trying again");
                }
                Some(error)
            }
        };
        let closed = matches!(last_error, Some(ConnectError::EndpointClosed { .. }));
        let wait = backoff.delay_jittered(failures, seed);
        failures = failures.saturating_add(1);
        state.send_replace(LinkState::Connecting { failures, last_error, lost: lost.clone() });
        if closed {
            return;
        }
        sleep(wait).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_cap() {
        let backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
        let waits: Vec<u128> = (0..8).map(|attempt| backoff.delay(attempt).as_millis()).collect();
        assert_eq!(waits, [50, 100, 200, 400, 800, 1600, 2000, 2000]);
        assert_eq!(backoff.delay(31), Duration::from_secs(2));
        assert_eq!(backoff.delay(u32::MAX), Duration::from_secs(2));
    }

    #[test]
    fn jitter_is_a_function_of_seed_and_attempt_and_takes_at_most_half() {
        let backoff = Backoff::default();
        let mut distinct = std::collections::BTreeSet::new();
        for seed in 0..100 {
            for attempt in [0, 3, 40] {
                let full = backoff.delay(attempt);
                let jittered = backoff.delay_jittered(attempt, seed);
                assert!(jittered <= full && jittered >= full / 2, "{jittered:?} of {full:?}");
                assert_eq!(jittered, backoff.delay_jittered(attempt, seed));
            }
            distinct.insert(backoff.delay_jittered(3, seed));
        }
        assert!(distinct.len() > 50, "seeds spread the waits");
    }
}
