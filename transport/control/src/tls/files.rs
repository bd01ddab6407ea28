//! Files of a TLS directory: reading with checks, writing by rename, and the lock of those who write.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::{flock, FlockOperation};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::RootCertStore;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::{check_pair, library, TlsError, CA_FILE, CERT_FILE, KEY_FILE};
use crate::limits::{CERTS_LOCK_TIMEOUT, PEM_BYTES_MAX};

/// The lock that everybody who writes into a TLS directory holds.
const LOCK_FILE: &str = ".lock";

/// What a process needs of a TLS directory.
pub(crate) struct Identity {
    pub(crate) roots: RootCertStore,
    pub(crate) chain: Vec<CertificateDer<'static>>,
    pub(crate) key: PrivateKeyDer<'static>,
}

pub(crate) fn io_error(action: &'static str, file: &Path) -> impl FnOnce(io::Error) -> TlsError {
    let file = file.to_owned();
    move |error| TlsError::Io { action, file, kind: error.kind() }
}

/// Reads and checks `ca.pem`, `cert.pem` and `key.pem`.
pub(crate) fn load_identity(dir: &Path) -> Result<Identity, TlsError> {
    let (ca_file, cert_file, key_file) = (dir.join(CA_FILE), dir.join(CERT_FILE), dir.join(KEY_FILE));
    let authorities = read_certificates(&ca_file)?;
    let chain = read_certificates(&cert_file)?;
    let key = read_key(&key_file)?;
    for authority in &authorities {
        check_dates(&ca_file, authority, Duration::ZERO)?;
    }
    for certificate in &chain {
        check_dates(&cert_file, certificate, Duration::ZERO)?;
    }
    let roots = root_store(&ca_file, &authorities)?;
    check_pair(&roots, &chain, &key, (&ca_file, &cert_file, &key_file))?;
    Ok(Identity { roots, chain, key })
}

pub(crate) fn root_store(
    file: &Path,
    authorities: &[CertificateDer<'static>],
) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots
            .add(authority.clone())
            .map_err(|error| TlsError::Malformed { file: file.to_owned(), detail: error.to_string() })?;
    }
    Ok(roots)
}

/// The whole of a PEM file; a file of unreasonable size is refused before it is read.
pub(crate) fn read_pem(file: &Path) -> Result<Vec<u8>, TlsError> {
    let dir = file.parent().unwrap_or(Path::new("."));
    let opened = File::open(file).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => TlsError::Missing { file: file.to_owned(), dir: dir.to_owned() },
        kind => TlsError::Io { action: "open", file: file.to_owned(), kind },
    })?;
    let mut bytes = Vec::new();
    opened.take(PEM_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(io_error("read", file))?;
    if bytes.len() as u64 > PEM_BYTES_MAX {
        let detail = format!("it is larger than {PEM_BYTES_MAX} bytes");
        return Err(TlsError::Malformed { file: file.to_owned(), detail });
    }
    Ok(bytes)
}

/// All certificates of a PEM file, at least one.
pub(crate) fn read_certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let malformed = |detail: String| TlsError::Malformed { file: file.to_owned(), detail };
    let bytes = read_pem(file)?;
    let certificates = CertificateDer::pem_slice_iter(&bytes)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| malformed(error.to_string()))?;
    if certificates.is_empty() {
        return Err(malformed("it holds no certificate".to_owned()));
    }
    Ok(certificates)
}

/// The private key of a PEM file.
pub(crate) fn read_key(file: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let bytes = read_pem(file)?;
    PrivateKeyDer::from_pem_slice(&bytes).map_err(|error| TlsError::Malformed {
        file: file.to_owned(),
        detail: format!("it holds no private key ({error})"),
    })
}

/// Whether a certificate is valid now and for `margin` longer.
pub(crate) fn check_dates(
    file: &Path,
    certificate: &CertificateDer<'_>,
    margin: Duration,
) -> Result<(), TlsError> {
    let (_, parsed) = X509Certificate::from_der(certificate)
        .map_err(|error| TlsError::Malformed { file: file.to_owned(), detail: error.to_string() })?;
    let now = i64::try_from(unix_now()?.as_secs()).unwrap_or(i64::MAX);
    let margin = i64::try_from(margin.as_secs()).unwrap_or(i64::MAX);
    let validity = parsed.validity();
    if validity.not_before.timestamp() > now {
        return Err(TlsError::NotYetValid {
            file: file.to_owned(),
            not_before: validity.not_before.to_string(),
        });
    }
    if validity.not_after.timestamp() < now.saturating_add(margin) {
        return Err(TlsError::Expired { file: file.to_owned(), not_after: validity.not_after.to_string() });
    }
    Ok(())
}

/// Time since 1970.
pub(crate) fn unix_now() -> Result<Duration, TlsError> {
    SystemTime::now().duration_since(UNIX_EPOCH).map_err(library)
}

/// Creates `dir` and its parents; what is created is the user's alone.
pub(crate) fn create_dir(dir: &Path) -> Result<(), TlsError> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(io_error("create", dir))
}

/// Replaces `file` as a whole: readers see the old content or the new, never a part.
pub(crate) fn replace(file: &Path, content: &str, mode: u32) -> Result<(), TlsError> {
    let mut nonce = [0u8; 8];
    getrandom::fill(&mut nonce).map_err(library)?;
    let mut name = file.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{:016x}.tmp", u64::from_le_bytes(nonce)));
    let temporary = file.with_file_name(name);
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&temporary)
        .and_then(|mut opened| opened.write_all(content.as_bytes()).and_then(|()| opened.sync_all()))
        .and_then(|()| fs::rename(&temporary, file));
    written.map_err(|error| {
        // The rename did not happen; what is left of the temporary file is of no use to anybody.
        let _ = fs::remove_file(&temporary);
        io_error("write", file)(error)
    })
}

/// Exclusive right to write into a directory, until dropped.
#[derive(Debug)]
pub(crate) struct DirLock {
    /// Closing the file releases the lock.
    _file: File,
}

impl DirLock {
    /// Waits for the lock, at most [`CERTS_LOCK_TIMEOUT`].
    pub(crate) fn acquire(dir: &Path) -> Result<Self, TlsError> {
        let path: PathBuf = dir.join(LOCK_FILE);
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(io_error("open", &path))?;
        let started = Instant::now();
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self { _file: file }),
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {}
                Err(errno) => {
                    return Err(TlsError::Io {
                        action: "lock",
                        file: path,
                        kind: io::Error::from(errno).kind(),
                    });
                }
            }
            if started.elapsed() >= CERTS_LOCK_TIMEOUT {
                return Err(TlsError::Locked { file: path });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
