//! Configuration: flags over environment over TOML file over defaults; unknown keys are errors.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvfabric_core::{TransportKind, Verify};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A configuration value that cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read configuration file {path}: {source}")]
    Read {
        /// Path.
        path: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The file is not valid TOML, or holds an unknown key or a value of the wrong type.
    #[error("configuration file {path}: {reason}")]
    Parse {
        /// Path.
        path: String,
        /// Where and what.
        reason: String,
    },
    /// An environment variable with the project's prefix that nothing reads.
    #[error("unknown environment variable {name}; known are {known}")]
    UnknownVariable {
        /// Its name.
        name: String,
        /// The known ones.
        known: String,
    },
    /// A value that is out of range or not understood.
    #[error("{name} = {value:?}: {reason}")]
    BadValue {
        /// Setting.
        name: &'static str,
        /// Value given.
        value: String,
        /// What is wrong, and what to give instead.
        reason: String,
    },
}

impl ConfigError {
    /// Never: the same configuration fails again.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        false
    }

    /// Always.
    #[must_use]
    pub fn is_local(&self) -> bool {
        true
    }
}

/// Which transports a rank may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// Per peer the best that works: shm on the same host, else tcp. The choice is logged for each peer.
    #[default]
    Auto,
    /// This one and nothing else; a peer that cannot be reached by it is unreachable.
    Only(TransportKind),
}

/// Huge pages for the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HugePagesChoice {
    /// Ordinary pages.
    Off,
    /// Huge pages where the system has them.
    #[default]
    Auto,
    /// Refuse to start without them.
    Require,
}

/// How peers prove who they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SecurityChoice {
    /// Development certificates of this user, loopback only.
    Development,
    /// Certificates in a directory: `ca.pem`, `cert.pem`, `key.pem`.
    TlsDir(PathBuf),
    /// Nobody proves anything. Only by explicit request.
    InsecureNoAuth,
}

/// Secret of the namespaces' keyed hashes. Never printed.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct NsSecret(Vec<u8>);

impl NsSecret {
    /// The secret.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl From<Vec<u8>> for NsSecret {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }
}

impl std::fmt::Debug for NsSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_empty() { "NsSecret(empty)" } else { "NsSecret(..)" })
    }
}

/// Where the directory is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DirectoryChoice {
    /// At `HOST:PORT`.
    Remote(String),
    /// In this process, listening there.
    Embedded(SocketAddr),
}

/// A rank's configuration. [`NodeConfig::new`] gives the defaults.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// Name of the rank: unique in the cluster; a second live rank of the name is refused.
    pub name: String,
    /// Cluster that the rank belongs to; peers of another cluster are refused.
    pub cluster: String,
    /// Engine that the rank belongs to: ranks of one engine share hidden replicas.
    pub engine: String,
    /// The directory.
    pub directory: DirectoryChoice,
    /// Where control (UDP) and data (TCP) listen; port 0 picks one each.
    pub listen: SocketAddr,
    /// Host name or address that peers should use instead of the listening address.
    pub advertise: Option<String>,
    /// Certificates.
    pub security: SecurityChoice,
    /// Whether data connections are encrypted too. `None`: only when listening beyond loopback with certificates.
    pub data_tls: Option<bool>,
    /// Secret of the namespaces' keyed hashes (`--ns-secret-file`).
    pub ns_secret: NsSecret,
    /// Capacity of the pool, bytes: a hard limit.
    pub pool_bytes: u64,
    /// Extent size, bytes.
    pub extent_bytes: u64,
    /// Huge pages.
    pub huge_pages: HugePagesChoice,
    /// Transports.
    pub transport: TransportChoice,
    /// Checksum verification; `None`: always on tcp, sampled on shm and rdma (design 1.5).
    pub verify: Option<Verify>,
    /// Prometheus endpoint.
    pub metrics_listen: Option<SocketAddr>,
    /// Folder of the rank's Unix socket; default `$XDG_RUNTIME_DIR/kvfabric` or a private folder under `/tmp`.
    pub socket_dir: Option<PathBuf>,
    /// Data threads per transport.
    pub lanes: usize,
    /// After how long without a ping a rank is hidden.
    pub peer_timeout: Duration,
    /// How long start may wait for the directory.
    pub start_timeout: Duration,
}

