//! Lookups over the wire: request and reply through the real control plane on loopback, mutual TLS included.
//!
//! A request holds the fingerprints of a batch of keys, 16 bytes each; the reply holds one bit for each, in order. The
//! server runs on a thread of its own and each client on another, each with its own endpoint, as separate processes
//! would. Every reply is compared with what it must be. What is looked up is a [`Service`]'s affair: [`Membership`] is a
//! table that knows half of the keys, and the directory's own state machine fits as well.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{mpsc, Arc, Barrier};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context as _};
use hdrhistogram::Histogram;
use kvfabric_transport_control::bytes::Bytes;
use kvfabric_transport_control::tokio::runtime::{Builder, Runtime};
use kvfabric_transport_control::tokio::sync::oneshot;
use kvfabric_transport_control::tokio::task::JoinSet;
use kvfabric_transport_control::{Connection, Endpoint, EndpointConfig, Handler, Responder, Security, Tls};
use serde::Serialize;

/// Different requests that a client sends in turn: enough that no cache holds them all.
const REQUESTS: u64 = 64;
/// Before measuring, so that windows and path MTU have settled.
const WARM_UP: Duration = Duration::from_millis(300);
/// Longest wait for one reply; a lookup that takes longer fails the run.
const DEADLINE: Duration = Duration::from_secs(10);
/// Latencies up to this are told apart.
const LATENCY_MAX_US: u64 = 60_000_000;

/// What is looked up, and how replies are checked.
pub trait Service: Send + Sync + 'static {
    /// Request number `sequence`.
    fn request(&self, sequence: u64) -> Vec<u8>;
    /// The server's answer, on the server's thread.
    fn answer(&self, request: &[u8]) -> Vec<u8>;
    /// Whether `reply` is right for request number `sequence`.
    fn is_right(&self, sequence: u64, reply: &[u8]) -> bool;
}

/// What to run.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Keys in a request.
    pub batch: usize,
    /// Clients, each on a thread and a connection of its own.
    pub clients: usize,
    /// Requests of each client that are under way at once.
    pub in_flight: usize,
    /// Length of the measurement.
    pub seconds: f64,
}

/// One row of results.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// `lookup`.
    pub bench: &'static str,
    /// `net`: over QUIC on loopback.
    pub path: &'static str,
    /// Keys in a request.
    pub batch: usize,
    /// Keys looked up while measuring.
    pub keys: u64,
    /// Clients.
    pub clients: usize,
    /// Requests of each client under way at once.
    pub in_flight: usize,
    /// Keys a second, all clients together.
    pub keys_per_s: f64,
    /// Median time from request to reply, microseconds.
    pub p50_us: u64,
    /// 99th percentile of that time, microseconds.
    pub p99_us: u64,
    /// Length of a request for each of its keys.
    pub bytes_per_key: f64,
    /// Processor time of this process (clients and server) for a million keys, seconds.
    pub cpu_s_per_mkeys: f64,
    /// Every reply was compared with what it must be.
    pub verified: bool,
}

