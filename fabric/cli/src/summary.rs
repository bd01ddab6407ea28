//! Counting outcomes, latencies and throughput, and the summary line that scripts depend on.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{json, Map, Value};

use crate::limits;

/// Outcomes of blocks. Every block that was asked for is in exactly one of the last five of a load.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Stored, bytes copied into a pool.
    pub stored: u64,
    /// Stored, but resident already: nothing was copied.
    pub resident: u64,
    /// Loaded and found right.
    pub loaded: u64,
    /// Not there: nobody had the block.
    pub missed: u64,
    /// Found, but evicted or overwritten at its owner before it was read.
    pub stale: u64,
    /// Failed otherwise.
    pub failed: u64,
    /// Loaded with a wrong byte in it.
    pub wrong: u64,
    /// Wrong bytes, those that arrived where none may arrive included.
    pub wrong_bytes: u64,
    /// Bytes stored.
    pub bytes_stored: u64,
    /// Bytes loaded.
    pub bytes_loaded: u64,
    /// Why blocks failed, and how often.
    pub failures: BTreeMap<String, u64>,
}

impl Counts {
    /// Adds the counts of another part.
    pub fn add(&mut self, other: &Self) {
        self.stored += other.stored;
        self.resident += other.resident;
        self.loaded += other.loaded;
        self.missed += other.missed;
        self.stale += other.stale;
        self.failed += other.failed;
        self.wrong += other.wrong;
        self.wrong_bytes += other.wrong_bytes;
        self.bytes_stored += other.bytes_stored;
        self.bytes_loaded += other.bytes_loaded;
        for (reason, count) in &other.failures {
            self.note_failure(reason, *count);
        }
    }

    /// Counts a failed block.
    pub fn fail(&mut self, reason: &str) {
        self.failed += 1;
        self.note_failure(reason, 1);
    }

    fn note_failure(&mut self, reason: &str, count: u64) {
        let known = self.failures.len() < limits::FAILURE_KINDS_MAX || self.failures.contains_key(reason);
        let reason = if known { reason } else { "other reasons" };
        *self.failures.entry(reason.to_owned()).or_default() += count;
    }

    /// Blocks that a load ended for, in whatever way.
    pub fn load_outcomes(&self) -> u64 {
        self.loaded + self.missed + self.stale + self.failed + self.wrong
    }
}

/// Bytes and time of loads by one transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Traffic {
    /// Bytes that arrived and were accepted.
    pub bytes: u64,
    /// Those of them that `seconds` counts.
    pub timed_bytes: u64,
    /// Time that loads took, seconds. Where one load used several transports, each has its share by bytes.
    pub seconds: f64,
}

impl Traffic {
    /// GB/s (10^9 bytes); zero when nothing was measured.
    pub fn gbps(&self) -> f64 {
        if self.seconds > 0.0 {
            bytes_as_f64(self.timed_bytes) / 1e9 / self.seconds
        } else {
            0.0
        }
    }
}

/// Traffic by name of transport; `local` is a rank's own pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TrafficByTransport(pub BTreeMap<String, Traffic>);

impl TrafficByTransport {
    /// Adds the bytes of one load that took `elapsed`, each transport with its share of the time.
    pub fn add_load(&mut self, bytes_by_transport: &BTreeMap<&'static str, u64>, elapsed: Duration) {
        let total: u64 = bytes_by_transport.values().sum();
        for (name, bytes) in bytes_by_transport.iter().filter(|(_, bytes)| **bytes > 0) {
            let entry = self.0.entry((*name).to_owned()).or_default();
            entry.bytes += bytes;
            entry.timed_bytes += bytes;
            entry.seconds += elapsed.as_secs_f64() * bytes_as_f64(*bytes) / bytes_as_f64(total);
        }
    }

    /// Adds bytes whose time says nothing about the transport, since other work was done meanwhile.
    pub fn add_untimed(&mut self, bytes_by_transport: &BTreeMap<&'static str, u64>) {
        for (name, bytes) in bytes_by_transport.iter().filter(|(_, bytes)| **bytes > 0) {
            self.0.entry((*name).to_owned()).or_default().bytes += bytes;
        }
    }

    /// Adds the traffic of another part.
    pub fn add(&mut self, other: &Self) {
        for (name, traffic) in &other.0 {
            let entry = self.0.entry(name.clone()).or_default();
            entry.bytes += traffic.bytes;
            entry.timed_bytes += traffic.timed_bytes;
            entry.seconds += traffic.seconds;
        }
    }

    /// For the summary line.
    pub fn to_json(&self) -> Value {
        let entries = self.0.iter().map(|(name, traffic)| {
            (name.clone(), json!({ "bytes": traffic.bytes, "gbps": round3(traffic.gbps()) }))
        });
        Value::Object(entries.collect::<Map<_, _>>())
    }
}