impl NodeConfig {
    /// A rank of the default cluster on loopback with the given directory and pool.
    #[must_use]
    pub fn new(name: impl Into<String>, directory: impl Into<String>, pool_bytes: u64) -> Self {
        let name = name.into();
        Self {
            cluster: "default".into(),
            engine: name.clone(),
            name,
            directory: DirectoryChoice::Remote(directory.into()),
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            advertise: None,
            security: SecurityChoice::Development,
            data_tls: None,
            ns_secret: NsSecret::default(),
            pool_bytes,
            extent_bytes: kvfabric_core::limits::EXTENT_BYTES,
            huge_pages: HugePagesChoice::Auto,
            transport: TransportChoice::Auto,
            verify: None,
            metrics_listen: None,
            socket_dir: None,
            lanes: 1,
            peer_timeout: Duration::from_millis(1000),
            start_timeout: Duration::from_secs(4),
        }
    }
}

/// A directory's configuration.
#[derive(Clone, Debug)]
pub struct DirectoryConfig {
    /// Cluster; ranks of another cluster are refused.
    pub cluster: String,
    /// UDP (control) and TCP (liveness) address.
    pub listen: SocketAddr,
    /// Certificates.
    pub security: SecurityChoice,
    /// Most memory of the table, bytes; beyond it new keys are refused.
    pub table_bytes_max: u64,
    /// After how long without a ping a rank is hidden.
    pub peer_timeout: Duration,
    /// Prometheus endpoint.
    pub metrics_listen: Option<SocketAddr>,
}

impl DirectoryConfig {
    /// Defaults: cluster `default`, development certificates, a table of at most 4 GiB.
    #[must_use]
    pub fn new(listen: SocketAddr) -> Self {
        Self {
            cluster: "default".into(),
            listen,
            security: SecurityChoice::Development,
            table_bytes_max: 4 << 30,
            peer_timeout: Duration::from_millis(1000),
            metrics_listen: None,
        }
    }
}

/// Settings as they come from a file, the environment or flags: every field optional, later layers win.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// `KVFABRIC_NAME`.
    pub name: Option<String>,
    /// `KVFABRIC_CLUSTER`.
    pub cluster: Option<String>,
    /// `KVFABRIC_ENGINE`.
    pub engine: Option<String>,
    /// `KVFABRIC_DIRECTORY`: HOST:PORT.
    pub directory: Option<String>,
    /// `KVFABRIC_LISTEN`: HOST:PORT.
    pub listen: Option<String>,
    /// `KVFABRIC_ADVERTISE`: HOST.
    pub advertise: Option<String>,
    /// `KVFABRIC_TLS_DIR`.
    pub tls_dir: Option<PathBuf>,
    /// `KVFABRIC_INSECURE_NO_AUTH`: true or false.
    pub insecure_no_auth: Option<bool>,
    /// `KVFABRIC_DATA_TLS`: true or false.
    pub data_tls: Option<bool>,
    /// `KVFABRIC_NS_SECRET_FILE`.
    pub ns_secret_file: Option<PathBuf>,
    /// `KVFABRIC_POOL_BYTES`: bytes, with an optional suffix K, M, G, T (powers of 1024).
    pub pool_bytes: Option<String>,
    /// `KVFABRIC_EXTENT_BYTES`: as above.
    pub extent_bytes: Option<String>,
    /// `KVFABRIC_HUGE_PAGES`: off, auto, require.
    pub huge_pages: Option<String>,
    /// `KVFABRIC_TRANSPORT`: auto, shm, tcp, rdma.
    pub transport: Option<String>,
    /// `KVFABRIC_VERIFY`: off, sampled, always.
    pub verify: Option<String>,
    /// `KVFABRIC_METRICS_LISTEN`: HOST:PORT.
    pub metrics_listen: Option<String>,
    /// `KVFABRIC_SOCKET_DIR`.
    pub socket_dir: Option<PathBuf>,
    /// `KVFABRIC_LANES`: data threads per transport.
    pub lanes: Option<usize>,
    /// `KVFABRIC_PEER_TIMEOUT_MS`.
    pub peer_timeout_ms: Option<u64>,
    /// `KVFABRIC_START_TIMEOUT_MS`.
    pub start_timeout_ms: Option<u64>,
    /// `KVFABRIC_TABLE_BYTES`: directory only.
    pub table_bytes: Option<String>,
}

