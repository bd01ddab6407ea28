//! `lookup` against the real directory service over loopback: QUIC, mutual TLS, liveness, namespaces and all.
//!
//! A publisher joins as a rank and announces a table of keys; clients ask for batches of which half the keys exist, some
//! requests in flight each, and compare every bit of every answer. Beside them the publisher may go on publishing at a given
//! rate. Server, clients and publisher have runtimes of their own, as separate processes would.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context as _, Result};
use hdrhistogram::Histogram;
use kvfabric_core::hash::{KeyCoordinates, NamespaceKey};
use kvfabric_core::umbp::KeyHasher;
use kvfabric_core::wire::{
    decode_reply, encode_request, Advertised, EngineKey, Join, JoinReply, Lookup, Member, Name, NsName,
    NsNumber, NsReply, OpenNs, Publish, PublishOp, PublishReply, Query, Records, Reply, Request,
};
use kvfabric_core::{Fingerprint, Generation, Incarnation, NsEpoch, SlotId};
use kvfabric_node::{DirectoryConfig, DirectoryServer};
use kvfabric_transport_control::bytes::Bytes;
use kvfabric_transport_control::liveness::{ClientConfig, LivenessClient, Ticket};
use kvfabric_transport_control::tokio;
use kvfabric_transport_control::{Connection, Endpoint, EndpointConfig, Handler, Responder, Security, Tls};
use serde::Serialize;

const NAMESPACE: &str = "bench";
/// Different requests that a client sends in turn.
const REQUESTS: u64 = 64;
/// Longest wait for one reply; a slower one fails the run.
const DEADLINE: Duration = Duration::from_secs(10);
/// Operations in one PUBLISH of the load beside the lookups: what a rank batches in a millisecond or so.
const PUBLISH_BATCH: u64 = 512;

/// What to run.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Keys in the table.
    pub keys: u64,
    /// Keys in a request.
    pub batch: u64,
    /// Clients, each with a runtime and a connection of its own.
    pub clients: usize,
    /// Requests of each client under way at once.
    pub in_flight: usize,
    /// Length of each row, seconds.
    pub seconds: f64,
    /// Publications a second beside the lookups in the rows that have them.
    pub publish_rate: u64,
}

/// One row.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    bench: &'static str,
    op: &'static str,
    batch: u64,
    keys: u64,
    clients: usize,
    in_flight: usize,
    publishes_per_s: f64,
    keys_per_s: f64,
    p50_us: u64,
    p99_us: u64,
    cpu_s_per_mkeys: f64,
    verified: bool,
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:<14} {:>7} {:>10} {:>7} {:>13.0} {:>13.0} {:>8} {:>8} {:>13.3}",
            self.op,
            self.batch,
            self.keys,
            self.clients,
            self.publishes_per_s,
            self.keys_per_s,
            self.p50_us,
            self.p99_us,
            self.cpu_s_per_mkeys
        )
    }
}

struct Silent;

