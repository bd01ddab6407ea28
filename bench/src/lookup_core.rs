//! `kvfabric-bench lookup`, core part: the directory's table behind its real requests, without a network.
//!
//! One rank announces `keys` keys through encoded PUBLISH frames; then encoded LOOKUP and LOCATE frames of `batch` keys
//! are decoded, answered and encoded again on one thread, at hit ratios of 0, 50 and 100 %. Every answer is compared
//! with what was announced. Memory is the growth of the process's resident set.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use hdrhistogram::Histogram;
use kvfabric_core::directory::{ClearRequest, ConnectionId, Service, ServiceConfig, TableConfig};
use kvfabric_core::limits::{LOOKUP_KEYS_MAX, PUBLISH_OPS_MAX};
use kvfabric_core::wire::{
    decode_reply, decode_request, encode_reply, encode_request, Advertised, EngineKey, Join, JoinReply,
    Joined, Locate, Lookup, Member, Name, NsName, NsNumber, NsReply, OpenNs, Publish, PublishOp,
    PublishReply, Query, Reply, Request,
};
use kvfabric_core::{Fingerprint, Generation, Incarnation, NsEpoch, SlotId, Time};
use serde_json::json;

/// Keys in the requests that are prepared before the clock starts and used in turn: each touches two or three cache lines
/// of the table, so that they do not stay in any cache until they are asked for again.
const KEYS_PREPARED: usize = 4 << 20;
const CONTROL: ConnectionId = ConnectionId(1);
const NOW: Time = Time::from_micros(1);
/// More than the table needs for any number of keys: its own accounting is compared with the resident set.
const TABLE_BYTES_MAX: u64 = 1 << 40;

/// Keys look like hashes, and any key is made from its number alone.
fn key(index: u64) -> Fingerprint {
    let mix = |mut z: u64| {
        z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    Fingerprint([mix(index.wrapping_mul(2)), mix(index.wrapping_mul(2).wrapping_add(1))])
}

fn generation(index: u64) -> Generation {
    Generation(index + 1)
}

fn resident_bytes() -> Result<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").context("reading /proc/self/statm")?;
    let pages = statm.split_ascii_whitespace().nth(1).context("/proc/self/statm has no second field")?;
    let pages: u64 = pages.parse().context("/proc/self/statm is not a number")?;
    Ok(pages * rustix::param::page_size() as u64)
}

struct Filled {
    service: Service,
    ns: NsNumber,
    member: Member,
    bytes_per_key: f64,
    inserts_per_s: f64,
}

