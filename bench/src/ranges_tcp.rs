//! `ranges --transport tcp`: reads of scattered objects through the tcp transport, beside a bare socket pair that moves
//! the same scatter lists with `readv` and `write`.
//!
//! The owner, and the bare sender, live in one child process. Windows of both sides alternate, so that both meet the
//! same machine; medians are compared. Every byte that the last operations of a window landed is compared with what it
//! must be; with verification on, every object's checksum is compared as well.

use std::io::{BufRead, BufReader, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use hdrhistogram::Histogram;
use kvfabric_memory::{OwnerMemory, PoolConfig, RawWord, Region, ScatterList, Slab};
use kvfabric_transport_api::{Event, OpToken, PeerKey, PeerTarget, Provider, ReadDone, ReadOp};
use kvfabric_transport_tcp::{ProviderOptions, ServerOptions, TcpProvider, TcpServer, TokenStore};
use rustix::time::{clock_gettime, ClockId};
use serde::{Deserialize, Serialize};
use serde_json::{json, Value};

/// Hidden subcommand under which the binary runs the child; the rest of its arguments go to [`serve_child`].
pub const CHILD_COMMAND: &str = "__ranges-tcp-child";

/// Objects in each pool: one byte names one.
const SLOTS: u32 = 64;
/// Destinations that operations take in turn.
const BLOCKS: usize = 16;
const GENERATION: u64 = 1;
const TAG: u64 = 7;
const INCARNATION: u64 = 0x6b76_6661_6272_6963;
const PAGE_BYTES: usize = 4096;
/// No window waits longer than this for one operation.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(30);

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Length of a window, seconds.
    pub seconds: f64,
    /// Windows of each side and row.
    pub rounds: usize,
    /// Objects in flight in bandwidth rows.
    pub depth: usize,
    /// Connections to the owner.
    pub connections: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { seconds: 0.1, rounds: 15, depth: 4, connections: 1 }
    }
}

/// One row's shape.
#[derive(Clone, Copy, Debug)]
struct Shape {
    range_bytes: usize,
    ranges: usize,
    depth: usize,
    checksum: bool,
    /// The caller spins, as a latency-bound one does; otherwise it sleeps when there is nothing to do.
    spin: bool,
}

impl Shape {
    fn object_bytes(&self) -> usize {
        self.range_bytes * self.ranges
    }
}

/// What a window came to.
#[derive(Clone, Debug)]
struct Window {
    bytes: u64,
    objects: u64,
    seconds: f64,
    cpu_seconds: f64,
    latency_ns: Histogram<u64>,
}

impl Window {
    fn new() -> Result<Self> {
        let latency_ns = Histogram::new(3)?;
        Ok(Self { bytes: 0, objects: 0, seconds: 0.0, cpu_seconds: 0.0, latency_ns })
    }

    fn gbps(&self) -> f64 {
        self.bytes as f64 / self.seconds / 1e9
    }

    fn cpu_s_per_gb(&self) -> f64 {
        self.cpu_seconds / (self.bytes as f64 / 1e9)
    }

    fn quantile_us(&self, quantile: f64) -> f64 {
        self.latency_ns.value_at_quantile(quantile) as f64 / 1e3
    }
}

