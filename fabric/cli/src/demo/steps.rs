//! The steps of the demo on one transport, and what each must give.

use std::sync::mpsc::{sync_channel, Receiver};
use std::time::{Duration, Instant};

use anyhow::{bail, Result};
use kvfabric_core::limits::{DRAIN_SHM, DRAIN_TCP};
use kvfabric_node::Settings;

use crate::args::TransportArg;
use crate::limits;
use crate::process::{next_event, ChildProcess, FromChild};
use crate::protocol::{ChildEvent, DemoCommand, DemoReport, KeyRange, Role};
use crate::summary::{micros, Counts, TrafficByTransport};
use crate::tensors::OBJECT_BYTES;

/// Keys that are stored only to overwrite slots.
const OTHER_KEYS_FIRST: u64 = 1 << 32;
/// Number of the first put.
const FIRST_PUT: u64 = 1;
/// Put of the other keys.
const OTHER_PUT: u64 = 2;
/// First put while blocks are read and overwritten at once.
const CHURN_PUT: u64 = 10;
/// Put before the owner is killed, above every put of the churn.
const KILL_PUT: u64 = 1 << 40;
/// Put of the restarted owner.
const RESTART_PUT: u64 = KILL_PUT + 1;

/// What one step gave.
#[derive(Debug, Default)]
pub struct Step {
    /// Name.
    pub name: &'static str,
    /// Blocks that the step was about.
    pub blocks: u64,
    /// Whether the step stores rather than loads.
    pub is_store: bool,
    /// Outcomes.
    pub counts: Counts,
    /// Traffic.
    pub traffic: TrafficByTransport,
    /// GB/s, where it says something.
    pub gbps: Option<f64>,
    /// Median latency of a job.
    pub p50_us: u64,
    /// 99th percentile of a job.
    pub p99_us: u64,
    /// What happened, for people.
    pub note: String,
    /// What was not as it must be.
    pub problems: Vec<String>,
}

impl Step {
    fn new(name: &'static str, blocks: u64) -> Self {
        Self { name, blocks, ..Self::default() }
    }

    /// Takes a report of the reader or the owner. Wrong bytes are always a problem.
    fn take(&mut self, report: &DemoReport) {
        self.counts.add(&report.counts);
        self.traffic.add(&report.traffic);
        (self.p50_us, self.p99_us) = (report.p50_us, report.p99_us);
        if report.counts.wrong_bytes > 0 || report.wrong.is_some() {
            let what = report.wrong.clone().unwrap_or_default();
            self.problems.push(format!("{} wrong bytes: {what}", report.counts.wrong_bytes));
        }
    }

    fn must(&mut self, holds: bool, otherwise: impl FnOnce() -> String) {
        if !holds {
            self.problems.push(otherwise());
        }
    }
}

/// A rank process with its events.
struct Rank {
    child: ChildProcess,
    events: Receiver<FromChild>,
    incarnation: u64,
}

impl Rank {
    fn start(settings: &Settings, blocks: u32) -> Result<Self> {
        let name = settings.name.clone().unwrap_or_default();
        let (sender, events) = sync_channel(limits::EVENT_QUEUE_MAX);
        let role = Role::DemoRank {
            settings: Box::new(settings.clone()),
            blocks,
            start_within_ms: micros(limits::DEMO_RESTART) / 1000,
        };
        let mut child = ChildProcess::spawn(&name, &role, 0, sender)?;
        match next_event(&mut child, &events, limits::CHILD_READY + limits::DEMO_RESTART)? {
            ChildEvent::Ready { incarnation: Some(incarnation), .. } => {
                Ok(Self { child, events, incarnation })
            }
            other => bail!("rank {name:?} said {other:?} instead of being ready"),
        }
    }

    fn send(&mut self, command: &DemoCommand) -> Result<()> {
        self.child.send(command)
    }

    fn report(&mut self, within: Duration) -> Result<DemoReport> {
        match next_event(&mut self.child, &self.events, within + limits::CHILD_COMMAND_SLACK)? {
            ChildEvent::Report(report) => Ok(*report),
            other => bail!("rank {:?} said {other:?} instead of a report", self.child.name()),
        }
    }

    fn ask(&mut self, command: &DemoCommand) -> Result<DemoReport> {
        self.send(command)?;
        self.report(Duration::ZERO)
    }

