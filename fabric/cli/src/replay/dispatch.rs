//! Which request goes to which rank, and when. No clock, no processes: time comes in as an argument.

use std::time::Duration;

use anyhow::{bail, Result};

use crate::args::SpeedArg;
use crate::trace::Request;

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Send this request to this rank.
    Send {
        /// Number of the request.
        request: usize,
        /// Number of the rank.
        rank: usize,
    },
    /// Wait for an event, at most so long: then another request is due.
    WaitFor(Duration),
    /// Wait for an event.
    WaitForEvent,
    /// Every request is over.
    Finished,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting,
    Sent,
    Stored,
    Over,
}

/// Gives requests out in file order, round robin, with a bounded number in flight. A request is in flight until its
/// blocks are stored; checking its bytes may take longer.
#[derive(Debug)]
pub struct Dispatcher<'a> {
    requests: &'a [Request],
    states: Vec<State>,
    ranks: usize,
    concurrency: usize,
    speed: SpeedArg,
    next: usize,
    in_flight: usize,
    over: usize,
}

impl<'a> Dispatcher<'a> {
    /// For these requests and so many ranks.
    pub fn new(requests: &'a [Request], ranks: usize, concurrency: usize, speed: SpeedArg) -> Self {
        let states = vec![State::Waiting; requests.len()];
        Self { requests, states, ranks, concurrency, speed, next: 0, in_flight: 0, over: 0 }
    }

    /// What to do next, `elapsed` after the start. A request that it gives out counts as sent.
    pub fn poll_next(&mut self, elapsed: Duration) -> Next {
        if self.over == self.requests.len() {
            return Next::Finished;
        }
        let Some(request) = self.requests.get(self.next) else { return Next::WaitForEvent };
        if self.in_flight >= self.concurrency {
            return Next::WaitForEvent;
        }
        let early = self.due(request).saturating_sub(elapsed);
        if !early.is_zero() {
            return Next::WaitFor(early);
        }
        let number = self.next;
        if let Some(state) = self.states.get_mut(number) {
            *state = State::Sent;
        }
        self.next += 1;
        self.in_flight += 1;
        Next::Send { request: number, rank: number % self.ranks.max(1) }
    }

    fn due(&self, request: &Request) -> Duration {
        let first = self.requests.first().map_or(0, |first| first.timestamp_ms);
        match self.speed {
            SpeedArg::Max => Duration::ZERO,
            #[allow(clippy::cast_precision_loss)] // A trace's time has far fewer than 53 bits.
            SpeedArg::Times(factor) => {
                let seconds = request.timestamp_ms.saturating_sub(first) as f64 / 1000.0 / factor;
                Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
            }
        }
    }

    /// A rank stored a request's blocks.
    ///
    /// # Errors
    /// The request was not sent, or this came before.
    pub fn handle_stored(&mut self, request: usize) -> Result<()> {
        match self.states.get_mut(request) {
            Some(state @ State::Sent) => *state = State::Stored,
            other => bail!("request {request} was reported as stored while {other:?}"),
        }
        self.in_flight -= 1;
        Ok(())
    }

    /// A rank is done with a request. Returns how many are.
    ///
    /// # Errors
    /// The request was not stored, or this came before.
    pub fn handle_done(&mut self, request: usize) -> Result<usize> {
        match self.states.get_mut(request) {
            Some(state @ State::Stored) => *state = State::Over,
            other => bail!("request {request} was reported as done while {other:?}"),
        }
        self.over += 1;
        Ok(self.over)
    }

    /// Requests that were sent and are not over, the first few: for messages about a stall.
    pub fn unfinished(&self) -> Vec<usize> {
        let open = |state: &State| matches!(state, State::Sent | State::Stored);
        self.states.iter().enumerate().filter(|(_, state)| open(state)).map(|(n, _)| n).take(8).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests(times: &[u64]) -> Vec<Request> {
        times.iter().map(|ms| Request { timestamp_ms: *ms, hash_ids: vec![0] }).collect()
    }

    const NOW: Duration = Duration::ZERO;

    #[test]
    fn one_in_flight_means_strict_file_order() {
        let requests = requests(&[0, 0, 0]);
        let mut dispatcher = Dispatcher::new(&requests, 2, 1, SpeedArg::Max);
        for (request, rank) in [(0, 0), (1, 1), (2, 0)] {
            assert_eq!(dispatcher.poll_next(NOW), Next::Send { request, rank });
            assert_eq!(dispatcher.poll_next(NOW), Next::WaitForEvent);
            dispatcher.handle_stored(request).unwrap();
        }
        // Bytes may be checked late and in any order.
        assert_eq!(dispatcher.poll_next(NOW), Next::WaitForEvent);
        assert_eq!(dispatcher.unfinished(), vec![0, 1, 2]);
        for (done, request) in [(1, 2), (2, 0), (3, 1)] {
            assert_eq!(dispatcher.handle_done(request).unwrap(), done);
        }
        assert_eq!(dispatcher.poll_next(NOW), Next::Finished);
    }

    #[test]
    fn arrival_times_are_scaled_from_the_first_request_on() {
        let requests = requests(&[1000, 1000, 3000]);
        let mut dispatcher = Dispatcher::new(&requests, 1, 10, SpeedArg::Times(2.0));
        assert!(matches!(dispatcher.poll_next(NOW), Next::Send { request: 0, .. }));
        assert!(matches!(dispatcher.poll_next(NOW), Next::Send { request: 1, .. }));
        assert_eq!(
            dispatcher.poll_next(Duration::from_millis(400)),
            Next::WaitFor(Duration::from_millis(600))
        );
        assert!(matches!(dispatcher.poll_next(Duration::from_secs(1)), Next::Send { request: 2, .. }));
    }

    #[test]
    fn concurrency_bounds_requests_over_all_ranks() {
        let requests = requests(&[0; 5]);
        let mut dispatcher = Dispatcher::new(&requests, 4, 3, SpeedArg::Max);
        for _ in 0..3 {
            assert!(matches!(dispatcher.poll_next(NOW), Next::Send { .. }));
        }
        assert_eq!(dispatcher.poll_next(NOW), Next::WaitForEvent);
        dispatcher.handle_stored(1).unwrap();
        assert_eq!(dispatcher.poll_next(NOW), Next::Send { request: 3, rank: 3 });
    }

    #[test]
    fn reports_out_of_place_are_errors() {
        let requests = requests(&[0, 0]);
        let mut dispatcher = Dispatcher::new(&requests, 1, 1, SpeedArg::Max);
        assert!(dispatcher.handle_stored(0).is_err());
        assert!(dispatcher.handle_done(7).is_err());
        dispatcher.poll_next(NOW);
        assert!(dispatcher.handle_done(0).is_err());
        dispatcher.handle_stored(0).unwrap();
        assert!(dispatcher.handle_stored(0).is_err());
        dispatcher.handle_done(0).unwrap();
        assert!(dispatcher.handle_done(0).is_err());
    }
}
