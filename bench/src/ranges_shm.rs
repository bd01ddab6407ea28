//! `ranges --transport shm`: reads through the shared-memory transport against a plain memcpy of the same scatter list.
//!
//! The owner is another process: this program started again with its own arguments and [`OWNER_SOCKET`] set, which makes
//! [`run`] serve instead of measure until its standard input closes. Windows of both sides alternate, each with its
//! destination wiped before and every byte compared after; figures are medians of the windows.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use kvfabric_core::word::{accept, Expected, Word};
use kvfabric_core::{Generation, Tag};
use kvfabric_memory::{OwnerMemory, PoolConfig, RawWord, Region, ScatterList, Slab};
use kvfabric_transport_api::{Event, OpToken, PeerKey, PeerTarget, Provider, ReadDone, ReadOp};
use kvfabric_transport_shm::{ShmProvider, ShmServer};
use serde::Serialize;

/// Environment variable that turns [`run`] into the owner process; its value is the socket's path.
const OWNER_SOCKET: &str = "KVFABRIC_BENCH_SHM_OWNER";
/// Identity of the owner process; this program talks to nobody else.
const INCARNATION: u64 = 0x6b76_6661_6272_6963;
/// Longest wait for the owner process or for one read.
const PATIENCE: Duration = Duration::from_secs(60);
const WIPE: u8 = 0xee;
/// Of objects below this size only one in several is timed, on both sides: reading the clock takes as long as copying
/// 1 KiB.
const TIMED_BYTES_MIN: u64 = 64 << 10;

/// What to measure.
#[derive(Clone, Debug)]
pub struct RangesOptions {
    /// Bytes on each side, one row group each.
    pub working_sets_bytes: Vec<u64>,
    /// (bytes of a range, ranges of an object) pairs.
    pub shapes: Vec<(u64, u64)>,
    /// Reads in flight.
    pub depth: usize,
    /// Windows of each side in each row.
    pub rounds: usize,
    /// Shortest window; one pass over the working set at least.
    pub window: Duration,
}

impl Default for RangesOptions {
    fn default() -> Self {
        Self {
            working_sets_bytes: vec![1 << 20, 16 << 20, 256 << 20],
            shapes: vec![(4 << 10, 1), (4 << 10, 64), (64 << 10, 16), (256 << 10, 4), (1 << 20, 4)],
            depth: 1,
            rounds: 5,
            window: Duration::from_millis(60),
        }
    }
}

/// The side that runs beside.
#[derive(Clone, Debug, Serialize)]
pub struct Baseline {
    /// What it is.
    pub name: &'static str,
    /// 10^9 bytes a second.
    pub gbps: f64,
    /// Nanoseconds for a range.
    pub ns_per_range: f64,
    /// Median of an object's time, microseconds.
    pub p50_us: f64,
    /// CPU seconds for 10^9 bytes.
    pub cpu_s_per_gb: f64,
}

/// One line of results.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Always `ranges`.
    pub bench: &'static str,
    /// Always `shm`.
    pub transport: &'static str,
    /// Always `read`.
    pub op: &'static str,
    /// Whether landed bytes were hashed and compared with the word's checksum: `off` or `always`.
    pub verify: &'static str,
    /// Bytes on each side.
    pub working_set_bytes: u64,
    /// Bytes of a range.
    pub range_bytes: u64,
    /// Ranges of an object, which is what one operation reads.
    pub ranges: u64,
    /// Operations in flight.
    pub depth: usize,
    /// 10^9 bytes a second.
    pub gbps: f64,
    /// Operations a second.
    pub ops_per_s: f64,
    /// Nanoseconds for a range.
    pub ns_per_range: f64,
    /// Median of an operation's time from post to event, microseconds.
    pub p50_us: f64,
    /// 99th percentile of the same, microseconds.
    pub p99_us: f64,
    /// CPU seconds of the reading thread for 10^9 bytes.
    pub cpu_s_per_gb: f64,
    /// Whether every byte of every window was compared and right; a wrong one ends the run with an error instead.
    pub verified: bool,
    /// The plain copy.
    pub baseline: Baseline,
    /// Ours divided by the baseline's.
    pub ratio_gbps: f64,
    /// Ours divided by the baseline's.
    pub ratio_p50: f64,
    /// Ours divided by the baseline's.
    pub ratio_cpu: f64,
    /// Our time for a range beyond 1.25 times the baseline's, nanoseconds; the target is at most 40.
    pub ns_per_range_over_1_25: f64,
}

