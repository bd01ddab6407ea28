//! `kvfabric replay`: a public request trace through rank processes, with real bytes.

mod dispatch;
mod rank;

use std::io::IsTerminal;
use std::sync::mpsc::{sync_channel, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, Context, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvfabric_core::limits::{EXTENT_BYTES, EXTENT_OBJECTS_MIN};
use kvfabric_node::Settings;
use serde_json::{json, Value};

use crate::args::{PoolArg, ReplayArgs};
use crate::cluster::{rank_settings, DirectoryProcess};
use crate::limits;
use crate::output::{bytes_text, gbps_text, micros_text, Printer, Table};
use crate::process::{ChildProcess, FromChild, Incoming};
use crate::protocol::{ChildEvent, RankCounters, ReplayDone, ReplayRequest, ReplayRole, Role};
use crate::summary::{round3, summary_json, Counts, Latencies, TrafficByTransport};
use crate::trace::{self, Request, TOKENS_PER_BLOCK};

use dispatch::{Dispatcher, Next};
pub use rank::run as run_rank;

/// Share of the available memory that an unlimited pool may use, percent: the rest is for buffers and for others.
const UNLIMITED_PERCENT: u64 = 80;

/// What all requests gave.
#[derive(Default)]
struct Totals {
    requests: u64,
    prefix_hits: u64,
    counts: Counts,
    traffic: TrafficByTransport,
    lookups: Latencies,
    loads: Latencies,
    stores: Latencies,
    lookups_incomplete: u64,
    wrong: Option<String>,
    counters: RankCounters,
}

impl Totals {
    fn add(&mut self, done: &ReplayDone) {
        self.requests += 1;
        self.prefix_hits += done.prefix_hits;
        self.counts.add(&done.counts);
        self.traffic.add(&done.traffic);
        if done.lookup_us > 0 {
            self.lookups.record_micros(done.lookup_us);
        }
        if done.load_us > 0 {
            self.loads.record_micros(done.load_us);
        }
        if done.store_us > 0 {
            self.stores.record_micros(done.store_us);
        }
        self.lookups_incomplete += u64::from(!done.complete);
        if self.wrong.is_none() {
            self.wrong.clone_from(&done.wrong);
        }
    }

    /// What must not be in a replay that went well. Misses and stale blocks are no faults.
    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if self.counts.wrong_bytes > 0 {
            let first = self.wrong.as_deref().unwrap_or("unknown place");
            problems.push(format!("{} wrong bytes, first: {first}", self.counts.wrong_bytes));
        }
        if self.counts.failed > 0 {
            problems.push(format!("{} blocks failed: {:?}", self.counts.failed, self.counts.failures));
        }
        if self.lookups_incomplete > 0 {
            problems.push(format!("{} lookups were not answered in full", self.lookups_incomplete));
        }
        let mismatches = self.counters.tag_mismatches + self.counters.checksum_mismatches;
        if mismatches > 0 {
            problems.push(format!("{mismatches} tag or checksum mismatches"));
        }
        problems
    }
}

/// Runs the replay.
///
/// # Errors
/// The trace is malformed, a process failed, or something is not as it must be.
pub fn run(args: &ReplayArgs, settings: &Settings, printer: Printer) -> Result<()> {
    if settings.transport.as_deref() == Some("rdma") {
        bail!(
            "transport rdma is not available in this build: it has no RDMA verbs provider; use --transport shm, tcp \
             or auto"
        );
    }
    let requests = trace::read(&args.trace, args.requests.unwrap_or(usize::MAX))?;
    let blocks_total: u64 = requests.iter().map(|request| request.hash_ids.len() as u64).sum();
    let object_bytes = usize::try_from(TOKENS_PER_BLOCK * u64::from(args.bytes_per_token))?;
    let (pool_bytes, unlimited) =
        pool_bytes(args.pool_bytes, args.ranks, kvfabric_memory::available_memory_bytes())?;
    let directory = DirectoryProcess::start(settings)?;
    printer.event(&json!({
        "event": "start", "trace": args.trace.display().to_string(), "requests": requests.len(),
        "blocks_total": blocks_total, "object_bytes": object_bytes, "ranks": args.ranks,
        "pool_bytes_per_rank": pool_bytes, "unlimited": unlimited, "concurrency": args.concurrency(),
        "in_order": args.in_order(), "directory": directory.address(),
    }))?;
    printer.text(&format!(
        "{} requests with {blocks_total} blocks of {} through {} ranks, pool {} each{}",
        requests.len(),
        bytes_text(object_bytes as u64),
        args.ranks,
        bytes_text(pool_bytes),
        if unlimited { " (80 % of available memory)" } else { "" },
    ))?;
    let role = ReplayRole {
        settings: Box::new(Settings {
            pool_bytes: Some(pool_bytes.to_string()),
            extent_bytes: settings
                .extent_bytes
                .clone()
                .or(Some(extent_bytes(pool_bytes, object_bytes).to_string())),
            ..rank_settings(settings, directory.address(), None)
        }),
        object_bytes,
        request_blocks_max: requests.iter().map(|request| request.hash_ids.len()).max().unwrap_or(0),
        workers: args.concurrency().div_ceil(args.ranks).min(limits::WORKERS_PER_RANK_MAX),
        in_order: args.in_order(),
        unlimited,
    };
    let mut ranks = Ranks::start(args.ranks, &role)?;
    let started = Instant::now();
    let mut totals = ranks.replay(&requests, args, started)?;
    let elapsed = started.elapsed();
    totals.counters = ranks.stop()?;
    directory.stop()?;
    print_end(&totals, blocks_total, elapsed, printer)?;
    let problems = totals.problems();
    if problems.is_empty() {
        return Ok(());
    }
    bail!("the replay did not go as it must: {}", problems.join("; "))
}

