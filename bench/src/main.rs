//! `kvfabric-bench`: benchmarks that verify their bytes and report CPU seconds per GB.

mod lookup;
mod lookup_core;

mod plan;
mod policy;
mod ranges_shm;
mod ranges_tcp;
mod validation;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{Parser, Subcommand, ValueEnum};

#[derive(Parser)]
#[command(name = "kvfabric-bench", version, about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
    /// One JSON object a line instead of a table.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Transport {
    Shm,
    Tcp,
}

#[derive(Subcommand)]
enum Bench {
    /// Lowering registered blocks to ranges, and keys to fingerprints.
    Plan {
        /// Length of the whole run, seconds.
        #[arg(long, default_value_t = 5.0)]
        seconds: f64,
    },
    /// Reads over a transport beside its limit (memcpy, bare socket), interleaved in one run.
    Ranges {
        /// Transport; both in turn if left out.
        #[arg(long)]
        transport: Option<Transport>,
        /// Length of a window, seconds.
        #[arg(long, default_value_t = 0.25)]
        seconds: f64,
        /// Windows of each side in each row.
        #[arg(long, default_value_t = 3)]
        rounds: usize,
        /// Reads in flight [default: 1 on shm, 8 on tcp].
        #[arg(long)]
        depth: Option<usize>,
    },
    /// The directory: its table alone, then over the network with a real service.
    Lookup {
        /// Keys in the table.
        #[arg(long, default_value_t = 1_000_000)]
        keys: u64,
        /// Keys in a request.
        #[arg(long, default_value_t = 4096)]
        batch: u64,
        /// Clients.
        #[arg(long, default_value_t = 1)]
        clients: usize,
        /// Requests of each client under way at once.
        #[arg(long, default_value_t = 2)]
        in_flight: usize,
        /// Length of each row, seconds.
        #[arg(long, default_value_t = 3.0)]
        seconds: f64,
        /// Publications a second beside the lookups.
        #[arg(long, default_value_t = 200_000)]
        publish_rate: u64,
    },
    /// What words, tags and the judgement cost in a load of 64 MiB.
    Validation {
        /// Length of the run, seconds.
        #[arg(long, default_value_t = 3.0)]
        seconds: f64,
    },
    /// Eviction policies on request traces, through the pool code alone.
    Policy {
        /// Trace files (JSON lines with `hash_ids`).
        #[arg(required = true)]
        traces: Vec<PathBuf>,
        /// Room in blocks, for all pools together.
        #[arg(long, value_delimiter = ',', default_value = "3000,10000,30000")]
        room: Vec<u64>,
    },
    /// The serving half of a benchmark; started by the benchmark itself.
    #[command(hide = true, name = ranges_tcp::CHILD_COMMAND)]
    TcpChild {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> Result<()> {
    let json = cli.json;
    match cli.bench {
        Bench::Plan { seconds } => plan::run(seconds, json),
        Bench::Ranges { transport, seconds, rounds, depth } => {
            if !matches!(transport, Some(Transport::Tcp)) {
                let defaults = ranges_shm::RangesOptions::default();
                let options = ranges_shm::RangesOptions {
                    depth: depth.unwrap_or(defaults.depth),
                    rounds,
                    window: Duration::from_secs_f64(seconds),
                    ..defaults
                };
                ranges_shm::run_and_print(&options, json)?;
            }
            if !matches!(transport, Some(Transport::Shm)) {
                let defaults = ranges_tcp::Options::default();
                let depth = depth.unwrap_or(defaults.depth);
                ranges_tcp_rows(&ranges_tcp::Options { seconds, rounds, depth, ..defaults }, json)?;
            }
            Ok(())
        }
        Bench::Lookup { keys, batch, clients, in_flight, seconds, publish_rate } => {
            lookup_core::run(keys, usize::try_from(batch)?, seconds, json)?;
            let options = lookup::Options { keys, batch, clients, in_flight, seconds, publish_rate };
            let mut out = std::io::stdout();
            if !json {
                writeln!(
                    out,
                    "{:<14} {:>7} {:>10} {:>7} {:>13} {:>13} {:>8} {:>8} {:>13}",
                    "op",
                    "batch",
                    "keys",
                    "clients",
                    "publishes/s",
                    "keys/s",
                    "p50 us",
                    "p99 us",
                    "cpu s/Mkeys"
                )?;
            }
            lookup::run(&options, &mut |row| {
                if json {
                    writeln!(out, "{}", serde_json::to_string(row)?)?;
                } else {
                    writeln!(out, "{row}")?;
                }
                Ok(())
            })
        }
        Bench::Validation { seconds } => validation::run(seconds, json),
        Bench::Policy { traces, room } => policy::run(&traces, &room, json),
        Bench::TcpChild { arguments } => ranges_tcp::serve_child(&arguments),
    }
}

fn ranges_tcp_rows(options: &ranges_tcp::Options, json: bool) -> Result<()> {
    let mut out = std::io::stdout();
    if !json {
        writeln!(
            out,
            "{:<5} {:<6} {:>11} {:>6} {:>5} {:>7} {:>7} {:>6} {:>9} {:>9} {:>9} {:>6} {:>8} {:>6}",
            "path",
            "verify",
            "range bytes",
            "ranges",
            "depth",
            "GB/s",
            "socket",
            "ratio",
            "p50 us",
            "socket",
            "p99 us",
            "ratio",
            "cpu s/GB",
            "ratio"
        )?;
    }
    let mut failed = None;
    ranges_tcp::run(options, &mut |row| {
        let number = |value: &serde_json::Value| value.as_f64().unwrap_or(f64::NAN);
        let printed = if json {
            writeln!(out, "{row}")
        } else {
            writeln!(
                out,
                "{:<5} {:<6} {:>11} {:>6} {:>5} {:>7.2} {:>7.2} {:>6.2} {:>9.1} {:>9.1} {:>9.1} {:>6.2} {:>8.3} {:>6.2}",
                row["transport"].as_str().unwrap_or(""),
                row["verify"].as_str().unwrap_or(""),
                row["range_bytes"],
                row["ranges"],
                row["depth"],
                number(&row["gbps"]),
                number(&row["baseline"]["gbps"]),
                number(&row["ratio_gbps"]),
                number(&row["p50_us"]),
                number(&row["baseline"]["p50_us"]),
                number(&row["p99_us"]),
                number(&row["ratio_p50"]),
                number(&row["cpu_s_per_gb"]),
                number(&row["ratio_cpu"]),
            )
        };
        if let Err(error) = printed {
            failed = Some(error);
        }
    })?;
    failed.map_or(Ok(()), |error| Err(error.into()))
}
