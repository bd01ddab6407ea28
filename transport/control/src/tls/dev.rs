//! The user's development authority: certificates for processes of one user on one host.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::files::{self, io_error, DirLock};
use super::{certs, TlsError, CA_FILE, CA_KEY_FILE, CERT_FILE, KEY_FILE};
use crate::limits::DEV_RENEW_BEFORE;

/// The development authority's directory: `$XDG_STATE_HOME/kvfabric/dev-ca`, else `~/.local/state/kvfabric/dev-ca`
/// (design 1.9).
///
/// # Errors
/// [`TlsError::NoStateDirectory`] if neither variable is an absolute path.
pub fn dev_ca_dir() -> Result<PathBuf, TlsError> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/state")));
    Ok(state.ok_or(TlsError::NoStateDirectory)?.join("kvfabric/dev-ca"))
}

/// Makes the authority and its certificate usable, and returns with the directory locked, so that the caller reads
/// files that belong together however many processes start at once.
pub(crate) fn ensure(dir: &Path) -> Result<DirLock, TlsError> {
    files::create_dir(dir)?;
    let metadata = fs::metadata(dir).map_err(io_error("look at", dir))?;
    if metadata.uid() != rustix::process::geteuid().as_raw() {
        return Err(TlsError::ForeignDirectory { dir: dir.to_owned() });
    }
    if metadata.permissions().mode() & 0o077 != 0 {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o700)).map_err(io_error("protect", dir))?;
    }
    let lock = DirLock::acquire(dir)?;
    if let Err(problem) = usable(dir) {
        match problem {
            TlsError::Missing { .. } => {}
            // Nobody else made these files, and nothing depends on them beyond running processes of this user.
            problem => tracing::warn!(%problem, "development certificates are made anew"),
        }
        renew(dir, &lock)?;
    }
    Ok(lock)
}

fn usable(dir: &Path) -> Result<(), TlsError> {
    let identity = files::load_identity(dir)?;
    for certificate in &identity.chain {
        files::check_dates(&dir.join(CERT_FILE), certificate, DEV_RENEW_BEFORE)?;
    }
    Ok(())
}

fn renew(dir: &Path, lock: &DirLock) -> Result<(), TlsError> {
    let names: Vec<String> =
        ["*", "localhost", "127.0.0.1", "::1"].iter().map(|name| (*name).to_owned()).collect();
    // First with the authority that is there, so that running processes keep trusting it; then from nothing.
    remove(dir, &[CERT_FILE, KEY_FILE])?;
    if certs::generate_locked(dir, &names, lock).is_ok() && usable(dir).is_ok() {
        return Ok(());
    }
    remove(dir, &[CA_FILE, CA_KEY_FILE, CERT_FILE, KEY_FILE])?;
    certs::generate_locked(dir, &names, lock)?;
    usable(dir)
}

fn remove(dir: &Path, names: &[&str]) -> Result<(), TlsError> {
    for name in names {
        let file = dir.join(name);
        match fs::remove_file(&file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(io_error("remove", &file)(error));
            }
            _ => {}
        }
    }
    Ok(())
}