macro_rules! settings {
    ($($field:ident => $variable:literal),* $(,)?) => {
        impl Settings {
            /// The environment variables that are read, in the order of the fields.
            pub const VARIABLES: &'static [&'static str] = &[$($variable),*];

            /// `self` where it is set, else `lower`.
            #[must_use]
            pub fn over(self, lower: Self) -> Self {
                Self { $($field: self.$field.or(lower.$field)),* }
            }

            fn from_variables(mut get: impl FnMut(&'static str) -> Option<String>) -> Result<Self, ConfigError> {
                Ok(Self { $($field: get($variable).map(|text| parse_variable($variable, &text)).transpose()?),* })
            }
        }
    };
}

settings! {
    name => "KVFABRIC_NAME",
    cluster => "KVFABRIC_CLUSTER",
    engine => "KVFABRIC_ENGINE",
    directory => "KVFABRIC_DIRECTORY",
    listen => "KVFABRIC_LISTEN",
    advertise => "KVFABRIC_ADVERTISE",
    tls_dir => "KVFABRIC_TLS_DIR",
    insecure_no_auth => "KVFABRIC_INSECURE_NO_AUTH",
    data_tls => "KVFABRIC_DATA_TLS",
    ns_secret_file => "KVFABRIC_NS_SECRET_FILE",
    pool_bytes => "KVFABRIC_POOL_BYTES",
    extent_bytes => "KVFABRIC_EXTENT_BYTES",
    huge_pages => "KVFABRIC_HUGE_PAGES",
    transport => "KVFABRIC_TRANSPORT",
    verify => "KVFABRIC_VERIFY",
    metrics_listen => "KVFABRIC_METRICS_LISTEN",
    socket_dir => "KVFABRIC_SOCKET_DIR",
    lanes => "KVFABRIC_LANES",
    peer_timeout_ms => "KVFABRIC_PEER_TIMEOUT_MS",
    start_timeout_ms => "KVFABRIC_START_TIMEOUT_MS",
    table_bytes => "KVFABRIC_TABLE_BYTES",
}

/// Variables with the project's prefix that other parts read.
const OTHER_VARIABLES: &[&str] =
    &["KVFABRIC_CONFIG", "KVFABRIC_CACHE", "KVFABRIC_TRACES", "KVFABRIC_LOG", "KVFABRIC_TEST_SEED"];

fn parse_variable<T: std::str::FromStr>(name: &'static str, text: &str) -> Result<T, ConfigError> {
    text.parse().map_err(|_| ConfigError::BadValue {
        name,
        value: text.into(),
        reason: format!("not a {}", std::any::type_name::<T>().rsplit(':').next().unwrap_or("value")),
    })
}

impl Settings {
    /// From the environment. A variable that starts with `KVFABRIC_` and is not known is an error, since a typo would
    /// otherwise be ignored in silence.
    ///
    /// # Errors
    /// [`ConfigError::UnknownVariable`], [`ConfigError::BadValue`].
    pub fn from_environment() -> Result<Self, ConfigError> {
        Self::from_pairs(std::env::vars())
    }

    fn from_pairs(pairs: impl Iterator<Item = (String, String)>) -> Result<Self, ConfigError> {
        let ours: std::collections::BTreeMap<String, String> =
            pairs.filter(|(name, _)| name.starts_with("KVFABRIC_")).collect();
        if let Some(name) =
            ours.keys().find(|name| !Self::VARIABLES.iter().chain(OTHER_VARIABLES).any(|known| known == name))
        {
            return Err(ConfigError::UnknownVariable {
                name: name.clone(),
                known: [Self::VARIABLES, OTHER_VARIABLES].concat().join(", "),
            });
        }
        Self::from_variables(|name| ours.get(name).cloned())
    }