/// Capacity of each rank's pool, and whether running out of it is an error.
fn pool_bytes(pool: PoolArg, ranks: usize, available: Option<u64>) -> Result<(u64, bool)> {
    match pool {
        PoolArg::Bytes(bytes) => Ok((bytes, false)),
        PoolArg::Unlimited => {
            let available = available
                .context("cannot find out how much memory is available; give --pool-bytes N for each rank")?;
            let bytes = available / 100 * UNLIMITED_PERCENT / (ranks as u64).max(1);
            if bytes == 0 {
                bail!("no memory is available for pools of {ranks} ranks; free some, or give --pool-bytes N");
            }
            Ok((bytes, true))
        }
    }
}

/// Extents for a pool: the usual ones for a large pool, smaller ones for a small pool, so that it has several.
fn extent_bytes(pool_bytes: u64, object_bytes: usize) -> u64 {
    const EXTENTS_WANTED: u64 = 16;
    let least = EXTENT_OBJECTS_MIN * object_bytes as u64;
    (pool_bytes / EXTENTS_WANTED).clamp(least.min(EXTENT_BYTES), EXTENT_BYTES)
}

/// The rank processes.
struct Ranks {
    children: Vec<ChildProcess>,
    events: Receiver<FromChild>,
}

impl Ranks {
    fn start(count: usize, role: &ReplayRole) -> Result<Self> {
        let (sender, events) = sync_channel(limits::EVENT_QUEUE_MAX);
        let mut ranks = Self { children: Vec::with_capacity(count), events };
        for index in 0..count {
            let name = format!("replay-{index}");
            let settings = Settings { name: Some(name.clone()), ..(*role.settings).clone() };
            let role = Role::ReplayRank(ReplayRole { settings: Box::new(settings), ..role.clone() });
            ranks.children.push(ChildProcess::spawn(&name, &role, index, sender.clone())?);
        }
        let until = Instant::now() + limits::CHILD_READY;
        let mut ready = vec![false; count];
        while ready.contains(&false) {
            match ranks.next(until.saturating_duration_since(Instant::now()))? {
                Some((index, ChildEvent::Ready { .. })) => {
                    if let Some(ready) = ready.get_mut(index) {
                        *ready = true;
                    }
                }
                Some((index, other)) => bail!("rank {index} said {other:?} instead of being ready"),
                None => {
                    let missing: Vec<usize> =
                        (0..count).filter(|index| ready.get(*index) == Some(&false)).collect();
                    bail!("ranks {missing:?} were not ready within {:?}", limits::CHILD_READY);
                }
            }
        }
        Ok(ranks)
    }

    /// The next event of any rank, `None` after `timeout`. A rank that failed or ended is an error.
    fn next(&mut self, timeout: Duration) -> Result<Option<(usize, ChildEvent)>> {
        let FromChild { child, incoming } = match self.events.recv_timeout(timeout) {
            Ok(message) => message,
            Err(RecvTimeoutError::Timeout) => return Ok(None),
            Err(RecvTimeoutError::Disconnected) => bail!("all rank processes ended"),
        };
        let process = self.children.get_mut(child).context("an event of an unknown process")?;
        match incoming {
            Incoming::Event(ChildEvent::Failed { message, .. }) => {
                Err(anyhow!(message).context(format!("process {:?} failed", process.name())))
            }
            Incoming::Event(event) => Ok(Some((child, event))),
            Incoming::Garbled(line) => {
                bail!("process {:?} wrote a line that is no event: {line}", process.name())
            }
            Incoming::Ended => Err(process.ended()),
        }
    }

