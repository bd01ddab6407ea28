//! Making certificates: what `kvfabric certs DIR [--name NAME]…` does.
//!
//! A directory gets an authority (`ca.pem`, `ca-key.pem`) once, and one certificate (`cert.pem`, `key.pem`) whose names
//! grow with each run. Another host's directory starts as a copy of `ca.pem` and `ca-key.pem`; a host that only runs
//! ranks needs no `ca-key.pem`.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rcgen::{
    date_time_ymd, BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    IsCa, Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use super::files::{self, DirLock};
use super::{check_pair, library, peer_names, TlsError, CA_FILE, CA_KEY_FILE, CERT_FILE, KEY_FILE};
use crate::limits::{CA_VALIDITY, CERTIFICATE_BACKDATE, CERTIFICATE_VALIDITY, NAMES_MAX, NAME_BYTES_MAX};

/// Names that every certificate gets, for processes on one host.
const LOOPBACK_NAMES: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// What [`generate`] did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Whether the authority was made now rather than reused.
    pub ca_created: bool,
    /// All names of the certificate, sorted.
    pub names: Vec<String>,
    /// The authority's certificate: goes to every host.
    pub ca: PathBuf,
    /// The authority's key: stays where certificates are made.
    pub ca_key: PathBuf,
    /// The certificate.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

/// Makes what is missing in `dir` and issues the certificate anew, with the names it had, loopback's, this host's own
/// name, and `names` (host names, IP addresses, rank names or prefixes of rank names, see
/// [`san_allows`](crate::san_allows)). The authority and the certificate's key are reused, so files may be read while
/// this runs.
///
/// # Errors
/// [`TlsError`], which names the file and the remedy.
pub fn generate(dir: &Path, names: &[String]) -> Result<Report, TlsError> {
    files::create_dir(dir)?;
    let lock = DirLock::acquire(dir)?;
    let mut all: Vec<String> = LOOPBACK_NAMES.iter().map(|name| (*name).to_owned()).collect();
    all.extend(host_name());
    all.extend(names.iter().cloned());
    generate_locked(dir, &all, &lock)
}

/// As [`generate`], with exactly `names` besides those that the certificate has already.
pub(crate) fn generate_locked(dir: &Path, names: &[String], _lock: &DirLock) -> Result<Report, TlsError> {
    let report = Report {
        ca_created: false,
        names: Vec::new(),
        ca: dir.join(CA_FILE),
        ca_key: dir.join(CA_KEY_FILE),
        cert: dir.join(CERT_FILE),
        key: dir.join(KEY_FILE),
    };
    let names = collect_names(&report.cert, names)?;
    let (issuer, ca_created) = load_or_create_ca(&report.ca, &report.ca_key)?;
    let key = load_or_create_key(&report.key)?;
    let certificate = leaf_params(&names)?.signed_by(&key, &issuer).map_err(library)?;
    files::replace(&report.cert, &certificate.pem(), 0o644)?;
    Ok(Report { ca_created, names: names.into_iter().collect(), ..report })
}

/// A certificate for [`Security::InsecureNoAuth`](super::Security::InsecureNoAuth), which nobody checks.
pub(crate) fn self_signed() -> Result<(CertificateDer<'static>, PrivateKeyDer<'static>), TlsError> {
    let key = KeyPair::generate().map_err(library)?;
    let names = BTreeSet::from(["localhost".to_owned()]);
    let certificate = leaf_params(&names)?.self_signed(&key).map_err(library)?;
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    Ok((certificate.into(), key))
}

fn collect_names(cert: &Path, names: &[String]) -> Result<BTreeSet<String>, TlsError> {
    let mut all: BTreeSet<String> = match files::read_certificates(cert) {
        Ok(chain) => chain.first().map(peer_names).unwrap_or_default().into_iter().collect(),
        Err(TlsError::Missing { .. }) => BTreeSet::new(),
        Err(error) => return Err(error),
    };
    for name in names {
        check_name(name)?;
        all.insert(name.clone());
    }
    if all.len() > NAMES_MAX {
        return Err(TlsError::TooManyNames { file: cert.to_owned(), limit: NAMES_MAX });
    }
    Ok(all)
}

fn check_name(name: &str) -> Result<(), TlsError> {
    let invalid = |detail| Err(TlsError::InvalidName { name: name.to_owned(), detail });
    if name.is_empty() {
        return invalid("it is empty");
    }
    if name.len() > NAME_BYTES_MAX {
        return invalid("it is longer than 255 bytes");
    }
    if !name.bytes().all(|byte| byte.is_ascii_graphic()) {
        return invalid("only printable ASCII without spaces is allowed");
    }
    Ok(())
}

