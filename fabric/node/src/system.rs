//! Small things from the operating system.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvfabric_transport_control::{Endpoint, EndpointConfig, Security, Tls};

use crate::{SecurityChoice, StartError};

/// The longest wait that is told from no limit at all: the clock has an end, which an engine's "for ever" may pass.
const WAIT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// The instant `delay` from now, a year from now for longer ones.
pub(crate) fn after(delay: Duration) -> Instant {
    Instant::now() + delay.min(WAIT_MAX)
}

/// A random number from the operating system.
pub(crate) fn random_u64() -> Result<u64, StartError> {
    getrandom::u64().map_err(|error| StartError::System {
        what: "the operating system gives no random numbers".into(),
        source: std::io::Error::other(error.to_string()),
    })
}

/// A runtime while a start may still fail. A runtime that is dropped on a thread of another one panics; this one goes
/// quietly.
pub(crate) struct StartingRuntime(Option<tokio::runtime::Runtime>);

impl StartingRuntime {
    /// The start succeeded: whoever owns the runtime ends it with [`end_runtime`].
    pub(crate) fn started(mut self) -> Option<tokio::runtime::Runtime> {
        self.0.take()
    }
}

impl Drop for StartingRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// A tokio runtime for the control plane, and its handle. Two workers: a long lookup must not hold up a publish.
pub(crate) fn runtime(name: &str) -> Result<(StartingRuntime, tokio::runtime::Handle), StartError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name(name)
        .enable_all()
        .build()
        .map_err(|source| StartError::System { what: "cannot start the control threads".into(), source })?;
    let handle = runtime.handle().clone();
    Ok((StartingRuntime(Some(runtime)), handle))
}

/// Settings of an endpoint. A silent peer is judged by the peer timeout, so its connection must not time out before that:
/// a lost control connection hides a rank as well.
pub(crate) fn endpoint_config(tls: Tls, peer_timeout: Duration) -> EndpointConfig {
    let mut config = EndpointConfig::new(tls);
    config.idle_timeout = config.idle_timeout.max(peer_timeout.saturating_mul(2));
    config
}

/// Tells the peers, if there are any to tell, then ends the runtime. On a thread of its own, because the caller may be on another runtime's.
pub(crate) fn end_runtime(
    runtime: tokio::runtime::Runtime,
    endpoint: Endpoint,
    farewell: Option<&'static str>,
) {
    let ending = std::thread::Builder::new().name("kvf-ending".into()).spawn(move || {
        if let Some(reason) = farewell {
            runtime.block_on(endpoint.shutdown(reason));
        }
        drop(endpoint);
        runtime.shutdown_timeout(Duration::from_secs(1));
    });
    match ending {
        Ok(thread) => {
            if thread.join().is_err() {
                tracing::error!("ending the control threads panicked");
            }
        }
        // Without a thread the runtime was dropped with the closure, which ends it without a farewell.
        Err(error) => tracing::warn!(%error, "cannot say farewell to the peers"),
    }
}

pub(crate) fn security(choice: &SecurityChoice) -> Security {
    match choice {
        SecurityChoice::Development => Security::Dev,
        SecurityChoice::TlsDir(dir) => Security::Dir(dir.clone()),
        SecurityChoice::InsecureNoAuth => Security::InsecureNoAuth,
    }
}

/// Folder of Unix sockets: the given one, else a private one of this user. Created with mode 0700.
pub(crate) fn socket_dir(given: Option<&Path>) -> Result<PathBuf, StartError> {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt};
    let private = given.is_none();
    let dir = match given {
        Some(dir) => dir.to_path_buf(),
        None => match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
            Some(runtime) => PathBuf::from(runtime).join("kvfabric"),
            None => std::env::temp_dir().join(format!("kvfabric-{}", rustix::process::geteuid().as_raw())),
        },
    };
    let fail =
        |source| StartError::System { what: format!("cannot use socket folder {}", dir.display()), source };
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(fail)?;
    if private {
        // A folder in a shared place that somebody else made first could serve his sockets to us.
        let metadata = std::fs::symlink_metadata(&dir).map_err(fail)?;
        if !metadata.is_dir()
            || metadata.uid() != rustix::process::geteuid().as_raw()
            || metadata.mode() & 0o022 != 0
        {
            return Err(fail(std::io::Error::other(
                "it does not belong to this user alone; remove it or give --socket-dir",
            )));
        }
    }
    Ok(dir)
}