    fn replay(&mut self, requests: &[Request], args: &ReplayArgs, started: Instant) -> Result<Totals> {
        let mut totals = Totals::default();
        let mut dispatcher = Dispatcher::new(requests, self.children.len(), args.concurrency(), args.speed);
        let progress = progress_bar(requests.len());
        let mut last_event = Instant::now();
        loop {
            let wait = match dispatcher.poll_next(started.elapsed()) {
                Next::Finished => break,
                Next::Send { request, rank } => {
                    self.send(requests, request, rank)?;
                    continue;
                }
                Next::WaitFor(duration) => duration.min(limits::REPLAY_STALL),
                Next::WaitForEvent => limits::REPLAY_STALL,
            };
            match self.next(wait)? {
                Some((_, ChildEvent::Stored { request })) => dispatcher.handle_stored(request)?,
                Some((_, ChildEvent::Done(done))) => {
                    totals.add(&done);
                    let over = dispatcher.handle_done(done.request)?;
                    progress.set_position(over as u64);
                    progress.set_message(format!("{} hits", totals.prefix_hits));
                }
                Some((index, other)) => bail!("rank {index} said {other:?} during the replay"),
                None => {
                    let open = dispatcher.unfinished();
                    if !open.is_empty() && last_event.elapsed() >= limits::REPLAY_STALL {
                        bail!("nothing finished for {:?}; open requests: {open:?}", limits::REPLAY_STALL);
                    }
                    continue;
                }
            }
            last_event = Instant::now();
        }
        progress.finish_and_clear();
        Ok(totals)
    }

    fn send(&mut self, requests: &[Request], request: usize, rank: usize) -> Result<()> {
        let hash_ids = requests.get(request).map(|request| request.hash_ids.clone()).unwrap_or_default();
        let process = self.children.get_mut(rank).context("no such rank")?;
        process.send(&ReplayRequest { request, hash_ids })
    }

    /// Ends all ranks and adds their counters.
    fn stop(mut self) -> Result<RankCounters> {
        for process in &mut self.children {
            process.close();
        }
        let mut sum = RankCounters::default();
        let mut stopped = 0;
        while stopped < self.children.len() {
            match self.events.recv_timeout(limits::CHILD_STOP + limits::CHILD_STOP) {
                Ok(FromChild { incoming: Incoming::Event(ChildEvent::Stopped(counters)), .. }) => {
                    sum.tag_mismatches += counters.tag_mismatches;
                    sum.checksum_mismatches += counters.checksum_mismatches;
                    sum.evictions += counters.evictions;
                    sum.pool_used_bytes += counters.pool_used_bytes;
                    stopped += 1;
                }
                // A rank that said its counters has ended in order; the others are still to come.
                Ok(FromChild { incoming: Incoming::Ended, .. }) => {}
                Ok(FromChild { child, incoming }) => {
                    bail!("rank {child} said {incoming:?} instead of ending")
                }
                Err(_) => bail!("{} ranks did not end", self.children.len() - stopped),
            }
        }
        for process in &mut self.children {
            process.stop()?;
        }
        Ok(sum)
    }
}

