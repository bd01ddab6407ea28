//! Which handshakes a server takes: a rate for each source, and a proof of address under load (design 5).

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Instant;

use crate::limits::{HANDSHAKES_PENDING_MAX, HANDSHAKES_PENDING_RETRY, HANDSHAKE_SOURCES_MAX};

/// What to do with a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Accept,
    /// Ask the source to prove its address first.
    Retry,
    Refuse,
}

/// A handshake as it arrives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) source: IpAddr,
    /// The source has proved its address.
    pub(crate) validated: bool,
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    tokens: f64,
    filled_at: Instant,
}

/// Rates of sources and the number of handshakes under way.
#[derive(Debug)]
pub(crate) struct Admission {
    per_source_per_s: u32,
    pending: usize,
    sources: HashMap<IpAddr, Bucket>,
}

impl Admission {
    pub(crate) fn new(per_source_per_s: u32) -> Self {
        Self { per_source_per_s, pending: 0, sources: HashMap::new() }
    }

    /// Judges a handshake; one that is accepted counts as under way until [`Admission::handle_done`].
    pub(crate) fn handle_arrival(&mut self, now: Instant, arrival: Arrival) -> Verdict {
        if self.pending >= HANDSHAKES_PENDING_MAX {
            return Verdict::Refuse;
        }
        // Forged sources cost nothing to make up: under load a source is only charged once it has proved itself.
        if self.pending >= HANDSHAKES_PENDING_RETRY && !arrival.validated {
            return Verdict::Retry;
        }
        if !self.take_token(now, source_key(arrival.source)) {
            return Verdict::Refuse;
        }
        self.pending += 1;
        Verdict::Accept
    }

    /// An accepted handshake ended, either way.
    pub(crate) fn handle_done(&mut self) {
        self.pending = self.pending.saturating_sub(1);
    }

    fn take_token(&mut self, now: Instant, source: IpAddr) -> bool {
        let rate = f64::from(self.per_source_per_s);
        if !self.sources.contains_key(&source) && self.sources.len() >= HANDSHAKE_SOURCES_MAX {
            self.forget_some(now);
        }
        let bucket = self.sources.entry(source).or_insert(Bucket { tokens: rate, filled_at: now });
        let passed_s = now.saturating_duration_since(bucket.filled_at).as_secs_f64();
        bucket.tokens = (bucket.tokens + passed_s * rate).min(rate);
        bucket.filled_at = now;
        if bucket.tokens < 1.0 {
            return false;
        }
        bucket.tokens -= 1.0;
        true
    }

    /// Forgets sources whose bucket is full again, which changes nothing for them; if that is not enough, the quarter
    /// that was seen longest ago, so that a flood of sources does not cost a scan for each.
    fn forget_some(&mut self, now: Instant) {
        self.sources.retain(|_, bucket| now.saturating_duration_since(bucket.filled_at).as_secs() < 1);
        if self.sources.len() >= HANDSHAKE_SOURCES_MAX {
            let mut times: Vec<Instant> = self.sources.values().map(|bucket| bucket.filled_at).collect();
            let (_, oldest_kept, _) = times.select_nth_unstable(HANDSHAKE_SOURCES_MAX / 4);
            let oldest_kept = *oldest_kept;
            self.sources.retain(|_, bucket| bucket.filled_at > oldest_kept);
        }
    }
}

/// IPv6 hosts choose freely within their /64, so the /64 is the source.
fn source_key(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(v4) => IpAddr::V4(v4),
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX))),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn arrival(last: u8, validated: bool) -> Arrival {
        Arrival { source: IpAddr::from([10, 0, 0, last]), validated }
    }

    #[test]
    fn a_source_has_its_rate_and_others_have_theirs() {
        let mut admission = Admission::new(4);
        let start = Instant::now();
        for _ in 0..4 {
            assert_eq!(admission.handle_arrival(start, arrival(1, false)), Verdict::Accept);
        }
        assert_eq!(admission.handle_arrival(start, arrival(1, false)), Verdict::Refuse);
        assert_eq!(admission.handle_arrival(start, arrival(2, false)), Verdict::Accept);
        let later = start + Duration::from_millis(260);
        assert_eq!(admission.handle_arrival(later, arrival(1, false)), Verdict::Accept);
        assert_eq!(admission.handle_arrival(later, arrival(1, false)), Verdict::Refuse);
    }

    #[test]
    fn under_load_an_address_must_be_proved_and_then_refused() {
        let mut admission = Admission::new(u32::MAX);
        let now = Instant::now();
        for _ in 0..HANDSHAKES_PENDING_RETRY {
            assert_eq!(admission.handle_arrival(now, arrival(1, false)), Verdict::Accept);
        }
        assert_eq!(admission.handle_arrival(now, arrival(1, false)), Verdict::Retry);
        for _ in HANDSHAKES_PENDING_RETRY..HANDSHAKES_PENDING_MAX {
            assert_eq!(admission.handle_arrival(now, arrival(1, true)), Verdict::Accept);
        }
        assert_eq!(admission.handle_arrival(now, arrival(1, true)), Verdict::Refuse);
        admission.handle_done();
        assert_eq!(admission.handle_arrival(now, arrival(1, true)), Verdict::Accept);
    }

    #[test]
    fn remembered_sources_are_bounded() {
        let mut admission = Admission::new(64);
        let now = Instant::now();
        for number in 0..2 * u32::try_from(HANDSHAKE_SOURCES_MAX).unwrap() {
            let source = IpAddr::from(number.to_be_bytes());
            admission.handle_arrival(now, Arrival { source, validated: true });
            admission.handle_done();
        }
        assert!(admission.sources.len() <= HANDSHAKE_SOURCES_MAX);
    }

    #[test]
    fn an_ipv6_source_is_its_64_bit_prefix() {
        let a: IpAddr = "2001:db8::1".parse().unwrap();
        let b: IpAddr = "2001:db8::ffff:1".parse().unwrap();
        let c: IpAddr = "2001:db8:0:1::1".parse().unwrap();
        assert_eq!(source_key(a), source_key(b));
        assert_ne!(source_key(a), source_key(c));
        assert_eq!(source_key("::ffff:10.0.0.1".parse().unwrap()), IpAddr::from([10, 0, 0, 1]));
    }
}