impl Handler for Silent {
    fn handle_request(&self, _connection: &Connection, _request: Bytes, responder: Responder) {
        drop(responder);
    }
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

fn endpoint(tls: &Tls) -> Result<Endpoint> {
    Ok(Endpoint::client(EndpointConfig::new(tls.clone()), Arc::new(Silent))?)
}

async fn ask(connection: &Connection, request: &Request<'_>) -> Result<Bytes> {
    let mut frame = Vec::new();
    encode_request(request, &mut frame)?;
    Ok(connection.request(frame.into(), DEADLINE).await?)
}

fn key_bytes(number: u64) -> [u8; 32] {
    let mut hash = [0x5a; 32];
    hash[..8].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    hash[8..16].copy_from_slice(&number.to_le_bytes());
    hash
}

fn key_string(number: u64) -> String {
    let hex: String = key_bytes(number).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("umbp:vllm:v1:{NAMESPACE}:tp0:pcp0:dcp0:pp0:g0:{hex}")
}

fn namespace_key() -> NamespaceKey {
    NamespaceKey::derive(b"", NAMESPACE, b"")
}

fn fingerprint(key: &NamespaceKey, number: u64) -> Fingerprint {
    key.hash(KeyCoordinates::default(), &key_bytes(number)).fingerprint()
}

/// The number of the key at a position of a request: even positions exist, odd ones do not.
fn asked(options: &Options, request: u64, position: u64) -> u64 {
    let spread =
        (request * options.batch + position).wrapping_mul(0x2545_f491_4f6c_dd1d) % options.keys.max(1);
    if position % 2 == 0 {
        spread
    } else {
        spread + (1 << 40)
    }
}

/// A rank that only publishes.
struct Publisher {
    connection: Connection,
    member: Member,
    ns: NsNumber,
    epoch: NsEpoch,
    seq_no: u64,
    generation: u64,
    key: NamespaceKey,
    _liveness: LivenessClient,
    _endpoint: Endpoint,
}

impl Publisher {
    async fn join(tls: &Tls, directory: SocketAddr) -> Result<Self> {
        let endpoint = endpoint(tls)?;
        let connection = endpoint.connect(&directory.to_string()).await?;
        let incarnation =
            Incarnation::new(u64::from(std::process::id()) | 1 << 60).context("an incarnation")?;
        let name = |text: &'static str| Name::new(text).context("a name");
        let join = Join {
            cluster: name("default")?,
            name: name("localhost")?,
            engine: name("bench")?,
            incarnation,
            advertised: Advertised::default(),
        };
        let reply = ask(&connection, &Request::Join(join)).await?;
        let joined = match decode_reply(&reply)? {
            Reply::Joined(JoinReply::Joined(joined)) => joined,
            other => bail!("the directory did not admit the publisher: {other:?}"),
        };
        let ticket = Ticket::from_number(joined.liveness_token);
        let liveness = tokio::task::spawn_blocking(move || {
            LivenessClient::connect(directory, ticket, ClientConfig::default(), |_| {})
        })
        .await??;
        let key = namespace_key();
        let open = OpenNs { name: NsName(key.public_name()), known_epoch: NsEpoch(0) };
        let reply = ask(&connection, &Request::OpenNs(open)).await?;
        let (ns, epoch) = match decode_reply(&reply)? {
            Reply::Ns(NsReply::Opened { number, epoch }) => (number, epoch),
            other => bail!("the directory did not open the namespace: {other:?}"),
        };
        let member = Member { rank: joined.rank, incarnation };
        Ok(Self {
            connection,
            member,
            ns,
            epoch,
            seq_no: 0,
            generation: 0,
            key,
            _liveness: liveness,
            _endpoint: endpoint,
        })
    }

    async fn publish(
        &mut self,
        numbers: impl Iterator<Item = u64>,
        present: bool,
        first: bool,
        last: bool,
    ) -> Result<()> {
        let mut ops = Records::new();
        for number in numbers {
            if present {
                self.generation += 1;
            }
            ops.push(PublishOp {
                present,
                tier: 0,
                slot: SlotId(u32::try_from(number & 0x3ff_ffff)?),
                ns: self.ns,
                ns_epoch: self.epoch,
                fingerprint: fingerprint(&self.key, number),
                generation: Generation(self.generation),
            });
        }
        self.seq_no += 1;
        let publish = Publish { member: self.member, seq_no: self.seq_no, first, last, load: 0, ops };
        let reply = ask(&self.connection, &Request::Publish(publish)).await?;
        match decode_reply(&reply)? {
            Reply::Publish(PublishReply::Applied { refused: 0, .. }) => Ok(()),
            other => bail!("a publication was not applied: {other:?}"),
        }
    }