    /// From a TOML file.
    ///
    /// # Errors
    /// [`ConfigError::Read`], [`ConfigError::Parse`].
    pub fn from_file(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.display().to_string(), source })?;
        toml::from_str(&text).map_err(|error| ConfigError::Parse {
            path: path.display().to_string(),
            reason: error.to_string().trim_end().to_owned(),
        })
    }

    /// Flags over environment over the file named by `--config` or `KVFABRIC_CONFIG`.
    ///
    /// # Errors
    /// Those of the layers.
    pub fn layered(flags: Self, config_file: Option<&Path>) -> Result<Self, ConfigError> {
        let environment = Self::from_environment()?;
        let named = config_file
            .map(Path::to_path_buf)
            .or_else(|| std::env::var_os("KVFABRIC_CONFIG").map(Into::into));
        let file = named.map(|path| Self::from_file(&path)).transpose()?.unwrap_or_default();
        Ok(flags.over(environment).over(file))
    }

    fn security(&self) -> Result<SecurityChoice, ConfigError> {
        match (&self.tls_dir, self.insecure_no_auth.unwrap_or(false)) {
            (Some(dir), false) => Ok(SecurityChoice::TlsDir(dir.clone())),
            (None, true) => Ok(SecurityChoice::InsecureNoAuth),
            (None, false) => Ok(SecurityChoice::Development),
            (Some(_), true) => Err(ConfigError::BadValue {
                name: "insecure_no_auth",
                value: "true".into(),
                reason: "contradicts tls_dir; give one of the two".into(),
            }),
        }
    }

    fn peer_timeout(&self) -> Result<Duration, ConfigError> {
        match self.peer_timeout_ms.unwrap_or(1000) {
            value @ 100..=600_000 => Ok(Duration::from_millis(value)),
            value => Err(ConfigError::BadValue {
                name: "peer_timeout_ms",
                value: value.to_string(),
                reason: "must be between 100 and 600000".into(),
            }),
        }
    }

    /// A rank's configuration.
    ///
    /// # Errors
    /// [`ConfigError::BadValue`] names the setting and the remedy.
    pub fn node(&self) -> Result<NodeConfig, ConfigError> {
        let missing = |name: &'static str, reason: &str| ConfigError::BadValue {
            name,
            value: String::new(),
            reason: reason.into(),
        };
        let directory = self.directory.clone().ok_or_else(|| {
            missing("directory", "is not set; give --directory HOST:PORT of a running `kvfabric directory`")
        })?;
        let pool = self
            .pool_bytes
            .as_deref()
            .ok_or_else(|| missing("pool_bytes", "is not set; give --pool-bytes N, for example 8G"))?;
        let name = self.name.clone().unwrap_or_else(default_name);
        check_name("name", &name)?;
        let mut config = NodeConfig::new(name, directory, parse_bytes("pool_bytes", pool)?);
        if let Some(cluster) = &self.cluster {
            check_name("cluster", cluster)?;
            config.cluster.clone_from(cluster);
        }
        if let Some(engine) = &self.engine {
            check_name("engine", engine)?;
            config.engine.clone_from(engine);
        }
        if let Some(listen) = &self.listen {
            config.listen = parse_address("listen", listen)?;
        }
        config.advertise.clone_from(&self.advertise);
        config.security = self.security()?;
        config.data_tls = self.data_tls;
        if let Some(path) = &self.ns_secret_file {
            config.ns_secret = std::fs::read(path)
                .map_err(|source| ConfigError::Read { path: path.display().to_string(), source })?
                .into();
        }
        if let Some(extent) = &self.extent_bytes {
            config.extent_bytes = parse_bytes("extent_bytes", extent)?;
        }
        if let Some(huge) = &self.huge_pages {
            config.huge_pages = parse_choice(
                "huge_pages",
                huge,
                &[
                    ("off", HugePagesChoice::Off),
                    ("auto", HugePagesChoice::Auto),
                    ("require", HugePagesChoice::Require),
                ],
            )?;
        }
        if let Some(transport) = &self.transport {
            config.transport = parse_transport(transport)?;
        }
        if let Some(verify) = &self.verify {
            config.verify = Some(parse_choice(
                "verify",
                verify,
                &[("off", Verify::Off), ("sampled", Verify::Sampled), ("always", Verify::Always)],
            )?);
        }
        config.metrics_listen =
            self.metrics_listen.as_deref().map(|text| parse_address("metrics_listen", text)).transpose()?;
        config.socket_dir.clone_from(&self.socket_dir);
        if let Some(lanes) = self.lanes {
            if !(1..=64).contains(&lanes) {
                return Err(ConfigError::BadValue {
                    name: "lanes",
                    value: lanes.to_string(),
                    reason: "must be between 1 and 64".into(),
                });
            }
            config.lanes = lanes;
        }
        config.peer_timeout = self.peer_timeout()?;
        if let Some(start) = self.start_timeout_ms {
            config.start_timeout = Duration::from_millis(start);
        }
        Ok(config)
    }

    /// A directory's configuration.
    ///
    /// # Errors
    /// [`ConfigError::BadValue`] names the setting and the remedy.
    pub fn directory(&self) -> Result<DirectoryConfig, ConfigError> {
        let listen = self.listen.as_deref().unwrap_or("127.0.0.1:7400");
        let mut config = DirectoryConfig::new(parse_address("listen", listen)?);
        if let Some(cluster) = &self.cluster {
            check_name("cluster", cluster)?;
            config.cluster.clone_from(cluster);
        }
        config.security = self.security()?;
        if let Some(bytes) = &self.table_bytes {
            config.table_bytes_max = parse_bytes("table_bytes", bytes)?;
        }
        config.peer_timeout = self.peer_timeout()?;
        config.metrics_listen =
            self.metrics_listen.as_deref().map(|text| parse_address("metrics_listen", text)).transpose()?;
        Ok(config)
    }
}