/// Measures and checks. Blocks for about `options.seconds`.
///
/// # Errors
/// If the control plane does not come up, a request fails, or a reply is wrong.
pub fn run(options: &Options, service: Arc<dyn Service>) -> anyhow::Result<Row> {
    ensure!(
        options.batch > 0 && options.clients > 0 && options.in_flight > 0,
        "batch, clients and in_flight must be at least 1"
    );
    ensure!(options.seconds > 0.0 && options.seconds < 86_400.0, "seconds must be above 0 and below a day");
    let tls = Tls::load(&Security::Dev)?;
    let server = Server::start(tls.clone(), Arc::clone(&service))?;
    let stop = Arc::new(AtomicBool::new(false));
    let measuring = Arc::new(AtomicBool::new(false));
    let ready = Arc::new(Barrier::new(options.clients + 1));
    let requests: Arc<Vec<Bytes>> =
        Arc::new((0..REQUESTS).map(|sequence| Bytes::from(service.request(sequence))).collect());
    let request_bytes = requests.first().map_or(0, Bytes::len);
    let threads = (0..options.clients)
        .map(|number| {
            let client = Client {
                tls: tls.clone(),
                target: server.address.to_string(),
                requests: Arc::clone(&requests),
                service: Arc::clone(&service),
                in_flight: options.in_flight,
                stop: Arc::clone(&stop),
                measuring: Arc::clone(&measuring),
            };
            let ready = Arc::clone(&ready);
            std::thread::Builder::new().name(format!("client-{number}")).spawn(move || client.run(&ready))
        })
        .collect::<Result<Vec<_>, _>>()
        .context("starting a client")?;
    ready.wait();
    std::thread::sleep(WARM_UP);
    let (cpu, started) = (cpu_time(), Instant::now());
    measuring.store(true, Ordering::Release);
    std::thread::sleep(Duration::from_secs_f64(options.seconds));
    measuring.store(false, Ordering::Release);
    let (seconds, cpu_s) = (started.elapsed().as_secs_f64(), (cpu_time() - cpu).as_secs_f64());
    stop.store(true, Ordering::Release);
    let mut latencies = new_histogram()?;
    for thread in threads {
        match thread.join() {
            Ok(result) => latencies.add(result?)?,
            Err(_) => bail!("a client panicked"),
        }
    }
    server.stop();
    let keys = latencies.len() * options.batch as u64;
    ensure!(keys > 0, "no lookup ended within {} s", options.seconds);
    Ok(Row {
        bench: "lookup",
        path: "net",
        batch: options.batch,
        keys,
        clients: options.clients,
        in_flight: options.in_flight,
        keys_per_s: keys as f64 / seconds,
        p50_us: latencies.value_at_quantile(0.5),
        p99_us: latencies.value_at_quantile(0.99),
        bytes_per_key: request_bytes as f64 / options.batch as f64,
        cpu_s_per_mkeys: cpu_s / (keys as f64 / 1e6),
        verified: true,
    })
}

impl Row {
    /// Prints the row, as an object of one line or as text.
    ///
    /// # Errors
    /// If it cannot be written as JSON.
    pub fn print(&self, json: bool) -> anyhow::Result<()> {
        if json {
            println!("{}", serde_json::to_string(self)?);
        } else {
            println!(
                "lookup net  batch {:>6}  clients {:>3} x {:<2}  {:>7.2} M keys/s  p50 {:>6} us  p99 {:>6} us  {:.1} B/key  {:.3} CPU s/M keys",
                self.batch,
                self.clients,
                self.in_flight,
                self.keys_per_s / 1e6,
                self.p50_us,
                self.p99_us,
                self.bytes_per_key,
                self.cpu_s_per_mkeys
            );
        }
        Ok(())
    }
}

fn new_histogram() -> anyhow::Result<Histogram<u64>> {
    Ok(Histogram::new_with_bounds(1, LATENCY_MAX_US, 3)?)
}

/// Processor time of this process so far.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

fn runtime() -> anyhow::Result<Runtime> {
    Builder::new_current_thread().enable_all().build().context("starting a runtime")
}

/// Answers on the connection's task, which is how a directory answers lookups.
struct Answering(Arc<dyn Service>);

impl Handler for Answering {
    fn handle_request(&self, _connection: &Connection, request: Bytes, responder: Responder) {
        responder.reply(self.0.answer(&request));
    }
}