fn host_name() -> Option<String> {
    let system = rustix::system::uname();
    let name = system.nodename().to_str().ok()?.to_owned();
    check_name(&name).is_ok().then_some(name)
}

fn load_or_create_ca(ca: &Path, ca_key: &Path) -> Result<(Issuer<'static, KeyPair>, bool), TlsError> {
    match files::read_certificates(ca) {
        Ok(certificates) => Ok((load_ca(ca, ca_key, &certificates)?, false)),
        Err(TlsError::Missing { .. }) => Ok((create_ca(ca, ca_key)?, true)),
        Err(error) => Err(error),
    }
}

fn load_ca(
    ca: &Path,
    ca_key: &Path,
    certificates: &[CertificateDer<'static>],
) -> Result<Issuer<'static, KeyPair>, TlsError> {
    let malformed = |file: &Path, detail: String| TlsError::Malformed { file: file.to_owned(), detail };
    // The authority that signs is the first; others may follow while authorities are exchanged.
    let certificate = certificates.first().ok_or_else(|| malformed(ca, "it is empty".to_owned()))?;
    files::check_dates(ca, certificate, Duration::ZERO)?;
    let pem = match files::read_pem(ca_key) {
        Ok(pem) => String::from_utf8(pem).map_err(|error| malformed(ca_key, error.to_string()))?,
        Err(TlsError::Missing { .. }) => {
            return Err(TlsError::CaKeyMissing { ca: ca.to_owned(), key: ca_key.to_owned() });
        }
        Err(error) => return Err(error),
    };
    let key = KeyPair::from_pem(&pem).map_err(|error| malformed(ca_key, error.to_string()))?;
    let key_der = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let roots = files::root_store(ca, std::slice::from_ref(certificate))?;
    match check_pair(&roots, std::slice::from_ref(certificate), &key_der, (ca, ca, ca_key)) {
        // An authority is not an end entity, so only the key's fit is of interest here.
        Ok(()) | Err(TlsError::NotIssuedByCa { .. }) => {}
        Err(error) => return Err(error),
    }
    Issuer::from_ca_cert_der(certificate, key).map_err(|error| malformed(ca, error.to_string()))
}

fn create_ca(ca: &Path, ca_key: &Path) -> Result<Issuer<'static, KeyPair>, TlsError> {
    let mut nonce = [0u8; 8];
    getrandom::fill(&mut nonce).map_err(library)?;
    let mut params = base_params(CA_VALIDITY)?;
    // Authorities differ in name, so that a certificate of another one fails as such and not as a bad signature.
    params
        .distinguished_name
        .push(DnType::CommonName, format!("kvfabric authority {:016x}", u64::from_le_bytes(nonce)));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages =
        vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
    let key = KeyPair::generate().map_err(library)?;
    let certificate = params.self_signed(&key).map_err(library)?;
    // The key first: an authority without key would block every later run, a key without authority is replaced.
    files::replace(ca_key, &key.serialize_pem(), 0o600)?;
    files::replace(ca, &certificate.pem(), 0o644)?;
    Ok(Issuer::new(params, key))
}

fn load_or_create_key(file: &Path) -> Result<KeyPair, TlsError> {
    match files::read_pem(file) {
        Ok(pem) => {
            let malformed = |detail: String| TlsError::Malformed { file: file.to_owned(), detail };
            let pem = String::from_utf8(pem).map_err(|error| malformed(error.to_string()))?;
            KeyPair::from_pem(&pem).map_err(|error| malformed(error.to_string()))
        }
        Err(TlsError::Missing { .. }) => {
            let key = KeyPair::generate().map_err(library)?;
            files::replace(file, &key.serialize_pem(), 0o600)?;
            Ok(key)
        }
        Err(error) => Err(error),
    }
}

fn base_params(validity: Duration) -> Result<CertificateParams, TlsError> {
    let now = date_time_ymd(1970, 1, 1) + files::unix_now()?;
    let mut params = CertificateParams::default();
    params.not_before = now - CERTIFICATE_BACKDATE;
    params.not_after = now + validity;
    params.distinguished_name = DistinguishedName::new();
    Ok(params)
}

fn leaf_params(names: &BTreeSet<String>) -> Result<CertificateParams, TlsError> {
    let mut params = base_params(CERTIFICATE_VALIDITY)?;
    params.distinguished_name.push(DnType::CommonName, "kvfabric");
    for name in names {
        params.subject_alt_names.push(match name.parse::<IpAddr>() {
            Ok(address) => SanType::IpAddress(address),
            Err(_) => SanType::DnsName(name.as_str().try_into().map_err(library)?),
        });
    }
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}