/// Measures and hands each row to `emit`. In the owner process it serves, and returns when that is over.
///
/// # Errors
/// Anything that keeps a row from being measured, wrong bytes above all.
pub fn run(options: &RangesOptions, emit: &mut dyn FnMut(&Row) -> Result<()>) -> Result<()> {
    if let Some(path) = std::env::var_os(OWNER_SOCKET) {
        return serve(options, Path::new(&path));
    }
    ensure!(options.rounds > 0 && options.depth > 0, "rounds and depth must be at least 1");
    let plans = plans(options)?;
    let mut owner = OwnerProcess::start()?;
    let mut provider = ShmProvider::new().context("make a provider")?;
    let peer = PeerKey(1);
    connect(&mut provider, peer, owner.socket())?;
    for plan in &plans {
        let mut bed = TestBed::new(plan, options)?;
        for verify in [false, true] {
            emit(&bed.measure(&mut provider, peer, verify)?)?;
        }
    }
    provider.disconnect(peer);
    owner.stop()
}

/// Prints rows as JSON lines or as a table.
///
/// # Errors
/// As [`run`].
pub fn run_and_print(options: &RangesOptions, json: bool) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let mut first = true;
    run(options, &mut |row| {
        if json {
            serde_json::to_writer(&mut out, row)?;
            writeln!(out)?;
        } else {
            if std::mem::take(&mut first) {
                writeln!(
                    out,
                    "{:>9} {:>9} {:>6} {:>7} {:>8} {:>8} {:>6} {:>9} {:>9} {:>8} {:>8} {:>6}",
                    "set KiB",
                    "range KiB",
                    "ranges",
                    "verify",
                    "GB/s",
                    "memcpy",
                    "ratio",
                    "ns/range",
                    "memcpy",
                    "p50 us",
                    "p99 us",
                    "cpu"
                )?;
            }
            writeln!(
                out,
                "{:>9} {:>9} {:>6} {:>7} {:>8.2} {:>8.2} {:>6.2} {:>9.0} {:>9.0} {:>8.1} {:>8.1} {:>6.2}",
                row.working_set_bytes >> 10,
                row.range_bytes >> 10,
                row.ranges,
                row.verify,
                row.gbps,
                row.baseline.gbps,
                row.ratio_gbps,
                row.ns_per_range,
                row.baseline.ns_per_range,
                row.p50_us,
                row.p99_us,
                row.ratio_cpu
            )?;
        }
        out.flush()?;
        Ok(())
    })
}

/// One shape with one working set, and where its slots lie at the owner.
#[derive(Clone, Copy, Debug)]
struct Plan {
    working_set_bytes: u64,
    range_bytes: u64,
    ranges: u64,
    slab: Slab,
}

impl Plan {
    fn object_bytes(&self) -> u64 {
        self.slab.object_bytes
    }

    /// One in so many objects is timed.
    fn timed_interval(&self) -> usize {
        usize::try_from(TIMED_BYTES_MIN / self.object_bytes()).unwrap_or(1).max(1)
    }
}