struct Server {
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl Server {
    fn start(tls: Tls, service: Arc<dyn Service>) -> anyhow::Result<Self> {
        let (stop, stopped) = oneshot::channel::<()>();
        let (up, started) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("server".to_owned())
            .spawn(move || {
                let serve = || -> anyhow::Result<(Runtime, Endpoint)> {
                    let runtime = runtime()?;
                    let endpoint = runtime.block_on(async {
                        let any = SocketAddr::from(([127, 0, 0, 1], 0));
                        Endpoint::bind(EndpointConfig::new(tls), any, Arc::new(Answering(service)))
                    })?;
                    Ok((runtime, endpoint))
                };
                match serve() {
                    Ok((runtime, endpoint)) => {
                        // Nobody waits if the starter is gone, and then `stop` is gone as well.
                        let _ = up.send(Ok(endpoint.local_addr()));
                        runtime.block_on(async {
                            let _ = stopped.await;
                            endpoint.shutdown("the benchmark is over").await;
                        });
                    }
                    Err(error) => {
                        let _ = up.send(Err(error));
                    }
                }
            })
            .context("starting the server")?;
        let address = started.recv().context("the server did not start")??;
        Ok(Self { address, stop, thread })
    }

    fn stop(self) {
        // The server may have ended by itself.
        let _ = self.stop.send(());
        let _ = self.thread.join();
    }
}

struct Client {
    tls: Tls,
    target: String,
    requests: Arc<Vec<Bytes>>,
    service: Arc<dyn Service>,
    in_flight: usize,
    stop: Arc<AtomicBool>,
    measuring: Arc<AtomicBool>,
}

/// A client answers nobody.
struct Silent;

impl Handler for Silent {
    fn handle_request(&self, _connection: &Connection, _request: Bytes, _responder: Responder) {}
}

impl Client {
    fn run(self, ready: &Barrier) -> anyhow::Result<Histogram<u64>> {
        let connected = runtime().and_then(|runtime| {
            let (endpoint, connection) = runtime.block_on(async {
                let endpoint = Endpoint::client(EndpointConfig::new(self.tls.clone()), Arc::new(Silent))?;
                let connection = endpoint.connect(&self.target).await?;
                anyhow::Ok((endpoint, connection))
            })?;
            Ok((runtime, endpoint, connection))
        });
        // Whatever happened, the others must not wait for this one.
        ready.wait();
        let (runtime, endpoint, connection) = connected?;
        let client = Arc::new(self);
        runtime.block_on(async move {
            let mut lanes = JoinSet::new();
            for lane in 0..client.in_flight {
                lanes.spawn(Arc::clone(&client).lane(connection.clone(), lane));
            }
            let mut latencies = new_histogram()?;
            while let Some(result) = lanes.join_next().await {
                latencies.add(result??)?;
            }
            endpoint.shutdown("the benchmark is over").await;
            Ok(latencies)
        })
    }

    /// One request after the other; as many lanes run as requests are to be under way.
    async fn lane(self: Arc<Self>, connection: Connection, lane: usize) -> anyhow::Result<Histogram<u64>> {
        let mut latencies = new_histogram()?;
        let mut sequence = lane as u64;
        while !self.stop.load(Ordering::Acquire) {
            sequence = (sequence + 1) % REQUESTS;
            let request = self.requests.get(usize::try_from(sequence)?).context("a request")?.clone();
            let counts = self.measuring.load(Ordering::Acquire);
            let started = Instant::now();
            let reply = connection.request(request, DEADLINE).await?;
            let latency_us = u64::try_from(started.elapsed().as_micros())?;
            ensure!(self.service.is_right(sequence, &reply), "the reply to request {sequence} is wrong");
            // Requests that straddle an end of the measurement count at neither or, at most, as one lane's one.
            if counts && self.measuring.load(Ordering::Acquire) {
                latencies.saturating_record(latency_us.max(1));
            }
        }
        Ok(latencies)
    }
}

/// A table of fingerprints that knows every second key of each request, with linear probing like the directory's.
pub struct Membership {
    batch: usize,
    table: Vec<[u64; 2]>,
}

impl Membership {
    /// A table with `resident` keys besides those that will be asked for in batches of `batch`.
    #[must_use]
    pub fn new(batch: usize, resident: usize) -> Self {
        let asked = batch * usize::try_from(REQUESTS).unwrap_or(usize::MAX) / 2 + 1;
        let slots = ((resident + asked) * 4 / 3).next_power_of_two();
        let mut membership = Self { batch, table: vec![[0; 2]; slots] };
        for number in 0..resident as u64 {
            membership.insert(fingerprint(u64::MAX - number));
        }
        for sequence in 0..REQUESTS {
            for index in (0..batch as u64).filter(|index| is_known(sequence, *index)) {
                membership.insert(fingerprint(sequence * batch as u64 + index));
            }
        }
        membership
    }