    fn stop(mut self, problems: &mut Vec<String>) -> Result<()> {
        self.send(&DemoCommand::Stop)?;
        match next_event(&mut self.child, &self.events, limits::CHILD_COMMAND_SLACK)? {
            ChildEvent::Stopped(counters) => {
                if counters.tag_mismatches + counters.checksum_mismatches > 0 {
                    problems.push(format!(
                        "rank {:?} saw {} tag and {} checksum mismatches",
                        self.child.name(),
                        counters.tag_mismatches,
                        counters.checksum_mismatches
                    ));
                }
            }
            other => bail!("rank {:?} said {other:?} instead of ending", self.child.name()),
        }
        self.child.stop()
    }
}

/// One pass over one transport: a fresh owner A and a fresh reader B.
pub struct Scenario {
    transport: TransportArg,
    blocks: u32,
    owner_settings: Settings,
    owner: Option<Rank>,
    /// Incarnation of the latest owner.
    incarnation: u64,
    reader: Rank,
    next: usize,
}

impl Scenario {
    /// Starts both ranks.
    ///
    /// # Errors
    /// One of them failed.
    pub fn start(transport: TransportArg, blocks: u32, base: Settings) -> Result<Self> {
        let name = transport.name();
        let settings = |rank: &str, pool_blocks: u32| Settings {
            name: Some(format!("{rank}-{name}")),
            pool_bytes: Some((u64::from(pool_blocks) * OBJECT_BYTES as u64).to_string()),
            // Small extents, so that the pool is hardly larger than what is stored, whatever the number of blocks.
            extent_bytes: base.extent_bytes.clone().or(Some((8 * OBJECT_BYTES).to_string())),
            ..base.clone()
        };
        // Room for all blocks, for the quarantine of evicted ones, and for started extents.
        let owner_settings = settings("A", blocks + blocks / 16 + 64);
        let owner = Rank::start(&owner_settings, blocks)?;
        let reader = Rank::start(&settings("B", 64), blocks)?;
        let incarnation = owner.incarnation;
        Ok(Self { transport, blocks, owner_settings, owner: Some(owner), incarnation, reader, next: 0 })
    }

    /// Ends both ranks. Returns what their counters say that must not be.
    ///
    /// # Errors
    /// One of them did not end well.
    pub fn stop(mut self) -> Result<Vec<String>> {
        let mut problems = Vec::new();
        if let Some(owner) = self.owner.take() {
            owner.stop(&mut problems)?;
        }
        self.reader.stop(&mut problems)?;
        Ok(problems)
    }

    /// The next step, `None` after the last one.
    ///
    /// # Errors
    /// A process failed; what is merely not as it must be is in the step.
    pub fn next_step(&mut self) -> Result<Option<Step>> {
        self.next += 1;
        let mut step = match self.next {
            1 => self.store()?,
            2 => self.load()?,
            3 => self.evict()?,
            4 => self.churn()?,
            5 => self.kill()?,
            6 => self.restart()?,
            _ => return Ok(None),
        };
        let name = self.transport.name();
        if let Some(other) = step.traffic.0.keys().find(|used| *used != name) {
            step.problems.push(format!("blocks came over {other} instead of {name}"));
        }
        Ok(Some(step))
    }

    fn all(&self) -> KeyRange {
        KeyRange { first: 0, count: self.blocks }
    }

    fn first_half(&self) -> KeyRange {
        KeyRange { first: 0, count: self.blocks / 2 }
    }

    fn owner(&mut self) -> Result<&mut Rank> {
        match &mut self.owner {
            Some(owner) => Ok(owner),
            None => bail!("the owner does not run"),
        }
    }

    /// Stores all keys at the owner; what is resident already must have been evicted before.
    fn store_all(&mut self, put: u64, step: &mut Step) -> Result<DemoReport> {
        let keys = self.all();
        let report = self.owner()?.ask(&DemoCommand::Store { keys, put })?;
        let stored = report.counts.stored;
        step.must(stored == u64::from(keys.count), || {
            format!("{stored} of {} blocks were stored; failures: {:?}", keys.count, report.counts.failures)
        });
        step.must(report.complete, || "the directory did not acknowledge the stored blocks".into());
        Ok(report)
    }

    /// Every stored key must be found.
    fn find_all(&mut self, step: &mut Step) -> Result<DemoReport> {
        let keys = self.all();
        let report = self.reader.ask(&DemoCommand::Lookup { keys })?;
        step.must(report.complete, || "the directory did not answer the lookup in full".into());
        let found = report.found;
        step.must(found == u64::from(keys.count), || format!("{found} of {} blocks were found", keys.count));
        Ok(report)
    }

    fn store(&mut self) -> Result<Step> {
        let mut step = Step::new("store", u64::from(self.blocks));
        step.is_store = true;
        let report = self.store_all(FIRST_PUT, &mut step)?;
        step.take(&report);
        step.gbps = rate(report.counts.bytes_stored, report.seconds);
        Ok(step)
    }