fn default_name() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    format!("{}-{}", if host.is_empty() { "rank".into() } else { host }, std::process::id())
}

fn check_name(name: &'static str, value: &str) -> Result<(), ConfigError> {
    let limit = kvfabric_core::limits::NAME_BYTES_MAX;
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if value.is_empty() || value.len() > limit || !value.bytes().all(good) {
        return Err(ConfigError::BadValue {
            name,
            value: value.chars().take(64).collect(),
            reason: format!("must be 1 to {limit} letters, digits, '-', '_' or '.'"),
        });
    }
    Ok(())
}

/// Parses `HOST:PORT` with a literal address; host names are for peers, listeners need an address.
///
/// # Errors
/// [`ConfigError::BadValue`].
pub fn parse_address(name: &'static str, text: &str) -> Result<SocketAddr, ConfigError> {
    let literal =
        text.strip_prefix("localhost:").map_or_else(|| text.to_owned(), |port| format!("127.0.0.1:{port}"));
    literal.parse().map_err(|_| ConfigError::BadValue {
        name,
        value: text.into(),
        reason: "is not ADDRESS:PORT, for example 127.0.0.1:7400, 0.0.0.0:7400 or [::1]:7400".into(),
    })
}

/// Parses a transport choice: auto, shm, tcp or rdma.
///
/// # Errors
/// [`ConfigError::BadValue`].
pub fn parse_transport(text: &str) -> Result<TransportChoice, ConfigError> {
    parse_choice(
        "transport",
        text,
        &[
            ("auto", TransportChoice::Auto),
            ("shm", TransportChoice::Only(TransportKind::Shm)),
            ("tcp", TransportChoice::Only(TransportKind::Tcp)),
            ("rdma", TransportChoice::Only(TransportKind::Rdma)),
        ],
    )
}

fn parse_choice<T: Copy>(name: &'static str, text: &str, choices: &[(&str, T)]) -> Result<T, ConfigError> {
    choices.iter().find(|(known, _)| *known == text).map(|(_, value)| *value).ok_or_else(|| {
        let known: Vec<&str> = choices.iter().map(|(known, _)| *known).collect();
        ConfigError::BadValue {
            name,
            value: text.into(),
            reason: format!("must be one of {}", known.join(", ")),
        }
    })
}

