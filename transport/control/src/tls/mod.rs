//! Certificates and TLS settings, for QUIC and for the TCP data path.
//!
//! Three modes ([`Security`]): certificates of a directory, the user's own development authority for loopback, and, only
//! when asked for, no authentication. In the first two both sides show a certificate of one authority. A directory holds
//! `ca.pem`, `cert.pem` and `key.pem`; [`certs`] makes them.

pub mod certs;
mod dev;
mod files;
#[cfg(test)]
mod tests;
mod verify;

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

pub use dev::dev_ca_dir;
pub use verify::{peer_names, NameRule};

use crate::error::BindError;
use crate::names::san_allows;

/// ALPN of the control plane; its number changes with the framing.
pub const ALPN_CONTROL: &[u8] = b"kvfabric-control/1";
/// ALPN of TLS on the TCP data path, so that a connection to the wrong port fails in the handshake.
pub const ALPN_DATA: &[u8] = b"kvfabric-data/1";
/// The authority's certificate within a TLS directory.
pub const CA_FILE: &str = "ca.pem";
/// The authority's key, needed only to make certificates.
pub const CA_KEY_FILE: &str = "ca-key.pem";
/// The host's or rank's certificate, with intermediates if any.
pub const CERT_FILE: &str = "cert.pem";
/// The host's or rank's key.
pub const KEY_FILE: &str = "key.pem";

/// Where certificates come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Security {
    /// The user's development authority ([`dev_ca_dir`]), made on first use. Loopback only.
    Dev,
    /// `ca.pem`, `cert.pem` and `key.pem` of this directory (`--tls-dir`).
    Dir(PathBuf),
    /// Encrypted, but nobody is authenticated (`--insecure-no-auth`): whoever reaches the port may join.
    InsecureNoAuth,
}

impl Security {
    /// Refuses to listen beyond loopback with development certificates (house rule; design 5).
    ///
    /// # Errors
    /// [`BindError::DevBeyondLoopback`].
    pub fn check_listen(&self, address: SocketAddr) -> Result<(), BindError> {
        if matches!(self, Self::Dev) && !address.ip().to_canonical().is_loopback() {
            return Err(BindError::DevBeyondLoopback { address });
        }
        Ok(())
    }

    /// The word used in logs and JSON.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Dev => "dev",
            Self::Dir(_) => "dir",
            Self::InsecureNoAuth => "insecure-no-auth",
        }
    }
}

/// Why certificates cannot be used or made. Each names the file and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    /// A file is not there.
    #[error("{} does not exist; make certificates with `kvfabric certs {}`", file.display(), dir.display())]
    Missing {
        /// The file.
        file: PathBuf,
        /// Its directory.
        dir: PathBuf,
    },
    /// A file or directory could not be read, written or created.
    #[error("cannot {action} {}: {kind}; check its owner and permissions", file.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        file: PathBuf,
        /// What the system said.
        kind: io::ErrorKind,
    },
    /// A file does not hold what its name says.
    #[error("{} is not usable: {detail}; make it anew with `kvfabric certs`", file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// A certificate is past its end.
    #[error("the certificate in {} expired at {not_after}; {}", file.display(), remedy_expired(file))]
    Expired {
        /// The file.
        file: PathBuf,
        /// Its end.
        not_after: String,
    },
    /// A certificate is not valid yet.
    #[error("the certificate in {} is valid only from {not_before}; check this host's clock", file.display())]
    NotYetValid {
        /// The file.
        file: PathBuf,
        /// Its start.
        not_before: String,
    },
    /// Key and certificate are not a pair.
    #[error("{} is not the key of {}; put the pair together again, or delete both and run `kvfabric certs`", key.display(), cert.display())]
    KeyMismatch {
        /// The key.
        key: PathBuf,
        /// The certificate.
        cert: PathBuf,
    },
    /// The certificate was issued by another authority, so no peer would accept it.
    #[error("{} was not issued by {}: {detail}; delete it and run `kvfabric certs`, or bring the right authority", cert.display(), ca.display())]
    NotIssuedByCa {
        /// The certificate.
        cert: PathBuf,
        /// The authority.
        ca: PathBuf,
        /// What verification says.
        detail: String,
    },
    /// The authority cannot issue, because its key is elsewhere.
    #[error("{} cannot issue certificates because its key {} is not here; bring the key, or start a new authority in an empty directory", ca.display(), key.display())]
    CaKeyMissing {
        /// The authority.
        ca: PathBuf,
        /// Where its key should be.
        key: PathBuf,
    },
    /// A certificate's name cannot be put into a certificate.
    #[error("`{name}` cannot be a certificate's name: {detail}")]
    InvalidName {
        /// The name.
        name: String,
        /// What is wrong.
        detail: &'static str,
    },
    /// More names than a certificate may have.
    #[error("{} would hold more than {limit} names; use a prefix such as `engine0-` for many ranks", file.display())]
    TooManyNames {
        /// The certificate.
        file: PathBuf,
        /// The limit.
        limit: usize,
    },
    /// There is no place for the development authority.
    #[error("neither XDG_STATE_HOME nor HOME is an absolute path, so there is no place for development certificates; set one, or give --tls-dir DIR")]
    NoStateDirectory,
    /// The development authority's directory belongs to somebody else.
    #[error("{} belongs to another user, so its certificates cannot be trusted; set XDG_STATE_HOME, or give --tls-dir DIR", dir.display())]
    ForeignDirectory {
        /// The directory.
        dir: PathBuf,
    },
    /// Another process holds the lock for too long.
    #[error("{} is locked by another process that does not finish; end it (`fuser {}`)", file.display(), file.display())]
    Locked {
        /// The lock file.
        file: PathBuf,
    },
    /// The operating system's random source or the TLS library failed.
    #[error("making certificates or TLS settings failed: {detail}")]
    Library {
        /// What it says.
        detail: String,
    },
}