fn median(windows: &[Window], value: impl Fn(&Window) -> f64) -> f64 {
    let mut values: Vec<f64> = windows.iter().map(value).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Runs all rows and hands each to `report` as one JSON object.
///
/// # Errors
/// When the child cannot run, an operation fails, or a byte is wrong.
pub fn run(options: &Options, report: &mut dyn FnMut(Value)) -> Result<()> {
    let mut shapes = Vec::new();
    for checksum in [false, true] {
        for (range_bytes, ranges) in [(4 << 10, 128), (64 << 10, 16), (1 << 20, 1)] {
            shapes.push(Shape { range_bytes, ranges, depth: options.depth, checksum, spin: false });
        }
    }
    shapes.push(Shape { range_bytes: 4 << 10, ranges: 1, depth: 1, checksum: false, spin: true });
    for shape in shapes {
        report(run_shape(options, shape)?);
    }
    Ok(())
}

fn run_shape(options: &Options, shape: Shape) -> Result<Value> {
    let mut child = ChildProcess::start(shape)?;
    let mut ours = Ours::connect(&child.hello, shape, options.connections)?;
    let mut bare = Bare::connect(&child.hello, shape)?;
    let window = Duration::from_secs_f64(options.seconds);
    // A first window of each warms caches, buffers and the congestion window, and is thrown away.
    ours.window(window, &mut child)?;
    bare.window(window, &mut child)?;
    let (mut our_windows, mut bare_windows) = (Vec::new(), Vec::new());
    let mut verified = 0;
    for _ in 0..options.rounds.max(1) {
        our_windows.push(ours.window(window, &mut child)?);
        verified += ours.verify()?;
        bare_windows.push(bare.window(window, &mut child)?);
        bare.verify()?;
    }
    child.stop()?;
    Ok(row(shape, &our_windows, &bare_windows, verified))
}

fn row(shape: Shape, ours: &[Window], bare: &[Window], verified: u64) -> Value {
    let pair = |value: &dyn Fn(&Window) -> f64| (median(ours, value), median(bare, value));
    let (gbps, bare_gbps) = pair(&Window::gbps);
    let (cpu, bare_cpu) = pair(&Window::cpu_s_per_gb);
    let (p50, bare_p50) = pair(&|w| w.quantile_us(0.5));
    let (p99, _) = pair(&|w| w.quantile_us(0.99));
    let ops = median(ours, |w| w.objects as f64 / w.seconds);
    json!({
        "bench": "ranges", "transport": "tcp", "op": "read",
        "range_bytes": shape.range_bytes, "ranges": shape.ranges, "depth": shape.depth,
        "verify": if shape.checksum { "always" } else { "off" },
        "gbps": gbps, "ops_per_s": ops, "ns_per_range": 1e9 / (ops * shape.ranges as f64),
        "p50_us": p50, "p99_us": p99, "cpu_s_per_gb": cpu, "verified": verified > 0, "verified_bytes": verified,
        "baseline": { "name": "bare socket", "gbps": bare_gbps, "p50_us": bare_p50, "cpu_s_per_gb": bare_cpu },
        "ratio_gbps": gbps / bare_gbps, "ratio_p50": p50 / bare_p50, "ratio_cpu": cpu / bare_cpu,
    })
}

/// The byte at `offset` of a slot's object.
fn fill_pattern(slot: u32, offset: usize, out: &mut [u8]) {
    for (index, chunk) in out.chunks_mut(8).enumerate() {
        let line = (offset / 8 + index) as u64;
        let value = (line ^ (u64::from(slot) << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        chunk.copy_from_slice(value.to_le_bytes().get(..chunk.len()).unwrap_or_default());
    }
}

fn check_pattern(slot: u32, object: &[u8]) -> Result<u64> {
    let mut expected = vec![0; object.len()];
    fill_pattern(slot, 0, &mut expected);
    ensure!(expected == object, "wrong bytes in an object of slot {slot}");
    Ok(object.len() as u64)
}

fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[derive(Debug, Serialize, Deserialize)]
struct ChildHello {
    tcp: SocketAddr,
    bare: SocketAddr,
    tokens: Vec<[u8; 32]>,
}

/// The child as its parent sees it: addresses at the start, CPU time on demand, gone when its input closes.
struct ChildProcess {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    hello: ChildHello,
}

impl ChildProcess {
    fn start(shape: Shape) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args([CHILD_COMMAND, &shape.object_bytes().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the owner's process")?;
        let input = child.stdin.take();
        let mut output = BufReader::new(child.stdout.take().context("the child has no output")?);
        let mut line = String::new();
        output.read_line(&mut line)?;
        let hello = serde_json::from_str(&line).with_context(|| format!("the child said {line:?}"))?;
        Ok(Self { child, input, output, hello })
    }

    /// CPU seconds of both processes so far.
    fn cpu_seconds(&mut self) -> Result<f64> {
        self.input.as_mut().context("the child was stopped")?.write_all(b"cpu\n")?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(cpu_seconds() + line.trim().parse::<f64>().context("the child did not tell its CPU time")?)
    }

    fn stop(&mut self) -> Result<()> {
        self.input = None;
        let status = self.child.wait()?;
        ensure!(status.success(), "the owner's process failed: {status}");
        Ok(())
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.input = None;
        // After an error in between the child may not look at its input any more.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The child: an owner with its pool, and the bare sender. `arguments`: the size of an object.
///
/// # Errors
/// When the pool or the listeners cannot be made.
pub fn serve_child(arguments: &[String]) -> Result<()> {
    let object_bytes: usize = arguments.first().context("no object size")?.parse()?;
    let memory = owner(object_bytes)?;
    let tokens = Arc::new(TokenStore::new());
    let issued = tokens.issue(8, Instant::now(), Duration::from_secs(60))?;
    let server = TcpServer::start(
        SocketAddr::from(([127, 0, 0, 1], 0)),
        memory,
        tokens,
        INCARNATION,
        ServerOptions::default(),
    )?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let hello = ChildHello { tcp: server.local_addr(), bare: listener.local_addr()?, tokens: issued };
    std::thread::spawn(move || bare_sender(&listener, object_bytes));
    println!("{}", serde_json::to_string(&hello)?);
    for line in std::io::stdin().lock().lines() {
        match line?.as_str() {
            "cpu" => println!("{}", cpu_seconds()),
            other => bail!("the parent said {other:?}"),
        }
    }
    Ok(())
}

fn owner(object_bytes: usize) -> Result<Arc<OwnerMemory>> {
    let stride = object_bytes.next_multiple_of(64) as u64;
    let memory = OwnerMemory::create(&PoolConfig::new(stride * u64::from(SLOTS), SLOTS))?;
    memory.allocate_extent(0, stride * u64::from(SLOTS))?;
    memory.add_slab(Slab {
        layout: 1,
        group_id: 0,
        object_bytes: object_bytes as u64,
        first_slot: 0,
        slots: SLOTS,
        base_offset: 0,
    })?;
    let source = Region::allocate(object_bytes)?;
    let mut bytes = vec![0; object_bytes];
    for slot in 0..SLOTS {
        fill_pattern(slot, 0, &mut bytes);
        source.write(0, &bytes)?;
        memory.invalidate(slot, GENERATION)?;
        let check = memory.fill(slot, &ScatterList::whole(&source), true, &AtomicBool::new(false))?;
        let word = RawWord { generation: GENERATION, tag: TAG, check, reserved: 0 };
        ensure!(memory.publish(slot, word)?, "a slot was not published");
    }
    Ok(memory)
}

/// Page-aligned bytes, so that both sides copy from and to memory of the same alignment.
struct Pages {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl Pages {
    fn new(length: usize) -> Self {
        let bytes = vec![1; length + PAGE_BYTES];
        let start = bytes.as_ptr().align_offset(PAGE_BYTES).min(PAGE_BYTES);
        Self { bytes, start, length }
    }

    fn get(&mut self) -> &mut [u8] {
        self.bytes.get_mut(self.start..self.start + self.length).unwrap_or_default()
    }
}

/// For each request byte, the object that it names.
fn bare_sender(listener: &TcpListener, object_bytes: usize) -> Result<()> {
    let mut pool = Pages::new(object_bytes * SLOTS as usize);
    for (slot, object) in (0..).zip(pool.get().chunks_mut(object_bytes)) {
        fill_pattern(slot, 0, object);
    }
    let (mut socket, _) = listener.accept()?;
    socket.set_nodelay(true)?;
    let mut requests = [0; 64];
    loop {
        let count = socket.read(&mut requests)?;
        if count == 0 {
            return Ok(());
        }
        for &slot in requests.get(..count).unwrap_or_default() {
            let at = usize::from(slot) * object_bytes;
            socket.write_all(pool.get().get(at..at + object_bytes).context("no such object")?)?;
        }
    }
}

/// Our side: the provider, driven by post and poll.
struct Ours {
    provider: TcpProvider,
    peer: PeerKey,
    shape: Shape,
    region: Region,
    free: Vec<(usize, ScatterList)>,
    /// Slot and start of each operation in flight, by token.
    flights: Vec<(u32, Instant)>,
    /// What each destination holds.
    landed: Vec<Option<u32>>,
    next_slot: u32,
}

impl Ours {
    fn connect(hello: &ChildHello, shape: Shape, connections: usize) -> Result<Self> {
        let options = ProviderOptions { connections_per_peer: connections, ..Default::default() };
        let mut provider = TcpProvider::new(options)?;
        let peer = PeerKey(1);
        provider.connect(
            peer,
            PeerTarget {
                incarnation: INCARNATION,
                unix_path: None,
                tcp_address: Some(hello.tcp.to_string()),
                tcp_tokens: hello.tokens.clone(),
            },
        );
        let mut events = Vec::new();
        let started = Instant::now();
        while events.is_empty() {
            ensure!(started.elapsed() < OPERATION_TIMEOUT, "the owner does not answer");
            if !provider.poll(&mut events) {
                provider.wait(Duration::from_millis(100));
            }
        }
        match events.first() {
            Some(Event::Connected { .. }) => {}
            other => bail!("cannot connect to the owner: {other:?}"),
        }
        let region = Region::allocate(BLOCKS * shape.object_bytes())?;
        region.fill(0, region.length_bytes(), 1)?;
        let mut free = Vec::new();
        for block in 0..BLOCKS {
            let mut list = ScatterList::with_capacity(shape.ranges);
            for range in 0..shape.ranges {
                list.push(&region, (range * BLOCKS + block) * shape.range_bytes, shape.range_bytes)?;
            }
            free.push((block, list));
        }
        let flights = vec![(0, Instant::now()); BLOCKS];
        Ok(Self { provider, peer, shape, region, free, flights, landed: vec![None; BLOCKS], next_slot: 0 })
    }

    fn window(&mut self, length: Duration, child: &mut ChildProcess) -> Result<Window> {
        let mut window = Window::new()?;
        let mut events: Vec<Event> = Vec::with_capacity(64);
        let cpu_before = child.cpu_seconds()?;
        let started = Instant::now();
        let (mut in_flight, mut last) = (0, started);
        loop {
            while in_flight < self.shape.depth && last.duration_since(started) < length {
                self.post()?;
                in_flight += 1;
            }
            if in_flight == 0 {
                break;
            }
            let soon = self.provider.poll(&mut events);
            if events.is_empty() {
                if !soon && !self.shape.spin {
                    self.provider.wait(OPERATION_TIMEOUT);
                }
                continue;
            }
            last = Instant::now();
            for event in events.drain(..) {
                let Event::Read(done) = event else { bail!("unexpected: {event:?}") };
                window.latency_ns.record(self.finish(done, last)?)?;
                window.objects += 1;
                window.bytes += self.shape.object_bytes() as u64;
                in_flight -= 1;
            }
        }
        window.seconds = started.elapsed().as_secs_f64();
        window.cpu_seconds = child.cpu_seconds()? - cpu_before;
        Ok(window)
    }

    fn post(&mut self) -> Result<()> {
        let (block, destination) = self.free.pop().context("no free destination")?;
        let slot = self.next_slot;
        self.next_slot = (slot + 1) % SLOTS;
        if let Some(flight) = self.flights.get_mut(block) {
            *flight = (slot, Instant::now());
        }
        self.provider.post(
            self.peer,
            ReadOp {
                token: OpToken(block as u64),
                slot,
                object_bytes: self.shape.object_bytes() as u64,
                object_offset: 0,
                destination,
                checksum: self.shape.checksum,
            },
        )?;
        Ok(())
    }

    fn finish(&mut self, done: ReadDone, now: Instant) -> Result<u64> {
        let block = usize::try_from(done.token.0)?;
        let landed = done.outcome?;
        ensure!(landed.word.generation == GENERATION && landed.word.tag == TAG, "a wrong word");
        ensure!(landed.check.is_none_or(|check| check == landed.word.check), "a wrong checksum");
        ensure!(landed.check.is_some() == self.shape.checksum, "a checksum that was not asked for");
        let (slot, started) = *self.flights.get(block).context("unknown operation")?;
        if let Some(landed) = self.landed.get_mut(block) {
            *landed = Some(slot);
        }
        self.free.insert(0, (block, done.destination));
        Ok(u64::try_from(now.duration_since(started).as_nanos())?)
    }

    /// Compares every byte of every destination with what it must be.
    fn verify(&mut self) -> Result<u64> {
        let mut object = vec![0; self.shape.object_bytes()];
        let mut bytes = 0;
        for (block, list) in &self.free {
            if let Some(slot) = self.landed.get_mut(*block).and_then(Option::take) {
                list.read_object(&mut object)?;
                bytes += check_pattern(slot, &object)?;
            }
        }
        ensure!(bytes > 0, "nothing landed");
        self.region.fill(0, self.region.length_bytes(), 1)?;
        Ok(bytes)
    }
}

/// The bare side: request bytes out, `readv` into the same scatter lists.
struct Bare {
    socket: TcpStream,
    shape: Shape,
    arena: Pages,
    landed: Vec<Option<u32>>,
    next_block: usize,
    next_slot: u32,
}

impl Bare {
    fn connect(hello: &ChildHello, shape: Shape) -> Result<Self> {
        let socket = TcpStream::connect(hello.bare)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(OPERATION_TIMEOUT))?;
        socket.set_nonblocking(shape.spin)?;
        let arena = Pages::new(BLOCKS * shape.object_bytes());
        Ok(Self { socket, shape, arena, landed: vec![None; BLOCKS], next_block: 0, next_slot: 0 })
    }

    fn request(&mut self) -> Result<(u32, Instant)> {
        let slot = self.next_slot;
        self.next_slot = (slot + 1) % SLOTS;
        let now = Instant::now();
        self.socket.write_all(&[u8::try_from(slot)?])?;
        Ok((slot, now))
    }

    fn window(&mut self, length: Duration, child: &mut ChildProcess) -> Result<Window> {
        let mut window = Window::new()?;
        let mut flights = std::collections::VecDeque::with_capacity(self.shape.depth);
        let cpu_before = child.cpu_seconds()?;
        let started = Instant::now();
        let mut last = started;
        loop {
            while flights.len() < self.shape.depth && last.duration_since(started) < length {
                flights.push_back(self.request()?);
            }
            let Some((slot, posted)) = flights.pop_front() else { break };
            self.receive(slot)?;
            last = Instant::now();
            window.latency_ns.record(u64::try_from(last.duration_since(posted).as_nanos())?)?;
            window.objects += 1;
            window.bytes += self.shape.object_bytes() as u64;
        }
        window.seconds = started.elapsed().as_secs_f64();
        window.cpu_seconds = child.cpu_seconds()? - cpu_before;
        Ok(window)
    }

    fn receive(&mut self, slot: u32) -> Result<()> {
        let Shape { range_bytes, .. } = self.shape;
        let block = self.next_block;
        self.next_block = (block + 1) % BLOCKS;
        let mut pieces: Vec<IoSliceMut<'_>> = self
            .arena
            .get()
            .chunks_exact_mut(BLOCKS * range_bytes)
            .filter_map(|layer| layer.chunks_exact_mut(range_bytes).nth(block).map(IoSliceMut::new))
            .collect();
        let mut pieces = pieces.as_mut_slice();
        while !pieces.is_empty() {
            match self.socket.read_vectored(pieces) {
                Ok(0) => bail!("the bare sender is gone"),
                Ok(count) => IoSliceMut::advance_slices(&mut pieces, count),
                Err(error) if self.shape.spin && error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        if let Some(landed) = self.landed.get_mut(block) {
            *landed = Some(slot);
        }
        Ok(())
    }

    fn verify(&mut self) -> Result<()> {
        let Shape { range_bytes, .. } = self.shape;
        let mut object = Vec::with_capacity(self.shape.object_bytes());
        for block in 0..BLOCKS {
            let Some(slot) = self.landed.get_mut(block).and_then(Option::take) else { continue };
            object.clear();
            for layer in self.arena.get().chunks_exact(BLOCKS * range_bytes) {
                object.extend_from_slice(layer.chunks_exact(range_bytes).nth(block).unwrap_or_default());
            }
            check_pattern(slot, &object)?;
        }
        self.arena.get().fill(1);
        Ok(())
    }
}