fn ask(service: &mut Service, request: &Request<'_>) -> Result<Reply<'static>> {
    service
        .handle_request(NOW, CONTROL, 1, ClearRequest(0), request)
        .context("the directory did not answer at once")
}

/// A directory with one rank that has announced the keys `0..keys`.
#[allow(clippy::cast_precision_loss)] // Rates and ratios for people.
fn fill(keys: u64) -> Result<Filled> {
    let mut service = Service::new(ServiceConfig {
        cluster: "bench".into(),
        session: 7,
        epoch_base: NsEpoch(1),
        table: TableConfig {
            seed: [0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344],
            bytes_max: TABLE_BYTES_MAX,
        },
        peer_timeout: Duration::from_secs(3600),
    });
    let name = |text| Name::new(text).context("name");
    let incarnation = Incarnation::new(0x1234_5678).context("incarnation")?;
    let join = Join {
        cluster: name("bench")?,
        name: name("rank-0")?,
        engine: name("engine-0")?,
        incarnation,
        advertised: Advertised::default(),
    };
    let Reply::Joined(JoinReply::Joined(Joined { rank, .. })) = ask(&mut service, &Request::Join(join))?
    else {
        bail!("the rank was not admitted")
    };
    let member = Member { rank, incarnation };
    let open = OpenNs { name: NsName([1; 16]), known_epoch: NsEpoch(0) };
    let Reply::Ns(NsReply::Opened { number: ns, epoch }) = ask(&mut service, &Request::OpenNs(open))? else {
        bail!("the namespace was not opened")
    };
    let before = resident_bytes()?;
    let (mut spent, mut seq_no, mut frame) = (Duration::ZERO, 0, Vec::new());
    let step = PUBLISH_OPS_MAX as u64;
    for start in (0..keys).step_by(PUBLISH_OPS_MAX) {
        seq_no += 1;
        let end = keys.min(start + step);
        let ops = (start..end).map(|index| PublishOp {
            present: true,
            tier: 0,
            slot: SlotId((index & 0x3ff_ffff).try_into().unwrap_or(0)),
            ns,
            ns_epoch: epoch,
            fingerprint: key(index),
            generation: generation(index),
        });
        let publish =
            Publish { member, seq_no, first: start == 0, last: end == keys, load: 0, ops: ops.collect() };
        frame.clear();
        encode_request(&Request::Publish(publish), &mut frame)?;
        let began = Instant::now();
        let request = decode_request(&frame)?;
        let reply = ask(&mut service, &request)?;
        spent += began.elapsed();
        ensure!(
            matches!(reply, Reply::Publish(PublishReply::Applied { refused: 0, .. })),
            "a PUBLISH was refused: {reply:?}"
        );
    }
    drop(frame);
    let grown = resident_bytes()?.saturating_sub(before);
    ensure!(service.stats().keys == keys, "{} keys are in the table, not {keys}", service.stats().keys);
    Ok(Filled {
        service,
        ns,
        member,
        bytes_per_key: grown as f64 / keys as f64,
        inserts_per_s: keys as f64 / spent.as_secs_f64(),
    })
}

/// One prepared request and what its answer must be.
struct Batch {
    frame: Vec<u8>,
    /// The number of each key that is there; `None` for one that is not.
    expected: Vec<Option<u64>>,
}

fn batches(filled: &Filled, keys: u64, batch: usize, hit_percent: u64, locate: bool) -> Result<Vec<Batch>> {
    let mut state = hit_percent + 1;
    let mut random = || {
        state = state.wrapping_add(1);
        key(state).0[0]
    };
    let mut all = Vec::new();
    for _ in 0..KEYS_PREPARED.div_ceil(batch) {
        let expected: Vec<Option<u64>> =
            (0..batch).map(|_| (random() % 100 < hit_percent).then(|| random() % keys)).collect();
        let asked = expected.iter().map(|index| key(index.unwrap_or_else(|| keys + random() % keys)));
        let query = Query { ns: filled.ns, asker: EngineKey(5), deadline_us: 1000, keys: asked.collect() };
        let request = if locate { Request::Locate(Locate(query)) } else { Request::Lookup(Lookup(query)) };
        let mut frame = Vec::new();
        encode_request(&request, &mut frame)?;
        all.push(Batch { frame, expected });
    }
    Ok(all)
}

fn verify(filled: &Filled, batch: &Batch, frame: &[u8]) -> Result<()> {
    match decode_reply(frame)? {
        Reply::Lookup(reply) => {
            ensure!(reply.hits.len() == batch.expected.len(), "an answer has the wrong length");
            for (expected, hit) in batch.expected.iter().zip(reply.hits.iter()) {
                ensure!(expected.is_some() == hit, "wrong bit for key {expected:?}");
            }
        }
        Reply::Locate(reply) => {
            ensure!(reply.len() == batch.expected.len(), "an answer has the wrong length");
            for (expected, replicas) in batch.expected.iter().zip(reply.iter()) {
                ensure!(
                    replicas.len() == usize::from(expected.is_some()),
                    "wrong replicas of key {expected:?}"
                );
                if let (Some(index), [replica]) = (expected, replicas.as_slice()) {
                    let right = replica.generation == generation(*index)
                        && u64::from(replica.slot.0) == *index & 0x3ff_ffff
                        && replica.rank == filled.member.rank
                        && replica.incarnation == filled.member.incarnation;
                    ensure!(right, "wrong replica of key {index}: {replica:?}");
                }
            }
        }
        other => bail!("not an answer: {other:?}"),
    }
    Ok(())
}

struct Row {
    op: &'static str,
    hit_percent: u64,
    keys_per_s: f64,
    p50_us: f64,
    p99_us: f64,
    verified: u64,
}

#[allow(clippy::cast_precision_loss)] // Rates for people.
fn probe(
    filled: &Filled,
    keys: u64,
    batch: usize,
    hit_percent: u64,
    locate: bool,
    seconds: f64,
) -> Result<Row> {
    let batches = batches(filled, keys, batch, hit_percent, locate)?;
    let mut times = Histogram::<u64>::new_with_bounds(1, 60_000_000_000, 3)?;
    let (mut spent, mut probed, mut verified, mut out) = (Duration::ZERO, 0u64, 0u64, Vec::new());
    let deadline = Instant::now() + Duration::try_from_secs_f64(seconds).context("--seconds")?;
    while Instant::now() < deadline || verified == 0 {
        for batch in &batches {
            if verified > 0 && Instant::now() >= deadline {
                break;
            }
            out.clear();
            let began = Instant::now();
            let request = decode_request(&batch.frame)?;
            let reply = filled.service.answer(NOW, &request);
            encode_reply(&reply, &mut out)?;
            let time = began.elapsed();
            black_box(&out);
            verify(filled, batch, &out)?;
            spent += time;
            times.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
            probed += batch.expected.len() as u64;
            verified += batch.expected.len() as u64;
        }
    }
    Ok(Row {
        op: if locate { "locate" } else { "probe" },
        hit_percent,
        keys_per_s: probed as f64 / spent.as_secs_f64(),
        p50_us: times.value_at_quantile(0.5) as f64 / 1000.0,
        p99_us: times.value_at_quantile(0.99) as f64 / 1000.0,
        verified,
    })
}

/// Inserts `keys` keys, then probes them in batches of `batch` keys for `seconds` at each hit ratio, on one core.
///
/// # Errors
/// Wrong arguments, `/proc` not readable, or a wrong answer.
#[allow(clippy::cast_precision_loss)] // Ratios for people.
pub fn run(keys: u64, batch: usize, seconds: f64, json: bool) -> Result<()> {
    ensure!(keys > 0, "--keys must be at least 1");
    ensure!((1..=LOOKUP_KEYS_MAX).contains(&batch), "--batch must be between 1 and {LOOKUP_KEYS_MAX}");
    let filled = fill(keys)?;
    let stats = filled.service.stats();
    let accounted = stats.table_bytes as f64 / keys as f64;
    if json {
        let row = json!({
            "bench": "lookup", "op": "insert", "batch": PUBLISH_OPS_MAX, "keys": keys, "clients": 0,
            "keys_per_s": filled.inserts_per_s, "bytes_per_key": filled.bytes_per_key,
            "accounted_bytes_per_key": accounted, "verified": keys,
        });
        println!("{row}");
    } else {
        println!(
            "{keys} keys: {:.1} bytes per key resident ({accounted:.1} accounted), {:.2} M inserts/s",
            filled.bytes_per_key,
            filled.inserts_per_s / 1e6
        );
        println!(
            "{:8} {:>6} {:>6} {:>10} {:>9} {:>9} {:>12}",
            "op", "batch", "hits", "M keys/s", "p50 us", "p99 us", "verified"
        );
    }
    for locate in [false, true] {
        for hit_percent in [0, 50, 100] {
            let row = probe(&filled, keys, batch, hit_percent, locate, seconds)?;
            if json {
                let row = json!({
                    "bench": "lookup", "op": row.op, "batch": batch, "keys": keys, "clients": 0,
                    "hit_percent": row.hit_percent, "keys_per_s": row.keys_per_s, "p50_us": row.p50_us,
                    "p99_us": row.p99_us, "bytes_per_key": filled.bytes_per_key, "verified": row.verified,
                });
                println!("{row}");
            } else {
                println!(
                    "{:8} {:>6} {:>5}% {:>10.2} {:>9.1} {:>9.1} {:>12}",
                    row.op,
                    batch,
                    row.hit_percent,
                    row.keys_per_s / 1e6,
                    row.p50_us,
                    row.p99_us,
                    row.verified
                );
            }
        }
    }
    Ok(())
}
