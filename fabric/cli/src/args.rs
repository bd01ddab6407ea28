//! The command line: names and flags are fixed, because scripts depend on them.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use kvfabric_node::{parse_bytes, Settings};

use crate::limits;

/// KV-cache fabric: every rank uses the KV blocks that another rank computed.
#[derive(Debug, Parser)]
#[command(
    name = "kvfabric",
    version,
    propagate_version = true,
    subcommand_required = true,
    arg_required_else_help = true,
    after_help = "Settings come from flags, then KVFABRIC_* environment variables, then the file given by --config or \
                  KVFABRIC_CONFIG. KVFABRIC_LOG sets the log filter on standard error, for example \
                  KVFABRIC_LOG=debug or KVFABRIC_LOG=kvfabric_node=trace."
)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// Flags that every command takes.
#[derive(Args, Clone, Debug)]
pub struct Global {
    /// Print one JSON object a line instead of text
    #[arg(long, global = true)]
    pub json: bool,
    /// TOML file with settings; unknown keys are errors
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show on this machine that loaded blocks are right, stale ones are misses, and a dead owner harms nobody
    Demo(DemoArgs),
    /// Run the directory service until SIGINT or SIGTERM
    Directory(DirectoryArgs),
    /// Run a rank without an engine that donates host memory (not in this version: it is filled by remote puts)
    Node(NodeArgs),
    /// Replay a public request trace through rank processes, with real bytes
    Replay(ReplayArgs),
    /// Write a certificate authority and certificates for hosts into a folder
    Certs(CertsArgs),
    /// Say what works on this machine, and what to do about the rest
    Doctor(DoctorArgs),
    /// A process of demo or replay
    #[command(name = crate::process::CHILD_COMMAND, hide = true)]
    Child(ChildArgs),
}

/// A transport by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TransportArg {
    /// The best for each peer
    Auto,
    /// Shared memory, same host
    Shm,
    /// TCP
    Tcp,
    /// RDMA verbs
    Rdma,
}

impl TransportArg {
    /// Its name in settings.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        }
    }
}

/// When checksums are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum VerifyArg {
    /// Never
    Off,
    /// One block in 256
    Sampled,
    /// Every block
    Always,
}

impl VerifyArg {
    fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Sampled => "sampled",
            Self::Always => "always",
        }
    }
}

#[derive(Args, Debug)]
#[command(
    long_about = "Starts a directory and two ranks as processes of their own. Rank A stores blocks of a \
    Llama-like layout (32 layers, keys and values apart: 64 ranges a block), rank B finds them and loads them into its \
    own tensors, and every byte is compared. Then A evicts and overwrites blocks that B has just found, A is killed \
    while B loads, and A starts again under its name. Every block must be right, a miss, or failed; a wrong byte or \
    anything else unexpected ends with an exit code other than 0."
)]
pub struct DemoArgs {
    /// Use only this transport; without it, every transport that works here in turn
    #[arg(long, value_enum)]
    pub transport: Option<TransportArg>,
    /// Blocks of 128 KiB to store
    #[arg(long, default_value_t = 512, value_name = "N",
          value_parser = clap::value_parser!(u32).range(i64::from(limits::DEMO_BLOCKS_MIN)..=i64::from(limits::DEMO_BLOCKS_MAX)))]
    pub blocks: u32,
}

#[derive(Args, Debug)]
pub struct DirectoryArgs {
    /// Address and port for ranks: UDP and TCP [default: 127.0.0.1:7400]
    #[arg(long, value_name = "HOST:PORT")]
    pub listen: Option<String>,
    #[command(flatten)]
    pub security: SecurityArgs,
    /// Cluster; ranks of another one are refused [default: default]
    #[arg(long, value_name = "NAME")]
    pub cluster: Option<String>,
    /// Most memory of the table; K, M, G and T are powers of 1024 [default: 4G]
    #[arg(long, value_name = "N")]
    pub table_bytes: Option<String>,
    /// Serve Prometheus metrics there
    #[arg(long, value_name = "HOST:PORT")]
    pub metrics_listen: Option<String>,
    /// Hide a rank's blocks when it was silent for so long [default: 1000]
    #[arg(long, value_name = "MS")]
    pub peer_timeout_ms: Option<u64>,
}

impl DirectoryArgs {
    pub fn settings(&self) -> Settings {
        Settings {
            listen: self.listen.clone(),
            tls_dir: self.security.tls_dir.clone(),
            insecure_no_auth: self.security.insecure_no_auth.then_some(true),
            cluster: self.cluster.clone(),
            table_bytes: self.table_bytes.clone(),
            metrics_listen: self.metrics_listen.clone(),
            peer_timeout_ms: self.peer_timeout_ms,
            ..Settings::default()
        }
    }
}

#[derive(Args, Debug)]
pub struct SecurityArgs {
    /// Folder with ca.pem, cert.pem and key.pem (see `kvfabric certs`); needed to listen beyond loopback
    #[arg(long, value_name = "DIR")]
    pub tls_dir: Option<PathBuf>,
    /// Neither ask for nor show certificates: anybody who reaches the port reads all blocks
    #[arg(long, conflicts_with = "tls_dir")]
    pub insecure_no_auth: bool,
}