    /// Publishes new keys at `rate` a second until told to stop. Returns how many.
    async fn run(&mut self, rate: u64, stop: &AtomicBool, published: &AtomicU64) -> Result<()> {
        let begun = Instant::now();
        let mut done = 0;
        while !stop.load(Ordering::Acquire) {
            let due = Duration::from_secs_f64(done as f64 / rate as f64);
            if let Some(wait) = due.checked_sub(begun.elapsed()) {
                tokio::time::sleep(wait).await;
            }
            // Keys that no client asks for.
            let start = (1 << 41) + done;
            self.publish(start..start + PUBLISH_BATCH, true, false, false).await?;
            done += PUBLISH_BATCH;
            published.fetch_add(PUBLISH_BATCH, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Counts and times of one client.
struct Tally {
    keys: u64,
    latencies: Histogram<u64>,
}

struct Client {
    tls: Tls,
    directory: SocketAddr,
    options: Options,
    from_strings: bool,
}

impl Client {
    /// Prepares, meets the others at `ready`, then asks until told to stop.
    fn run(&self, ready: &Barrier, stop: &AtomicBool) -> Result<Tally> {
        let prepared = self.prepare();
        // Whoever failed meets the others too: they must not wait for it.
        ready.wait();
        let (runtime, _endpoint, connection, ns, requests, frames) = prepared?;
        runtime.block_on(self.ask_until(stop, &connection, ns, &requests, &frames))
    }

    #[allow(clippy::type_complexity)] // What one client needs, once.
    fn prepare(
        &self,
    ) -> Result<(tokio::runtime::Runtime, Endpoint, Connection, NsNumber, Vec<Vec<String>>, Vec<Bytes>)> {
        let runtime = runtime()?;
        let (endpoint, connection, ns) = runtime.block_on(async {
            let endpoint = endpoint(&self.tls)?;
            let connection = endpoint.connect(&self.directory.to_string()).await?;
            let open = OpenNs { name: NsName(namespace_key().public_name()), known_epoch: NsEpoch(0) };
            let reply = ask(&connection, &Request::OpenNs(open)).await?;
            let ns = match decode_reply(&reply)? {
                Reply::Ns(NsReply::Opened { number, .. }) => number,
                other => bail!("the directory did not open the namespace: {other:?}"),
            };
            Ok::<_, anyhow::Error>((endpoint, connection, ns))
        })?;
        let requests: Vec<Vec<String>> = if self.from_strings {
            (0..REQUESTS)
                .map(|request| {
                    (0..self.options.batch).map(|at| key_string(asked(&self.options, request, at))).collect()
                })
                .collect()
        } else {
            Vec::new()
        };
        let frames: Vec<Bytes> =
            (0..REQUESTS).map(|request| self.frame(ns, request)).collect::<Result<_>>()?;
        Ok((runtime, endpoint, connection, ns, requests, frames))
    }

    async fn ask_until(
        &self,
        stop: &AtomicBool,
        connection: &Connection,
        ns: NsNumber,
        requests: &[Vec<String>],
        frames: &[Bytes],
    ) -> Result<Tally> {
        let mut hasher = KeyHasher::new(b"", b"");
        let mut tally = Tally { keys: 0, latencies: Histogram::new_with_max(60_000_000, 3)? };
        let mut running = tokio::task::JoinSet::new();
        let mut sequence = 0;
        loop {
            while running.len() < self.options.in_flight && !stop.load(Ordering::Acquire) {
                let request = sequence % REQUESTS;
                sequence += 1;
                let begun = Instant::now();
                let frame = if self.from_strings {
                    let strings = requests.get(usize::try_from(request)?).context("a request")?;
                    frame_of(ns, strings.iter().map(|key| hasher.fingerprint(key.as_bytes())))?
                } else {
                    frames.get(usize::try_from(request)?).context("a request")?.clone()
                };
                let connection = connection.clone();
                running.spawn(async move { (begun, connection.request(frame, DEADLINE).await) });
            }
            let Some(finished) = running.join_next().await else { return Ok(tally) };
            let (begun, reply) = finished?;
            self.check(&reply?)?;
            tally.latencies.record(u64::try_from(begun.elapsed().as_micros())?)?;
            tally.keys += self.options.batch;
        }
    }

    fn frame(&self, ns: NsNumber, request: u64) -> Result<Bytes> {
        let key = namespace_key();
        let options = &self.options;
        frame_of(ns, (0..options.batch).map(|at| Ok(fingerprint(&key, asked(options, request, at)))))
    }

    fn check(&self, reply: &[u8]) -> Result<()> {
        match decode_reply(reply)? {
            Reply::Lookup(answer) => {
                ensure!(answer.hits.len() as u64 == self.options.batch, "an answer of the wrong length");
                let right = answer.hits.iter().enumerate().all(|(at, hit)| hit == (at % 2 == 0));
                ensure!(right, "a wrong answer");
                Ok(())
            }
            other => bail!("the directory answered {other:?}"),
        }
    }
}

fn frame_of(
    ns: NsNumber,
    keys: impl Iterator<Item = Result<Fingerprint, kvfabric_core::umbp::KeyError>>,
) -> Result<Bytes> {
    let mut records = Records::new();
    for key in keys {
        records.push(key?);
    }
    let query = Query { ns, asker: EngineKey::ANONYMOUS, deadline_us: 10_000_000, keys: records };
    let mut frame = Vec::new();
    encode_request(&Request::Lookup(Lookup(query)), &mut frame)?;
    Ok(frame.into())
}

/// Fills a directory, then measures a row without and a row with publishing beside it, and one from key strings.
///
/// # Errors
/// If the directory does not come up, a request fails, or an answer is wrong.
pub fn run(options: &Options, emit: &mut dyn FnMut(&Row) -> Result<()>) -> Result<()> {
    ensure!(
        options.keys > 0 && options.batch > 0 && options.clients > 0 && options.in_flight > 0,
        "zero is not a size"
    );
    ensure!(
        options.batch <= kvfabric_core::limits::LOOKUP_KEYS_MAX as u64,
        "the batch is above the protocol's limit"
    );
    let tls = Tls::load(&Security::Dev)?;
    let directory = DirectoryServer::start(DirectoryConfig {
        table_bytes_max: 64 << 30,
        peer_timeout: Duration::from_secs(10),
        ..DirectoryConfig::new(SocketAddr::from(([127, 0, 0, 1], 0)))
    })?;
    let address = directory.local_addr();
    let publishing = runtime()?;
    let mut publisher = publishing.block_on(Publisher::join(&tls, address))?;
    let chunk = 16_384;
    let mut start = 0;
    while start < options.keys {
        let end = (start + chunk).min(options.keys);
        publishing.block_on(publisher.publish(start..end, true, start == 0, end == options.keys))?;
        start = end;
    }
    for (op, from_strings, rate) in
        [("net", false, 0), ("net+publish", false, options.publish_rate), ("net+strings", true, 0)]
    {
        if op == "net+publish" && rate == 0 {
            continue;
        }
        let row = measure(options, &tls, address, op, from_strings, rate, &publishing, &mut publisher)?;
        emit(&row)?;
    }
    drop(publisher);
    directory.close();
    Ok(())
}

#[allow(clippy::too_many_arguments)] // One call site; a struct would only rename them.
fn measure(
    options: &Options,
    tls: &Tls,
    directory: SocketAddr,
    op: &'static str,
    from_strings: bool,
    rate: u64,
    publishing: &tokio::runtime::Runtime,
    publisher: &mut Publisher,
) -> Result<Row> {
    let stop = Arc::new(AtomicBool::new(false));
    let published = AtomicU64::new(0);
    let ready = Arc::new(Barrier::new(options.clients + 1));
    let clients: Vec<_> = (0..options.clients)
        .map(|_| {
            let client = Client { tls: tls.clone(), directory, options: *options, from_strings };
            let (stop, ready) = (stop.clone(), ready.clone());
            std::thread::spawn(move || client.run(&ready, &stop))
        })
        .collect();
    ready.wait();
    let (cpu, begun) = (cpu_seconds(), Instant::now());
    let timer = stop.clone();
    let seconds = Duration::from_secs_f64(options.seconds);
    let ending = std::thread::spawn(move || {
        std::thread::sleep(seconds);
        timer.store(true, Ordering::Release);
    });
    if rate > 0 {
        publishing.block_on(publisher.run(rate, &stop, &published))?;
    }
    let mut tally = Tally { keys: 0, latencies: Histogram::new_with_max(60_000_000, 3)? };
    for client in clients {
        match client.join() {
            Ok(result) => {
                let result = result?;
                tally.keys += result.keys;
                tally.latencies.add(result.latencies)?;
            }
            Err(_) => bail!("a client panicked"),
        }
    }
    let elapsed = begun.elapsed().as_secs_f64();
    let _ = ending.join();
    ensure!(tally.keys > 0, "nothing was looked up");
    Ok(Row {
        bench: "lookup",
        op,
        batch: options.batch,
        keys: options.keys,
        clients: options.clients,
        in_flight: options.in_flight,
        publishes_per_s: published.load(Ordering::Relaxed) as f64 / elapsed,
        keys_per_s: tally.keys as f64 / elapsed,
        p50_us: tally.latencies.value_at_quantile(0.5),
        p99_us: tally.latencies.value_at_quantile(0.99),
        cpu_s_per_mkeys: (cpu_seconds() - cpu) / (tally.keys as f64 / 1e6),
        verified: true,
    })
}

/// Processor time of this process, seconds.
fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