    fn load(&mut self) -> Result<Step> {
        let mut step = Step::new("load", u64::from(self.blocks));
        let lookup = self.find_all(&mut step)?;
        let report =
            self.reader.ask(&DemoCommand::Load { keys: self.all(), puts: (FIRST_PUT, FIRST_PUT) })?;
        step.take(&report);
        step.gbps = rate(report.counts.bytes_loaded, report.seconds);
        step.note = format!("one lookup of {} keys took {} us", self.blocks, lookup.max_us);
        let (loaded, blocks) = (report.counts.loaded, u64::from(self.blocks));
        step.must(loaded == blocks, || {
            format!("{loaded} of {blocks} blocks were loaded; failures: {:?}", report.counts.failures)
        });
        Ok(step)
    }

    /// The owner evicts half of what the reader has just found, and overwrites the slots with other blocks.
    fn evict(&mut self) -> Result<Step> {
        let mut step = Step::new("evict", u64::from(self.blocks));
        let half = self.first_half();
        self.find_all(&mut step)?;
        let evicted = self.owner()?.ask(&DemoCommand::Evict { keys: half })?.found;
        step.must(evicted == u64::from(half.count), || {
            format!("{evicted} of {} blocks were evicted", half.count)
        });
        let others = KeyRange { first: OTHER_KEYS_FIRST, count: half.count };
        let stored = self.owner()?.ask(&DemoCommand::Store { keys: others, put: OTHER_PUT })?;
        step.must(stored.counts.stored == u64::from(half.count), || {
            format!("only {} other blocks were stored: {:?}", stored.counts.stored, stored.counts.failures)
        });
        let report =
            self.reader.ask(&DemoCommand::Load { keys: self.all(), puts: (FIRST_PUT, FIRST_PUT) })?;
        step.take(&report);
        let counts = &report.counts;
        let kept = u64::from(self.blocks - half.count);
        step.note = format!(
            "A evicted {evicted} blocks after B had found them and overwrote their slots: {} came back as misses \
             ({} stale), the other {} right",
            counts.missed + counts.stale,
            counts.stale,
            counts.loaded
        );
        step.must(counts.loaded == kept && counts.missed + counts.stale == u64::from(half.count), || {
            format!(
                "of {} evicted and {kept} kept blocks {} were misses and {} right; failures: {:?}",
                half.count,
                counts.missed + counts.stale,
                counts.loaded,
                counts.failures
            )
        });
        Ok(step)
    }

    /// The owner evicts and overwrites all the time while the reader loads.
    fn churn(&mut self) -> Result<Step> {
        let half = self.first_half();
        let duration_ms = micros(limits::DEMO_CHURN) / 1000;
        self.owner()?.send(&DemoCommand::Churn { keys: half, first_put: CHURN_PUT, duration_ms })?;
        self.reader.send(&DemoCommand::LoadLoop {
            keys: half,
            puts: (FIRST_PUT, KILL_PUT - 1),
            until_failure: false,
            duration_ms,
        })?;
        self.loop_started()?;
        let report = self.reader.report(limits::DEMO_CHURN)?;
        let owner = self.owner()?.report(limits::DEMO_CHURN)?;
        let mut step = Step::new("overwrite", report.counts.load_outcomes());
        step.take(&report);
        let counts = &report.counts;
        step.note = format!(
            "while A stored {} blocks over each other, B loaded {} right ones of puts {}, {} were misses ({} stale)",
            owner.counts.stored,
            counts.loaded,
            report.puts_seen.map_or_else(|| "-".into(), |(least, most)| format!("{least} to {most}")),
            counts.missed + counts.stale,
            counts.stale
        );
        step.must(counts.failed == 0, || format!("blocks failed: {:?}", counts.failures));
        step.must(owner.counts.failed == 0, || format!("stores failed: {:?}", owner.counts.failures));
        step.must(owner.counts.stored > 0 && counts.load_outcomes() > 0, || "nothing happened".into());
        if let Some((_, most)) = report.puts_seen {
            step.must(most <= owner.last_put, || format!("put {most} was read before it was stored"));
        }
        Ok(step)
    }