fn progress_bar(requests: usize) -> ProgressBar {
    // On a pipe a bar is noise. It never goes to standard output, which is for results.
    let target = if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let bar = ProgressBar::with_draw_target(Some(requests as u64), target);
    match ProgressStyle::with_template("{wide_bar} {pos}/{len} requests, {msg}, {elapsed} (+{eta})") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

fn summary(totals: &Totals, blocks_total: u64, elapsed: Duration) -> Value {
    let mut summary = summary_json(&totals.counts, &totals.traffic, elapsed);
    let (lookup_p50, lookup_p99) = totals.lookups.p50_p99();
    let (load_p50, load_p99) = totals.loads.p50_p99();
    let (store_p50, store_p99) = totals.stores.p50_p99();
    for (name, value) in [
        ("requests", json!(totals.requests)),
        ("blocks_total", json!(blocks_total)),
        ("prefix_hit_blocks", json!(totals.prefix_hits)),
        ("lookup_p50_us", json!(lookup_p50)),
        ("lookup_p99_us", json!(lookup_p99)),
        ("load_p50_us", json!(load_p50)),
        ("load_p99_us", json!(load_p99)),
        ("store_p50_us", json!(store_p50)),
        ("store_p99_us", json!(store_p99)),
        ("lookups_incomplete", json!(totals.lookups_incomplete)),
        ("evictions", json!(totals.counters.evictions)),
        ("pool_used_bytes", json!(totals.counters.pool_used_bytes)),
        ("failures", json!(totals.counts.failures)),
        ("problems", json!(totals.problems())),
    ] {
        summary.insert(name.into(), value);
    }
    summary.into()
}

fn print_end(totals: &Totals, blocks_total: u64, elapsed: Duration, printer: Printer) -> Result<()> {
    let counts = &totals.counts;
    let mut table = Table::new(["operation", "blocks", "data", "GB/s", "p50 us", "p99 us"]);
    let mut row = |name: &str, blocks: Option<u64>, bytes: u64, gbps: f64, latencies: &Latencies| {
        let (p50, p99) = latencies.p50_p99();
        table.row([
            name.to_owned(),
            blocks.map_or_else(|| "-".into(), |blocks| blocks.to_string()),
            if bytes > 0 { bytes_text(bytes) } else { "-".into() },
            gbps_text(gbps),
            micros_text(p50),
            micros_text(p99),
        ]);
    };
    row("lookup", Some(blocks_total), 0, 0.0, &totals.lookups);
    row("load", Some(counts.loaded), counts.bytes_loaded, 0.0, &totals.loads);
    for (name, traffic) in &totals.traffic.0 {
        row(&format!("  from {name}"), None, traffic.bytes, round3(traffic.gbps()), &Latencies::default());
    }
    row("store", Some(counts.stored + counts.resident), counts.bytes_stored, 0.0, &totals.stores);
    printer.text(&table.render())?;
    printer.text("GB/s over the time of the loads, added up; GB = 10^9 bytes")?;
    #[allow(clippy::cast_precision_loss)] // Two digits are printed.
    let share = 100.0 * totals.prefix_hits as f64 / blocks_total.max(1) as f64;
    printer.text(&format!(
        "\n{} requests in {:.1} s: {} of {blocks_total} blocks were prefix hits ({share:.1} %), {} missed, {} stale, {} \
         failed, {} wrong bytes, {} evicted",
        totals.requests,
        elapsed.as_secs_f64(),
        totals.prefix_hits,
        counts.missed,
        counts.stale,
        counts.failed,
        counts.wrong_bytes,
        totals.counters.evictions,
    ))?;
    printer.event(&summary(totals, blocks_total, elapsed))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unlimited_pool_is_four_fifths_of_memory_over_the_ranks() {
        assert_eq!(pool_bytes(PoolArg::Unlimited, 4, Some(1000)).unwrap(), (200, true));
        assert_eq!(pool_bytes(PoolArg::Bytes(7), 4, None).unwrap(), (7, false));
        assert!(pool_bytes(PoolArg::Unlimited, 4, None).is_err());
        assert!(pool_bytes(PoolArg::Unlimited, 4, Some(3)).is_err());
    }

    #[test]
    fn small_pools_have_small_extents() {
        assert_eq!(extent_bytes(1 << 40, 8192), EXTENT_BYTES);
        assert_eq!(extent_bytes(8 << 20, 8192), 512 << 10);
        assert_eq!(extent_bytes(100, 8192), EXTENT_OBJECTS_MIN * 8192);
        assert_eq!(extent_bytes(1, 1 << 30), EXTENT_BYTES);
    }

    #[test]
    fn totals_make_the_summary() {
        let mut totals = Totals::default();
        let mut done =
            ReplayDone { prefix_hits: 3, complete: true, lookup_us: 10, load_us: 20, ..Default::default() };
        done.counts.loaded = 3;
        done.counts.missed = 2;
        totals.add(&done);
        totals.add(&ReplayDone { complete: true, lookup_us: 30, ..Default::default() });
        let line = summary(&totals, 5, Duration::from_secs(1));
        for (name, value) in [
            ("event", json!("summary")),
            ("requests", json!(2)),
            ("blocks_total", json!(5)),
            ("prefix_hit_blocks", json!(3)),
            ("blocks_loaded", json!(3)),
            ("blocks_missed", json!(2)),
            ("lookup_p50_us", json!(10)),
            ("lookup_p99_us", json!(30)),
            ("load_p50_us", json!(20)),
            ("load_p99_us", json!(20)),
        ] {
            assert_eq!(line[name], value, "{name}");
        }
        assert!(totals.problems().is_empty());
    }

    #[test]
    fn faults_are_problems_and_misses_are_not() {
        let mut totals = Totals::default();
        let mut done = ReplayDone { complete: true, ..Default::default() };
        done.counts.missed = 5;
        done.counts.stale = 5;
        totals.add(&done);
        assert!(totals.problems().is_empty());
        done.complete = false;
        done.counts.wrong_bytes = 1;
        done.counts.fail("x");
        done.wrong = Some("request 3".into());
        totals.add(&done);
        let problems = totals.problems().join("; ");
        assert!(problems.contains("1 wrong bytes, first: request 3"), "{problems}");
        assert_eq!(totals.problems().len(), 3);
    }
}