fn remedy_expired(file: &Path) -> String {
    let dir = file.parent().unwrap_or(Path::new(".")).display();
    if file.file_name().is_some_and(|name| name == CA_FILE) {
        format!("delete {CA_FILE} and {CA_KEY_FILE} there, run `kvfabric certs {dir}`, and give every host certificates of the new authority")
    } else {
        format!("run `kvfabric certs {dir}` to renew it")
    }
}

impl TlsError {
    /// Whether a later attempt may succeed without anybody changing anything.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Locked { .. })
    }

    /// Always: no peer is involved.
    #[must_use]
    pub fn is_local(&self) -> bool {
        true
    }
}

pub(crate) fn library(error: impl std::fmt::Display) -> TlsError {
    TlsError::Library { detail: error.to_string() }
}

/// The one crypto provider of this crate, named outright so that no process-wide default decides.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// A certificate chain with its key, and the authority that peers must have; ready-made TLS settings.
#[derive(Clone)]
pub struct Tls {
    security: Security,
    provider: Arc<CryptoProvider>,
    roots: Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: Arc<PrivateKeyDer<'static>>,
    names: Vec<String>,
    data_client: Arc<ClientConfig>,
    data_server: Arc<ServerConfig>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key stays out of logs.
        f.debug_struct("Tls")
            .field("security", &self.security)
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

impl Tls {
    /// Loads (or, for [`Security::Dev`], makes) certificates and checks that peers can accept them: dates, key, issuer.
    /// Reads files and may wait for another process's lock: call it at start, not on a reactor.
    ///
    /// # Errors
    /// [`TlsError`], which names the file and the remedy.
    pub fn load(security: &Security) -> Result<Self, TlsError> {
        match security {
            Security::Dev => Self::load_dev(&dev_ca_dir()?),
            Security::Dir(dir) => Self::from_dir(security.clone(), dir),
            Security::InsecureNoAuth => Self::ephemeral(),
        }
    }

    /// As [`Security::Dev`], with the authority in `dir`.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn load_dev(dir: &Path) -> Result<Self, TlsError> {
        let _lock = dev::ensure(dir)?;
        Self::from_dir(Security::Dev, dir)
    }

    fn from_dir(security: Security, dir: &Path) -> Result<Self, TlsError> {
        let identity = files::load_identity(dir)?;
        Self::new(security, identity.roots, identity.chain, identity.key)
    }

    fn ephemeral() -> Result<Self, TlsError> {
        let (certificate, key) = certs::self_signed()?;
        Self::new(Security::InsecureNoAuth, RootCertStore::empty(), vec![certificate], key)
    }

    fn new(
        security: Security,
        roots: RootCertStore,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Self, TlsError> {
        let provider = provider();
        let roots = Arc::new(roots);
        let key = Arc::new(key);
        let names = chain.first().map(peer_names).unwrap_or_default();
        let parts =
            Parts { security: &security, provider: &provider, roots: &roots, chain: &chain, key: &key };
        let data_client = Arc::new(parts.client(NameRule::Host, ALPN_DATA)?);
        let data_server = Arc::new(parts.server(ALPN_DATA)?);
        Ok(Self { provider, roots, chain, key, names, data_client, data_server, security })
    }

    fn parts(&self) -> Parts<'_> {
        Parts {
            security: &self.security,
            provider: &self.provider,
            roots: &self.roots,
            chain: &self.chain,
            key: &self.key,
        }
    }

    /// The mode.
    #[must_use]
    pub fn security(&self) -> &Security {
        &self.security
    }

    /// Whether peers must show a certificate of our authority.
    #[must_use]
    pub fn authenticates(&self) -> bool {
        self.security != Security::InsecureNoAuth
    }

    /// Names (DNS and IP) of our own certificate.
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Whether our own certificate lets us join as `rank_name`; without authentication every name is allowed. Checked
    /// before JOIN, so that the error appears at its cause.
    #[must_use]
    pub fn allows(&self, rank_name: &str) -> bool {
        !self.authenticates() || san_allows(&self.names, rank_name)
    }