/// Parses a number of bytes with an optional suffix K, M, G or T (powers of 1024, an `i` and a `B` may follow).
///
/// # Errors
/// [`ConfigError::BadValue`].
pub fn parse_bytes(name: &'static str, text: &str) -> Result<u64, ConfigError> {
    let bad = |reason: &str| ConfigError::BadValue { name, value: text.into(), reason: reason.into() };
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
    let (number, suffix) = trimmed.split_at(digits);
    let shift = match suffix.trim().to_ascii_lowercase().trim_end_matches('b').trim_end_matches('i') {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(bad("must be a number of bytes with an optional suffix K, M, G or T")),
    };
    let number: u64 = number.parse().map_err(|_| bad("must begin with a whole number"))?;
    match number.checked_mul(1 << shift) {
        Some(0) => Err(bad("must not be zero")),
        Some(bytes) => Ok(bytes),
        None => Err(bad("is too large")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(list: &[(&str, &str)]) -> impl Iterator<Item = (String, String)> {
        list.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect::<Vec<_>>().into_iter()
    }

    #[test]
    fn bytes_take_suffixes() {
        assert_eq!(parse_bytes("x", "17").unwrap(), 17);
        assert_eq!(parse_bytes("x", "8G").unwrap(), 8 << 30);
        assert_eq!(parse_bytes("x", "4 MiB").unwrap(), 4 << 20);
        for bad in ["", "G", "-1", "1.5G", "0", "99999999999T", "7X", "1KK"] {
            assert!(parse_bytes("x", bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn environment_is_read_and_unknown_names_are_errors() {
        let settings =
            Settings::from_pairs(pairs(&[("KVFABRIC_NAME", "a"), ("KVFABRIC_LANES", "2"), ("HOME", "x")]))
                .unwrap();
        assert_eq!((settings.name.as_deref(), settings.lanes), (Some("a"), Some(2)));
        let error = Settings::from_pairs(pairs(&[("KVFABRIC_NAMES", "a")])).unwrap_err();
        assert!(error.to_string().contains("KVFABRIC_NAMES"));
        assert!(Settings::from_pairs(pairs(&[("KVFABRIC_LANES", "two")])).is_err());
    }

    #[test]
    fn secrets_stay_out_of_logs() {
        let mut config = NodeConfig::new("a", "127.0.0.1:1", 1 << 20);
        config.ns_secret = b"hunter2".to_vec().into();
        let text = format!("{config:?}");
        assert!(
            text.contains("NsSecret(..)") && !text.contains("hunter2") && !text.contains("104, 117"),
            "{text}"
        );
    }

    #[test]
    fn layers_override_each_other() {
        let upper = Settings { name: Some("flag".into()), ..Settings::default() };
        let lower = Settings { name: Some("file".into()), cluster: Some("c".into()), ..Settings::default() };
        let merged = upper.over(lower);
        assert_eq!((merged.name.as_deref(), merged.cluster.as_deref()), (Some("flag"), Some("c")));
    }

    #[test]
    fn unknown_keys_in_files_are_errors() {
        let error = toml::from_str::<Settings>("pool_byte = '1G'").unwrap_err();
        assert!(error.to_string().contains("pool_byte"), "{error}");
    }

    #[test]
    fn bad_values_name_the_setting() {
        let base = Settings {
            directory: Some("127.0.0.1:1".into()),
            pool_bytes: Some("1G".into()),
            ..Settings::default()
        };
        assert!(base.node().is_ok());
        let cases = [
            (Settings { transport: Some("infiniband".into()), ..base.clone() }, "transport"),
            (Settings { verify: Some("yes".into()), ..base.clone() }, "verify"),
            (Settings { listen: Some("7400".into()), ..base.clone() }, "listen"),
            (Settings { name: Some("a b".into()), ..base.clone() }, "name"),
            (Settings { lanes: Some(0), ..base.clone() }, "lanes"),
            (Settings { peer_timeout_ms: Some(1), ..base.clone() }, "peer_timeout_ms"),
            (Settings { pool_bytes: None, ..base.clone() }, "pool_bytes"),
            (Settings { directory: None, ..base.clone() }, "directory"),
            (
                Settings { tls_dir: Some("x".into()), insecure_no_auth: Some(true), ..base.clone() },
                "insecure_no_auth",
            ),
        ];
        for (settings, name) in cases {
            let error = settings.node().unwrap_err().to_string();
            assert!(error.starts_with(name), "{error}");
        }
    }
}