/// Both processes derive the same plans from the same options.
fn plans(options: &RangesOptions) -> Result<Vec<Plan>> {
    let mut plans = Vec::new();
    let (mut first_slot, mut base_offset) = (0u32, 0u64);
    for &working_set_bytes in &options.working_sets_bytes {
        for &(range_bytes, ranges) in &options.shapes {
            ensure!(range_bytes > 0 && ranges > 0, "ranges need a size and a number");
            ensure!(range_bytes % 8 == 0, "a range of {range_bytes} bytes is not a multiple of 8");
            ensure!(range_bytes <= working_set_bytes, "a range is larger than its working set");
            let ranges = ranges.min(working_set_bytes / range_bytes);
            let object_bytes = range_bytes * ranges;
            let slots = u32::try_from(working_set_bytes / object_bytes)?;
            let slab = Slab { layout: 1, group_id: 0, object_bytes, first_slot, slots, base_offset };
            plans.push(Plan { working_set_bytes, range_bytes, ranges, slab });
            first_slot += slots;
            base_offset = slab.end_offset().context("a plan larger than the address space")?;
            base_offset = base_offset.next_multiple_of(2 << 20);
        }
    }
    Ok(plans)
}

/// The 8 bytes at `offset` of a slot's object.
fn content(slot: u32, offset: u64) -> [u8; 8] {
    let mut value = (u64::from(slot) << 32) ^ offset;
    value = (value ^ (value >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    value = (value ^ (value >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    (value ^ (value >> 33)).to_le_bytes()
}

fn write_content(slot: u32, start: u64, bytes: &mut [u8]) {
    for (chunk, offset) in bytes.chunks_exact_mut(8).zip((start..).step_by(8)) {
        chunk.copy_from_slice(&content(slot, offset));
    }
}

/// The word that the owner published for a slot, but for its checksum.
fn expected(slot: u32) -> Expected {
    Expected { generation: Generation(u64::from(slot) + 1), tag: Tag(u64::from(slot) * 2 + 1) }
}

/// The owner process: fills a pool, serves it, and ends when its standard input does.
fn serve(options: &RangesOptions, path: &Path) -> Result<()> {
    let plans = plans(options)?;
    let last = plans.last().context("nothing to measure")?;
    let capacity_bytes = last.slab.end_offset().context("too large")?;
    let word_slots = last.slab.first_slot + last.slab.slots;
    let memory = OwnerMemory::create(&PoolConfig::new(capacity_bytes, word_slots))?;
    memory.allocate_extent(0, capacity_bytes)?;
    let never = AtomicBool::new(false);
    for plan in &plans {
        memory.add_slab(plan.slab)?;
        let object = Region::allocate(usize::try_from(plan.object_bytes())?)?;
        let source = ScatterList::whole(&object);
        let mut bytes = vec![0; object.length_bytes()];
        for slot in plan.slab.first_slot..plan.slab.first_slot + plan.slab.slots {
            write_content(slot, 0, &mut bytes);
            object.write(0, &bytes)?;
            let Expected { generation, tag } = expected(slot);
            memory.invalidate(slot, generation.0)?;
            let check = memory.fill(slot, &source, true, &never)?;
            let word = RawWord { generation: generation.0, tag: tag.0, check, reserved: 0 };
            ensure!(memory.publish(slot, word)?, "slot {slot} was not published");
        }
    }
    let _server = ShmServer::start(path, memory, INCARNATION)?;
    let mut out = std::io::stdout();
    writeln!(out, "ready")?;
    out.flush()?;
    // Ends with the measuring process, however that ends.
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// The owner process as its starter sees it.
struct OwnerProcess {
    child: Child,
    directory: PathBuf,
    socket: PathBuf,
}

impl OwnerProcess {
    fn start() -> Result<Self> {
        let directory = std::env::temp_dir().join(format!("kvfabric-bench-{}", std::process::id()));
        std::fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
        let socket = directory.join("owner.sock");
        let mut child = Command::new(std::env::current_exe()?)
            .args(std::env::args_os().skip(1))
            .env(OWNER_SOCKET, &socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start the owner process")?;
        let stdout = child.stdout.take().context("the owner's output")?;
        let owner = Self { child, directory, socket };
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        ensure!(line.trim() == "ready", "the owner process did not start");
        Ok(owner)
    }

    fn socket(&self) -> &Path {
        &self.socket
    }

    fn stop(&mut self) -> Result<()> {
        drop(self.child.stdin.take());
        let status = self.child.wait()?;
        ensure!(status.success(), "the owner process failed: {status}");
        Ok(())
    }
}

impl Drop for OwnerProcess {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn connect(provider: &mut ShmProvider, peer: PeerKey, socket: &Path) -> Result<()> {
    let unix_path = Some(socket.to_str().context("the temporary directory's name is not UTF-8")?.to_owned());
    provider.connect(peer, PeerTarget { incarnation: INCARNATION, unix_path, ..PeerTarget::default() });
    let start = Instant::now();
    let mut events = Vec::new();
    while start.elapsed() < PATIENCE {
        provider.poll(&mut events);
        match events.pop() {
            Some(Event::Connected { .. }) => return Ok(()),
            Some(Event::ConnectFailed { error, .. }) => return Err(error.into()),
            Some(other) => bail!("unexpected event while connecting: {other:?}"),
            None => {}
        }
        provider.wait(Duration::from_millis(10));
    }
    bail!("no connection to the owner process within {PATIENCE:?}")
}

/// One side's figures in one window.
#[derive(Clone, Copy, Debug)]
struct Window {
    bytes_per_s: f64,
    cpu_s_per_byte: f64,
}

/// Source, destination and order of one plan.
struct TestBed<'a> {
    plan: &'a Plan,
    options: &'a RangesOptions,
    /// Ours: the ranges of each object scattered over one region.
    region: Region,
    lists: Vec<Option<ScatterList>>,
    /// The baseline's: two private buffers of the same size and the same places.
    source: Vec<u8>,
    destination: Vec<u8>,
    /// Where range `i` of all objects, in order, goes.
    places: Vec<usize>,
    /// The order in which objects are read.
    order: Vec<usize>,
}

impl<'a> TestBed<'a> {
    fn new(plan: &'a Plan, options: &'a RangesOptions) -> Result<Self> {
        let objects = plan.slab.slots as usize;
        let range_bytes = usize::try_from(plan.range_bytes)?;
        let ranges = usize::try_from(plan.ranges)?;
        let bytes = objects * ranges * range_bytes;
        let mut random = Random(plan.working_set_bytes ^ plan.range_bytes);
        let places: Vec<usize> =
            random.permutation(objects * ranges).into_iter().map(|place| place * range_bytes).collect();
        let order = random.permutation(objects);
        let region = Region::allocate(bytes)?;
        let mut lists = Vec::with_capacity(objects);
        for object in places.chunks_exact(ranges) {
            let mut list = ScatterList::with_capacity(ranges);
            for &place in object {
                list.push(&region, place, range_bytes)?;
            }
            lists.push(Some(list));
        }
        let mut source = vec![0; bytes];
        for (slot, object) in (plan.slab.first_slot..).zip(source.chunks_exact_mut(ranges * range_bytes)) {
            write_content(slot, 0, object);
        }
        Ok(Self { plan, options, region, lists, source, destination: vec![0; bytes], places, order })
    }

    fn measure(&mut self, provider: &mut ShmProvider, peer: PeerKey, verify: bool) -> Result<Row> {
        let (mut ours, mut plain) = (Vec::new(), Vec::new());
        let mut our_times = hdrhistogram::Histogram::<u64>::new_with_bounds(1, 60_000_000_000, 3)?;
        let mut plain_times = hdrhistogram::Histogram::<u64>::new_with_bounds(1, 60_000_000_000, 3)?;
        // One window of each warms caches and page tables and does not count.
        for round in 0..=self.options.rounds {
            if round == 1 {
                our_times.reset();
                plain_times.reset();
            }
            self.region.fill(0, self.region.length_bytes(), WIPE)?;
            let window = self.our_window(provider, peer, verify, &mut our_times)?;
            self.check_ours()?;
            ours.push(window);
            self.destination.fill(WIPE);
            let window = self.plain_window(&mut plain_times)?;
            self.check_plain()?;
            plain.push(window);
        }
        let (ours, plain) = (median(ours.split_off(1)), median(plain.split_off(1)));
        Ok(self.row(verify, ours, plain, &our_times, &plain_times))
    }

    fn row(
        &self,
        verify: bool,
        ours: Window,
        plain: Window,
        our_times: &hdrhistogram::Histogram<u64>,
        plain_times: &hdrhistogram::Histogram<u64>,
    ) -> Row {
        let us = |times: &hdrhistogram::Histogram<u64>, quantile| {
            Duration::from_nanos(times.value_at_quantile(quantile)).as_secs_f64() * 1e6
        };
        let range_bytes = f64_of(self.plan.range_bytes);
        let baseline = Baseline {
            name: "memcpy",
            gbps: plain.bytes_per_s / 1e9,
            ns_per_range: range_bytes / plain.bytes_per_s * 1e9,
            p50_us: us(plain_times, 0.5),
            cpu_s_per_gb: plain.cpu_s_per_byte * 1e9,
        };
        let ns_per_range = range_bytes / ours.bytes_per_s * 1e9;
        let p50_us = us(our_times, 0.5);
        Row {
            bench: "ranges",
            transport: "shm",
            op: "read",
            verify: if verify { "always" } else { "off" },
            working_set_bytes: self.plan.working_set_bytes,
            range_bytes: self.plan.range_bytes,
            ranges: self.plan.ranges,
            depth: self.options.depth,
            gbps: ours.bytes_per_s / 1e9,
            ops_per_s: ours.bytes_per_s / f64_of(self.plan.object_bytes()),
            ns_per_range,
            p50_us,
            p99_us: us(our_times, 0.99),
            cpu_s_per_gb: ours.cpu_s_per_byte * 1e9,
            verified: true,
            ratio_gbps: ours.bytes_per_s / plain.bytes_per_s,
            ratio_p50: p50_us / baseline.p50_us,
            ratio_cpu: ours.cpu_s_per_byte / plain.cpu_s_per_byte,
            ns_per_range_over_1_25: ns_per_range - 1.25 * baseline.ns_per_range,
            baseline,
        }
    }

    /// Reads every object at least once, until the window is over.
    fn our_window(
        &mut self,
        provider: &mut ShmProvider,
        peer: PeerKey,
        verify: bool,
        times: &mut hdrhistogram::Histogram<u64>,
    ) -> Result<Window> {
        let interval = self.plan.timed_interval();
        let mut posted: VecDeque<Option<Instant>> = VecDeque::with_capacity(self.options.depth);
        let mut events = Vec::with_capacity(self.options.depth + 1);
        let (mut next, mut done) = (0usize, 0usize);
        let objects = self.order.len();
        let mut over = false;
        let (start, cpu) = (Instant::now(), thread_cpu());
        loop {
            if next % interval == 0 {
                over = next >= objects && start.elapsed() >= self.options.window;
            }
            while !over && posted.len() < self.options.depth {
                let Some(object) = self.order.get(next % objects).copied() else { break };
                let Some(destination) = self.lists.get_mut(object).and_then(Option::take) else { break };
                let op = ReadOp {
                    token: OpToken(object as u64),
                    slot: self.plan.slab.first_slot + u32::try_from(object)?,
                    object_bytes: self.plan.object_bytes(),
                    object_offset: 0,
                    destination,
                    checksum: verify,
                };
                posted.push_back((next % interval == 0).then(Instant::now));
                provider.post(peer, op)?;
                next += 1;
            }
            if posted.is_empty() {
                break;
            }
            provider.poll(&mut events);
            for event in events.drain(..) {
                let Event::Read(read) = event else { bail!("unexpected event: {event:?}") };
                if let Some(Some(at)) = posted.pop_front() {
                    times.saturating_record(u64::try_from(at.elapsed().as_nanos()).unwrap_or(u64::MAX));
                }
                self.accept(read, verify)?;
                done += 1;
            }
        }
        Ok(window(start, cpu, done, self.plan.object_bytes()))
    }

    /// The word decides, as in a load (rule R3).
    fn accept(&mut self, read: ReadDone, verify: bool) -> Result<()> {
        let object = usize::try_from(read.token.0)?;
        let landed = read.outcome?;
        let word = Word {
            generation: Generation(landed.word.generation),
            tag: Tag(landed.word.tag),
            check: landed.word.check,
        };
        ensure!(landed.check.is_some() == verify && word.check != 0, "no checksum to compare");
        accept(expected(self.plan.slab.first_slot + u32::try_from(object)?), word, landed.check)?;
        if let Some(list) = self.lists.get_mut(object) {
            *list = Some(read.destination);
        }
        Ok(())
    }

    /// The same ranges to the same places, by the standard library's copy.
    fn plain_window(&mut self, times: &mut hdrhistogram::Histogram<u64>) -> Result<Window> {
        let range_bytes = usize::try_from(self.plan.range_bytes)?;
        let ranges = usize::try_from(self.plan.ranges)?;
        let objects = self.order.len();
        let interval = self.plan.timed_interval();
        let mut done = 0usize;
        let (start, cpu) = (Instant::now(), thread_cpu());
        while done < objects || done % interval != 0 || start.elapsed() < self.options.window {
            let at = (done % interval == 0).then(Instant::now);
            let object = self.order[done % objects];
            for range in object * ranges..(object + 1) * ranges {
                let place = self.places[range];
                let from = range * range_bytes;
                self.destination[place..place + range_bytes]
                    .copy_from_slice(&self.source[from..from + range_bytes]);
            }
            if let Some(at) = at {
                times.saturating_record(u64::try_from(at.elapsed().as_nanos()).unwrap_or(u64::MAX));
            }
            done += 1;
        }
        Ok(window(start, cpu, done, self.plan.object_bytes()))
    }

    fn check_ours(&self) -> Result<()> {
        let mut bytes = vec![0; usize::try_from(self.plan.range_bytes)?];
        for (range, &place) in self.places.iter().enumerate() {
            self.region.read(place, &mut bytes)?;
            self.check_range(range, &bytes)?;
        }
        Ok(())
    }

    fn check_plain(&self) -> Result<()> {
        let range_bytes = usize::try_from(self.plan.range_bytes)?;
        for (range, &place) in self.places.iter().enumerate() {
            self.check_range(range, &self.destination[place..place + range_bytes])?;
        }
        Ok(())
    }

    fn check_range(&self, range: usize, bytes: &[u8]) -> Result<()> {
        let object = range as u64 / self.plan.ranges;
        let slot = self.plan.slab.first_slot + u32::try_from(object)?;
        let start = (range as u64 % self.plan.ranges) * self.plan.range_bytes;
        for (chunk, offset) in bytes.chunks_exact(8).zip((start..).step_by(8)) {
            ensure!(chunk == content(slot, offset), "wrong bytes in slot {slot} at offset {offset}");
        }
        Ok(())
    }
}

fn window(start: Instant, cpu: Duration, objects: usize, object_bytes: u64) -> Window {
    let bytes = f64_of(objects as u64 * object_bytes);
    let cpu = thread_cpu().saturating_sub(cpu);
    Window { bytes_per_s: bytes / start.elapsed().as_secs_f64(), cpu_s_per_byte: cpu.as_secs_f64() / bytes }
}

fn median(mut windows: Vec<Window>) -> Window {
    let middle = windows.len() / 2;
    windows.sort_by(|a, b| a.bytes_per_s.total_cmp(&b.bytes_per_s));
    let bytes_per_s = windows[middle].bytes_per_s;
    windows.sort_by(|a, b| a.cpu_s_per_byte.total_cmp(&b.cpu_s_per_byte));
    Window { bytes_per_s, cpu_s_per_byte: windows[middle].cpu_s_per_byte }
}

fn thread_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

#[allow(clippy::cast_precision_loss)] // Figures for people; 53 bits are plenty.
fn f64_of(value: u64) -> f64 {
    value as f64
}

/// SplitMix64: repeatable places and order.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    fn permutation(&mut self, length: usize) -> Vec<usize> {
        let mut items: Vec<usize> = (0..length).collect();
        for at in (1..length).rev() {
            let other = usize::try_from(self.next() % (at as u64 + 1)).unwrap_or(0);
            items.swap(at, other);
        }
        items
    }
}