    /// The owner is killed while the reader loads.
    fn kill(&mut self) -> Result<Step> {
        let keys = self.all();
        let mut step = Step::new("kill", 0);
        let others = KeyRange { first: OTHER_KEYS_FIRST, count: self.blocks / 2 };
        self.owner()?.ask(&DemoCommand::Evict { keys: others })?;
        self.owner()?.ask(&DemoCommand::Evict { keys })?;
        self.store_all(KILL_PUT, &mut step)?;
        self.find_all(&mut step)?;
        self.reader.send(&DemoCommand::LoadLoop {
            keys,
            puts: (KILL_PUT, KILL_PUT),
            until_failure: true,
            duration_ms: micros(limits::DEMO_KILL_NOTICE) / 1000,
        })?;
        self.loop_started()?;
        std::thread::sleep(limits::DEMO_KILL_AFTER);
        if let Some(mut owner) = self.owner.take() {
            owner.child.kill()?;
        }
        let during = self.reader.report(limits::DEMO_KILL_NOTICE)?;
        step.take(&during);
        // Whatever was in flight: now every single block is asked for once more.
        let after = self.reader.ask(&DemoCommand::Load { keys, puts: (KILL_PUT, KILL_PUT) })?;
        step.take(&after);
        step.blocks = step.counts.load_outcomes();
        let bound = limits::DEMO_DEADLINE + self.drain() + limits::DEMO_FINAL_SLACK;
        let longest = during.max_us.max(after.max_us);
        step.note = format!(
            "A was killed while B loaded: {} blocks right, {} not loaded; then of all {} blocks {} right, {} not \
             loaded; longest job {} ms (deadline {} ms, drain {} ms)",
            during.counts.loaded,
            during.counts.load_outcomes() - during.counts.loaded,
            keys.count,
            after.counts.loaded,
            after.counts.load_outcomes() - after.counts.loaded,
            longest / 1000,
            limits::DEMO_DEADLINE.as_millis(),
            self.drain().as_millis()
        );
        step.must(after.counts.load_outcomes() == u64::from(keys.count), || {
            format!("{} of {} blocks have an outcome", after.counts.load_outcomes(), keys.count)
        });
        step.must(during.counts.load_outcomes() > during.counts.loaded, || {
            "no load noticed that the owner was killed".into()
        });
        step.must(Duration::from_micros(longest) <= bound, || {
            format!("a job took {} ms, longer than deadline and drain bound allow", longest / 1000)
        });
        Ok(step)
    }

    /// The owner starts again under its name: another life, other content under the same keys.
    fn restart(&mut self) -> Result<Step> {
        let keys = self.all();
        let mut step = Step::new("restart", u64::from(keys.count));
        let owner = Rank::start(&self.owner_settings, self.blocks)?;
        let incarnation = owner.incarnation;
        let earlier = std::mem::replace(&mut self.incarnation, incarnation);
        self.owner = Some(owner);
        step.must(incarnation != earlier, || format!("incarnation {incarnation:016x} was used twice"));
        let started = Instant::now();
        self.store_all(RESTART_PUT, &mut step)?;
        self.find_all(&mut step)?;
        // The reader leaves a peer that failed alone for a moment; loads fail until then, and are tried again.
        let mut attempts = 0;
        let report = loop {
            let report = self.reader.ask(&DemoCommand::Load { keys, puts: (RESTART_PUT, RESTART_PUT) })?;
            attempts += 1;
            let all = report.counts.loaded == u64::from(keys.count);
            if all || report.counts.wrong_bytes > 0 || started.elapsed() >= limits::DEMO_RESTART {
                break report;
            }
            std::thread::sleep(Duration::from_millis(100));
        };
        step.take(&report);
        step.gbps = rate(report.counts.bytes_loaded, report.seconds);
        step.note = format!(
            "A serves again as incarnation {incarnation:016x}, with other content under the same keys ({attempts} \
             attempts, {} ms)",
            started.elapsed().as_millis()
        );
        let loaded = report.counts.loaded;
        step.must(loaded == u64::from(keys.count), || {
            format!("{loaded} of {} blocks were loaded; failures: {:?}", keys.count, report.counts.failures)
        });
        Ok(step)
    }

    fn loop_started(&mut self) -> Result<()> {
        match next_event(&mut self.reader.child, &self.reader.events, limits::CHILD_COMMAND_SLACK)? {
            ChildEvent::LoopStarted => Ok(()),
            other => bail!("rank {:?} said {other:?} instead of loading", self.reader.child.name()),
        }
    }

    fn drain(&self) -> Duration {
        match self.transport {
            TransportArg::Shm => DRAIN_SHM,
            _ => DRAIN_TCP,
        }
    }
}

#[allow(clippy::cast_precision_loss)] // A rate needs no more than 53 bits.
fn rate(bytes: u64, seconds: f64) -> Option<f64> {
    (seconds > 0.0).then(|| bytes as f64 / 1e9 / seconds)
}