#[allow(clippy::cast_precision_loss)] // Above 2^53 bytes a rate has enough digits without the last one.
fn bytes_as_f64(bytes: u64) -> f64 {
    bytes as f64
}

/// Rounded to three decimals, for JSON.
pub fn round3(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Latencies in microseconds, kept exactly: a trace has at most as many as it has requests.
#[derive(Clone, Debug, Default)]
pub struct Latencies(Vec<u64>);

impl Latencies {
    /// Records one.
    pub fn record(&mut self, elapsed: Duration) {
        self.record_micros(micros(elapsed));
    }

    /// Records one.
    pub fn record_micros(&mut self, micros: u64) {
        self.0.push(micros);
    }

    /// Median and 99th percentile (nearest rank); zero when there are none.
    pub fn p50_p99(&self) -> (u64, u64) {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let at = |percent: usize| {
            let rank = (sorted.len() * percent).div_ceil(100).max(1);
            sorted.get(rank - 1).copied().unwrap_or(0)
        };
        (at(50), at(99))
    }

    /// The longest; zero when there are none.
    pub fn max(&self) -> u64 {
        self.0.iter().copied().max().unwrap_or(0)
    }
}

/// Whole microseconds.
pub fn micros(elapsed: Duration) -> u64 {
    u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX)
}

/// The summary line: the fields that demo and replay share.
pub fn summary_json(
    counts: &Counts,
    transports: &TrafficByTransport,
    elapsed: Duration,
) -> Map<String, Value> {
    let fields = [
        ("event", json!("summary")),
        ("blocks_stored", json!(counts.stored + counts.resident)),
        ("blocks_loaded", json!(counts.loaded)),
        ("blocks_missed", json!(counts.missed)),
        ("blocks_stale", json!(counts.stale)),
        ("blocks_failed", json!(counts.failed)),
        ("wrong_bytes", json!(counts.wrong_bytes)),
        ("bytes_stored", json!(counts.bytes_stored)),
        ("bytes_loaded", json!(counts.bytes_loaded)),
        ("seconds", json!(round3(elapsed.as_secs_f64()))),
        ("transports", transports.to_json()),
    ];
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_exact() {
        let mut latencies = Latencies::default();
        assert_eq!((latencies.p50_p99(), latencies.max()), ((0, 0), 0));
        for micros in (1..=200).rev() {
            latencies.record_micros(micros);
        }
        assert_eq!((latencies.p50_p99(), latencies.max()), ((100, 198), 200));
        let mut one = Latencies::default();
        one.record(Duration::from_millis(3));
        assert_eq!(one.p50_p99(), (3000, 3000));
    }

    #[test]
    fn counts_add_up_and_failures_are_bounded() {
        let mut sum = Counts::default();
        for number in 0..100 {
            let mut part = Counts { loaded: 1, bytes_loaded: 8, ..Counts::default() };
            part.fail(&format!("reason {number}"));
            sum.add(&part);
        }
        assert_eq!((sum.loaded, sum.failed, sum.bytes_loaded, sum.load_outcomes()), (100, 100, 800, 200));
        assert_eq!(sum.failures.len(), limits::FAILURE_KINDS_MAX + 1);
        assert_eq!(sum.failures.values().sum::<u64>(), 100);
    }

    #[test]
    fn time_of_a_load_is_shared_by_bytes() {
        let mut traffic = TrafficByTransport::default();
        let bytes = BTreeMap::from([("shm", 3_000_000_000), ("tcp", 1_000_000_000), ("local", 0)]);
        traffic.add_load(&bytes, Duration::from_secs(4));
        let mut twice = traffic.clone();
        twice.add(&traffic);
        twice.add_untimed(&BTreeMap::from([("shm", 5)]));
        assert_eq!(
            twice.0["shm"],
            Traffic { bytes: 6_000_000_005, timed_bytes: 6_000_000_000, seconds: 6.0 }
        );
        assert_eq!(
            twice.to_json(),
            json!({ "shm": { "bytes": 6_000_000_005_u64, "gbps": 1.0 }, "tcp": { "bytes": 2_000_000_000_u64, "gbps": 1.0 } })
        );
    }

    #[test]
    fn the_summary_has_the_fields_that_scripts_read() {
        let counts = Counts { stored: 3, resident: 1, loaded: 2, ..Counts::default() };
        let line = summary_json(&counts, &TrafficByTransport::default(), Duration::from_millis(1500));
        for field in [
            "event",
            "blocks_stored",
            "blocks_loaded",
            "blocks_missed",
            "blocks_stale",
            "blocks_failed",
            "wrong_bytes",
            "bytes_loaded",
            "seconds",
            "transports",
        ] {
            assert!(line.contains_key(field), "{field}");
        }
        assert_eq!((line["blocks_stored"].clone(), line["seconds"].clone()), (json!(4), json!(1.5)));
    }
}