#[derive(Args, Debug)]
pub struct NodeArgs {
    /// The directory
    #[arg(long, value_name = "HOST:PORT")]
    pub directory: Option<String>,
    /// Memory to donate; K, M, G and T are powers of 1024
    #[arg(long, value_name = "N")]
    pub pool_bytes: Option<String>,
    /// Name of the rank, unique in the cluster [default: host name and process id]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Address for peers [default: 127.0.0.1:0]
    #[arg(long, value_name = "HOST:PORT")]
    pub listen: Option<String>,
    /// Host name or address that peers use instead of the listening address
    #[arg(long, value_name = "HOST")]
    pub advertise: Option<String>,
    #[command(flatten)]
    pub security: SecurityArgs,
    /// Secret of the namespaces' keyed hashes
    #[arg(long, value_name = "FILE")]
    pub ns_secret_file: Option<PathBuf>,
    /// Transports to use [default: auto]
    #[arg(long, value_enum)]
    pub transport: Option<TransportArg>,
    /// Cluster that the rank belongs to [default: default]
    #[arg(long, value_name = "NAME")]
    pub cluster: Option<String>,
    /// Serve Prometheus metrics there
    #[arg(long, value_name = "HOST:PORT")]
    pub metrics_listen: Option<String>,
}

impl NodeArgs {
    pub fn settings(&self) -> Settings {
        Settings {
            directory: self.directory.clone(),
            pool_bytes: self.pool_bytes.clone(),
            name: self.name.clone(),
            listen: self.listen.clone(),
            advertise: self.advertise.clone(),
            tls_dir: self.security.tls_dir.clone(),
            insecure_no_auth: self.security.insecure_no_auth.then_some(true),
            ns_secret_file: self.ns_secret_file.clone(),
            transport: self.transport.map(|transport| transport.name().to_owned()),
            cluster: self.cluster.clone(),
            metrics_listen: self.metrics_listen.clone(),
            ..Settings::default()
        }
    }
}

/// Capacity of a replay's pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolArg {
    /// So many bytes for each rank.
    Bytes(u64),
    /// 80 % of the available memory, over all ranks; running out of it is an error.
    Unlimited,
}

fn parse_pool(text: &str) -> Result<PoolArg, String> {
    if text == "unlimited" {
        return Ok(PoolArg::Unlimited);
    }
    parse_bytes("pool-bytes", text).map(PoolArg::Bytes).map_err(|error| format!("{error}; or `unlimited`"))
}

/// Pace of a replay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SpeedArg {
    /// Arrival times scaled by this factor.
    Times(f64),
    /// As fast as it goes, in file order.
    Max,
}

fn parse_speed(text: &str) -> Result<SpeedArg, String> {
    if text == "max" {
        return Ok(SpeedArg::Max);
    }
    match text.parse::<f64>() {
        Ok(factor) if factor.is_finite() && factor > 0.0 => Ok(SpeedArg::Times(factor)),
        _ => Err("must be a number above 0 (2 = twice as fast as recorded), or `max`".into()),
    }
}

#[derive(Args, Debug)]
#[command(
    long_about = "Starts a directory and rank processes and sends them the requests of a trace, round robin. \
    Each rank is an engine of its own (TP1, one key a block of 512 tokens): it looks all blocks of a request up, loads \
    the leading run of hits into its memory and compares every byte, and stores the rest. With --speed max and one \
    request in flight, each request is stored before the next one is looked up, so the number of hits depends on the \
    trace and the pool alone."
)]
pub struct ReplayArgs {
    /// Trace: one JSON object a line with `timestamp` (ms) and `hash_ids`
    #[arg(value_name = "TRACE")]
    pub trace: PathBuf,
    /// Rank processes
    #[arg(long, value_name = "N", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=limits::RANKS_MAX as u64))]
    pub ranks: usize,
    /// Pool of each rank, or `unlimited`: 80 % of the available memory over all ranks, then an error
    #[arg(long, value_name = "N|unlimited", default_value = "unlimited", value_parser = parse_pool)]
    pub pool_bytes: PoolArg,
    /// Size of a token's keys and values; a block has 512 tokens
    #[arg(long, value_name = "B", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub bytes_per_token: u32,
    /// Pace: a factor on recorded arrival times, or `max`
    #[arg(long, value_name = "X|max", default_value = "max", value_parser = parse_speed)]
    pub speed: SpeedArg,
    /// Requests in flight over all ranks [default: 1 with --speed max, else 64]
    #[arg(long, value_name = "N", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=limits::CONCURRENCY_MAX as u64))]
    pub concurrency: Option<usize>,
    /// Replay only the first N requests
    #[arg(long, value_name = "N", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    pub requests: Option<usize>,
    /// Checksums that ranks compare [default: always on tcp, else sampled]; replay itself always compares every byte
    #[arg(long, value_enum)]
    pub verify: Option<VerifyArg>,
    /// Transports to use between ranks [default: auto]
    #[arg(long, value_enum)]
    pub transport: Option<TransportArg>,
}

