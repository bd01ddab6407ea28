//! `kvfabric demo`: a directory and two ranks as processes of their own, and every claim tried on them.

mod rank;
mod steps;

use std::time::{Duration, Instant};

use anyhow::{bail, Result};
use kvfabric_node::Settings;
use serde_json::json;

use crate::args::{DemoArgs, TransportArg};
use crate::cluster::{rank_settings, DirectoryProcess};
use crate::output::{bytes_text, gbps_text, micros_text, Printer, Table};
use crate::process::TransportUnavailable;
use crate::summary::{summary_json, Counts, TrafficByTransport};
use crate::tensors::OBJECT_BYTES;

pub use rank::run as run_rank;
use steps::{Scenario, Step};

/// What all steps of all transports gave.
#[derive(Default)]
struct Totals {
    counts: Counts,
    traffic: TrafficByTransport,
    problems: Vec<String>,
    transports_used: Vec<TransportArg>,
}

/// Runs the demo.
///
/// # Errors
/// What was asked for does not work here, a process failed, or anything was not as it must be.
pub fn run(args: &DemoArgs, settings: &Settings, printer: Printer) -> Result<()> {
    let started = Instant::now();
    let asked = transport_asked(args, settings)?;
    let candidates = match asked {
        TransportArg::Auto => vec![TransportArg::Shm, TransportArg::Tcp],
        TransportArg::Rdma => bail!(
            "transport rdma is not available in this build: it has no RDMA verbs provider; use --transport shm or \
             --transport tcp, or no --transport for all that work here"
        ),
        one => vec![one],
    };
    let directory = DirectoryProcess::start(settings)?;
    printer.event(&json!({
        "event": "start", "directory": directory.address(), "blocks": args.blocks, "object_bytes": OBJECT_BYTES,
        "transports": candidates.iter().map(|transport| transport.name()).collect::<Vec<_>>(),
    }))?;
    printer.text(&format!(
        "{} blocks of {} in 64 ranges each; directory {}; ranks A (owner) and B (reader)\n",
        args.blocks,
        bytes_text(OBJECT_BYTES as u64),
        directory.address()
    ))?;
    let mut totals = Totals::default();
    let mut table = Table::new([
        "transport",
        "step",
        "blocks",
        "right",
        "missed",
        "stale",
        "failed",
        "wrong bytes",
        "GB/s",
        "p50 us",
        "p99 us",
    ]);
    let mut notes = Vec::new();
    for transport in candidates {
        let base = rank_settings(settings, directory.address(), Some(transport));
        let mut scenario = match Scenario::start(transport, args.blocks, base) {
            Ok(scenario) => scenario,
            Err(error) if asked == TransportArg::Auto && error.is::<TransportUnavailable>() => {
                printer.event(&json!({
                    "event": "skipped", "transport": transport.name(), "reason": error.to_string(),
                }))?;
                notes.push(format!("{} skipped: {error}", transport.name()));
                continue;
            }
            Err(error) => return Err(error),
        };
        while let Some(step) = scenario.next_step()? {
            report_step(&step, transport, printer, &mut table, &mut notes, &mut totals)?;
        }
        totals.problems.extend(scenario.stop()?);
        totals.transports_used.push(transport);
    }
    directory.stop()?;
    if totals.transports_used.is_empty() {
        totals.problems.push("no transport works here; run `kvfabric doctor`".into());
    }
    print_end(&totals, &table, &notes, started.elapsed(), printer)?;
    if totals.problems.is_empty() {
        return Ok(());
    }
    bail!("the demo did not go as it must: {}", totals.problems.join("; "))
}

/// The flag, else the setting.
fn transport_asked(args: &DemoArgs, settings: &Settings) -> Result<TransportArg> {
    if let Some(transport) = args.transport {
        return Ok(transport);
    }
    match settings.transport.as_deref() {
        None => Ok(TransportArg::Auto),
        Some(name) => {
            kvfabric_node::parse_transport(name)?;
            let known = [TransportArg::Shm, TransportArg::Tcp, TransportArg::Rdma];
            Ok(known.into_iter().find(|transport| transport.name() == name).unwrap_or(TransportArg::Auto))
        }
    }
}

fn report_step(
    step: &Step,
    transport: TransportArg,
    printer: Printer,
    table: &mut Table,
    notes: &mut Vec<String>,
    totals: &mut Totals,
) -> Result<()> {
    let counts = &step.counts;
    let gbps = step.gbps.unwrap_or(0.0);
    printer.event(&json!({
        "event": "step", "transport": transport.name(), "step": step.name, "blocks": step.blocks,
        "blocks_stored": counts.stored + counts.resident, "blocks_loaded": counts.loaded,
        "blocks_missed": counts.missed, "blocks_stale": counts.stale, "blocks_failed": counts.failed,
        "wrong_bytes": counts.wrong_bytes, "gbps": crate::summary::round3(gbps), "p50_us": step.p50_us,
        "p99_us": step.p99_us, "failures": counts.failures, "note": step.note, "problems": step.problems,
    }))?;
    let right = if step.is_store { counts.stored + counts.resident } else { counts.loaded };
    table.row([
        transport.name().to_owned(),
        step.name.to_owned(),
        step.blocks.to_string(),
        right.to_string(),
        counts.missed.to_string(),
        counts.stale.to_string(),
        counts.failed.to_string(),
        counts.wrong_bytes.to_string(),
        gbps_text(gbps),
        micros_text(step.p50_us),
        micros_text(step.p99_us),
    ]);
    if !step.note.is_empty() {
        notes.push(format!("{} {}: {}", transport.name(), step.name, step.note));
    }
    totals.counts.add(counts);
    totals.traffic.add(&step.traffic);
    let place = |problem: &String| format!("{} {}: {problem}", transport.name(), step.name);
    totals.problems.extend(step.problems.iter().map(place));
    Ok(())
}

fn print_end(
    totals: &Totals,
    table: &Table,
    notes: &[String],
    elapsed: Duration,
    printer: Printer,
) -> Result<()> {
    printer.text(&table.render())?;
    printer.text("")?;
    for note in notes {
        printer.text(note)?;
    }
    printer.text("latencies are those of jobs of 32 blocks, 4 in flight when loading; GB = 10^9 bytes")?;
    let verdict = if totals.problems.is_empty() {
        format!(
            "every byte right: {} blocks loaded ({}), {} missed, {} stale, {} failed, 0 wrong bytes, {:.1} s",
            totals.counts.loaded,
            bytes_text(totals.counts.bytes_loaded),
            totals.counts.missed,
            totals.counts.stale,
            totals.counts.failed,
            elapsed.as_secs_f64()
        )
    } else {
        format!(
            "NOT as it must be: {} problems, {} wrong bytes",
            totals.problems.len(),
            totals.counts.wrong_bytes
        )
    };
    printer.text(&verdict)?;
    let mut summary = summary_json(&totals.counts, &totals.traffic, elapsed);
    summary.insert("failures".into(), json!(totals.counts.failures));
    summary.insert("problems".into(), json!(totals.problems));
    printer.event(&summary.into())?;
    Ok(())
}