    fn slots_of(&self, fp: [u64; 2]) -> impl Iterator<Item = usize> + '_ {
        let mask = self.table.len() as u64 - 1;
        (0..self.table.len() as u64)
            .filter_map(move |step| usize::try_from((fp[0].wrapping_add(step)) & mask).ok())
    }

    fn insert(&mut self, fp: [u64; 2]) {
        let slot = self.slots_of(fp).find(|slot| self.table[*slot] == [0; 2]);
        if let Some(slot) = slot {
            self.table[slot] = fp;
        }
    }

    fn contains(&self, fp: [u64; 2]) -> bool {
        let found =
            self.slots_of(fp).map(|slot| self.table[slot]).find(|entry| *entry == fp || *entry == [0; 2]);
        found == Some(fp)
    }
}

/// Whether key number `index` of request number `sequence` is in the table; the pattern differs between requests.
fn is_known(sequence: u64, index: u64) -> bool {
    (index ^ (index >> 3) ^ sequence) & 1 == 0
}

/// Fingerprint of key number `number`: the finaliser of SplitMix64, twice.
fn fingerprint(number: u64) -> [u64; 2] {
    let mix = |value: u64| {
        let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    };
    let low = mix(number);
    [low, mix(low)]
}

impl Service for Membership {
    fn request(&self, sequence: u64) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.batch * 16);
        for index in 0..self.batch as u64 {
            for half in fingerprint(sequence * self.batch as u64 + index) {
                bytes.extend_from_slice(&half.to_le_bytes());
            }
        }
        bytes
    }

    fn answer(&self, request: &[u8]) -> Vec<u8> {
        let mut bits = vec![0u8; (request.len() / 16).div_ceil(8)];
        for (index, fp) in request.chunks_exact(16).enumerate() {
            let half = |range: std::ops::Range<usize>| {
                fp.get(range).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
            };
            if self.contains([half(0..8), half(8..16)]) {
                bits[index / 8] |= 1 << (index % 8);
            }
        }
        bits
    }

    fn is_right(&self, sequence: u64, reply: &[u8]) -> bool {
        reply.len() == self.batch.div_ceil(8)
            && reply.iter().enumerate().all(|(byte, bits)| {
                (0..8).all(|bit| {
                    let index = (byte * 8 + bit) as u64;
                    let expected = index < self.batch as u64 && is_known(sequence, index);
                    (bits >> bit & 1 == 1) == expected
                })
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_knows_what_it_should() {
        let membership = Membership::new(100, 1000);
        for sequence in [0, 1, 63] {
            let reply = membership.answer(&membership.request(sequence));
            assert!(membership.is_right(sequence, &reply));
            assert!(!membership.is_right(sequence + 1, &reply));
            let mut wrong = reply.clone();
            wrong[3] ^= 1;
            assert!(!membership.is_right(sequence, &wrong));
            assert!(!membership.is_right(sequence, &reply[1..]));
        }
    }

    #[test]
    fn a_short_run_counts_and_verifies() {
        let options = Options { batch: 64, clients: 2, in_flight: 2, seconds: 0.2 };
        let row = run(&options, Arc::new(Membership::new(64, 1000))).unwrap();
        assert!(row.verified && row.keys > 0 && row.keys % 64 == 0 && row.p50_us <= row.p99_us);
        assert!((row.bytes_per_key - 16.0).abs() < 1e-9);
    }

    /// Answers everything with nothing.
    struct Liar(Membership);

    impl Service for Liar {
        fn request(&self, sequence: u64) -> Vec<u8> {
            self.0.request(sequence)
        }
        fn answer(&self, _request: &[u8]) -> Vec<u8> {
            Vec::new()
        }
        fn is_right(&self, sequence: u64, reply: &[u8]) -> bool {
            self.0.is_right(sequence, reply)
        }
    }

    #[test]
    fn a_wrong_reply_fails_the_run() {
        let options = Options { batch: 64, clients: 1, in_flight: 1, seconds: 0.2 };
        let error = run(&options, Arc::new(Liar(Membership::new(64, 10)))).unwrap_err();
        assert!(error.to_string().contains("is wrong"), "{error}");
    }
}