impl ReplayArgs {
    /// Requests in flight when speed is not `max` and nothing is said: enough for bursts of the published traces.
    const CONCURRENCY_TIMED: usize = 64;

    pub fn settings(&self) -> Settings {
        Settings {
            verify: self.verify.map(|verify| verify.name().to_owned()),
            transport: self.transport.map(|transport| transport.name().to_owned()),
            ..Settings::default()
        }
    }

    pub fn concurrency(&self) -> usize {
        self.concurrency.unwrap_or(match self.speed {
            SpeedArg::Max => 1,
            SpeedArg::Times(_) => Self::CONCURRENCY_TIMED,
        })
    }

    /// Whether each request is stored before the next one is looked up.
    pub fn in_order(&self) -> bool {
        self.speed == SpeedArg::Max && self.concurrency() == 1
    }
}

#[derive(Args, Debug)]
#[command(
    long_about = "Makes a certificate authority (ca.pem, ca-key.pem) in DIR where there is none, and issues one \
    certificate (cert.pem, key.pem) there, with loopback's names, this host's own, those that it had, and those given. \
    For another host, copy ca.pem and ca-key.pem into a folder and run this on it."
)]
pub struct CertsArgs {
    /// Folder to write into
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// Host name, IP address, or rank name or prefix of rank names; may be given several times
    #[arg(long = "name", value_name = "NAME")]
    pub names: Vec<String>,
}

#[derive(Args, Debug)]
pub struct DoctorArgs {
    /// Also try to reach this directory
    #[arg(long, value_name = "HOST:PORT")]
    pub directory: Option<String>,
}

#[derive(Args, Debug)]
pub struct ChildArgs {
    /// Process that started this one
    #[arg(long)]
    pub parent_pid: u32,
    /// Name, for logs
    #[arg(long)]
    pub name: String,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("kvfabric").chain(line.split_whitespace()))
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn documented_lines_parse() {
        for line in [
            "demo",
            "demo --transport shm --blocks 600 --json",
            "demo --transport rdma",
            "directory --listen 127.0.0.1:0",
            "directory --listen 0.0.0.0:7400 --tls-dir d",
            "--json directory --config f --insecure-no-auth",
            "node --directory h:1 --pool-bytes 8G --name s --listen 0.0.0.0:1 --advertise h --tls-dir d --ns-secret-file f --transport auto",
            "node --directory h:1 --pool-bytes 8G --insecure-no-auth",
            "replay t --ranks 4",
            "replay t --ranks 4 --pool-bytes unlimited --bytes-per-token 64 --speed max --json",
            "replay t --ranks 1 --pool-bytes 1G --speed 2.5 --concurrency 8 --requests 10 --verify always --transport tcp",
            "certs d --name a --name b",
            "doctor --directory h:1 --json",
        ] {
            assert!(parse(line).is_ok(), "{line}: {}", parse(line).unwrap_err());
        }
    }

    #[test]
    fn bad_flags_are_refused() {
        for line in [
            "",
            "dmeo",
            "demo --transport infiniband",
            "demo --blocks 3",
            "demo --blocks 65537",
            "directory --tls-dir d --insecure-no-auth",
            "replay t",
            "replay --ranks 2",
            "replay t --ranks 0",
            "replay t --ranks 1000",
            "replay t --ranks 2 --speed 0",
            "replay t --ranks 2 --speed fast",
            "replay t --ranks 2 --pool-bytes lots",
            "replay t --ranks 2 --pool-bytes 0",
            "replay t --ranks 2 --bytes-per-token 0",
            "replay t --ranks 2 --requests 0",
            "replay t --ranks 2 --verify maybe",
            "certs",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn file_order_needs_speed_max_and_one_request_in_flight() {
        let replay = |line: &str| match parse(line).unwrap().command {
            Command::Replay(args) => args,
            other => panic!("{other:?}"),
        };
        assert!(replay("replay t --ranks 2").in_order());
        assert!(!replay("replay t --ranks 2 --concurrency 2").in_order());
        let timed = replay("replay t --ranks 2 --speed 10");
        assert!(!timed.in_order());
        assert_eq!((timed.concurrency(), timed.speed), (64, SpeedArg::Times(10.0)));
        assert_eq!(replay("replay t --ranks 2 --pool-bytes 2K").pool_bytes, PoolArg::Bytes(2048));
    }

    #[test]
    fn flags_become_settings() {
        let Command::Node(args) =
            parse("node --directory h:1 --pool-bytes 8G --transport tcp --tls-dir d").unwrap().command
        else {
            panic!("not a node");
        };
        let settings = args.settings();
        assert_eq!(settings.directory.as_deref(), Some("h:1"));
        assert_eq!(settings.transport.as_deref(), Some("tcp"));
        assert_eq!((settings.tls_dir, settings.insecure_no_auth), (Some("d".into()), None));
        let Command::Directory(args) = parse("directory --insecure-no-auth").unwrap().command else {
            panic!("not a directory");
        };
        assert_eq!(args.settings().insecure_no_auth, Some(true));
        assert_eq!(args.settings().listen, None);
    }
}