    /// Whether the peer that showed `certificates` may speak for `rank_name`; without authentication every name is
    /// allowed.
    #[must_use]
    pub fn peer_allows(&self, certificates: Option<&[CertificateDer<'_>]>, rank_name: &str) -> bool {
        if !self.authenticates() {
            return true;
        }
        let names = certificates.and_then(<[_]>::first).map(peer_names).unwrap_or_default();
        san_allows(&names, rank_name)
    }

    /// Client side of the TCP data path. The server's certificate must be of our authority and carry the `ServerName`
    /// given at connect; with development certificates any name will do.
    #[must_use]
    pub fn data_client_config(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.data_client)
    }

    /// Client side of the TCP data path to the rank `rank_name`, wherever it runs: the certificate must allow that name
    /// ([`san_allows`]); the `ServerName` given at connect is not looked at.
    ///
    /// # Errors
    /// [`TlsError::Library`].
    pub fn data_client_config_for(&self, rank_name: &str) -> Result<Arc<ClientConfig>, TlsError> {
        Ok(Arc::new(self.parts().client(NameRule::Rank(rank_name.to_owned()), ALPN_DATA)?))
    }

    /// Client side of the TCP data path to a peer that is told apart by other means, such as a one-time token of an
    /// authenticated HELLO: any certificate of our authority will do.
    ///
    /// # Errors
    /// [`TlsError::Library`].
    pub fn data_client_config_any(&self) -> Result<Arc<ClientConfig>, TlsError> {
        Ok(Arc::new(self.parts().client(NameRule::Any, ALPN_DATA)?))
    }

    /// Server side of the TCP data path: clients must show a certificate of our authority.
    #[must_use]
    pub fn data_server_config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.data_server)
    }

    pub(crate) fn control_client_config(&self, rule: NameRule) -> Result<ClientConfig, TlsError> {
        self.parts().client(rule, ALPN_CONTROL)
    }

    pub(crate) fn control_server_config(&self) -> Result<ServerConfig, TlsError> {
        self.parts().server(ALPN_CONTROL)
    }
}

/// What both kinds of settings are made of.
struct Parts<'a> {
    security: &'a Security,
    provider: &'a Arc<CryptoProvider>,
    roots: &'a Arc<RootCertStore>,
    chain: &'a [CertificateDer<'static>],
    key: &'a PrivateKeyDer<'static>,
}

impl Parts<'_> {
    fn client(&self, rule: NameRule, alpn: &[u8]) -> Result<ClientConfig, TlsError> {
        let builder = ClientConfig::builder_with_provider(Arc::clone(self.provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(library)?
            .dangerous();
        let mut config = match self.security {
            Security::InsecureNoAuth => builder
                .with_custom_certificate_verifier(Arc::new(verify::AcceptAny::new(self.provider)))
                .with_no_client_auth(),
            Security::Dev | Security::Dir(_) => {
                // The development authority signs one certificate, for one user, on one host: its host name says
                // nothing that the authority does not.
                let rule = match (self.security, rule) {
                    (Security::Dev, NameRule::Host) => NameRule::Any,
                    (_, rule) => rule,
                };
                let verifier = verify::AuthorityVerifier::new(Arc::clone(self.roots), self.provider, rule);
                builder
                    .with_custom_certificate_verifier(Arc::new(verifier))
                    .with_client_auth_cert(self.chain.to_vec(), self.key.clone_key())
                    .map_err(library)?
            }
        };
        config.alpn_protocols = vec![alpn.to_vec()];
        Ok(config)
    }

    fn server(&self, alpn: &[u8]) -> Result<ServerConfig, TlsError> {
        let builder = ServerConfig::builder_with_provider(Arc::clone(self.provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(library)?;
        let builder = match self.security {
            Security::InsecureNoAuth => builder.with_no_client_auth(),
            Security::Dev | Security::Dir(_) => {
                let verifier = WebPkiClientVerifier::builder_with_provider(
                    Arc::clone(self.roots),
                    Arc::clone(self.provider),
                )
                .build()
                .map_err(library)?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let mut config =
            builder.with_single_cert(self.chain.to_vec(), self.key.clone_key()).map_err(library)?;
        config.alpn_protocols = vec![alpn.to_vec()];
        Ok(config)
    }
}

/// Checks a chain and its key against an authority, as a peer would.
pub(crate) fn check_pair(
    roots: &RootCertStore,
    chain: &[CertificateDer<'static>],
    key: &PrivateKeyDer<'static>,
    files: (&Path, &Path, &Path),
) -> Result<(), TlsError> {
    let (ca_file, cert_file, key_file) = files;
    let provider = provider();
    let mismatch = || TlsError::KeyMismatch { key: key_file.to_owned(), cert: cert_file.to_owned() };
    match CertifiedKey::from_der(chain.to_vec(), key.clone_key(), &provider) {
        Ok(_) => {}
        Err(rustls::Error::InconsistentKeys(_)) => return Err(mismatch()),
        Err(error) => {
            return Err(TlsError::Malformed { file: key_file.to_owned(), detail: error.to_string() });
        }
    }
    verify::check_issued(roots, chain, &provider, UnixTime::now()).map_err(|error| TlsError::NotIssuedByCa {
        cert: cert_file.to_owned(),
        ca: ca_file.to_owned(),
        detail: error.to_string(),
    })
}
