//! The processes that demo and replay start: a directory, and ranks with their settings.

use std::sync::mpsc::{sync_channel, Receiver};

use anyhow::{bail, Result};
use kvfabric_node::Settings;

use crate::args::TransportArg;
use crate::limits;
use crate::process::{next_event, ChildProcess, FromChild};
use crate::protocol::{ChildEvent, Role};

/// How long a peer may be silent: these processes share their machine's processors, and a rank that waits for one must
/// not count as dead. The death of a process shows at once all the same, since the kernel closes its connections.
const PEER_TIMEOUT_MS: u64 = 5000;

/// A directory in a process of its own, on a free port of the loopback interface.
pub struct DirectoryProcess {
    child: ChildProcess,
    address: String,
    _events: Receiver<FromChild>,
}

impl DirectoryProcess {
    /// Starts it and waits until it is ready.
    ///
    /// # Errors
    /// It failed.
    pub fn start(settings: &Settings) -> Result<Self> {
        let settings = Settings {
            listen: Some("127.0.0.1:0".into()),
            cluster: Some(cluster_name()),
            table_bytes: settings.table_bytes.clone(),
            peer_timeout_ms: settings.peer_timeout_ms.or(Some(PEER_TIMEOUT_MS)),
            ..Settings::default()
        };
        let (sender, events) = sync_channel(limits::EVENT_QUEUE_MAX);
        let role = Role::Directory { settings: Box::new(settings) };
        let mut child = ChildProcess::spawn("directory", &role, 0, sender)?;
        match next_event(&mut child, &events, limits::CHILD_READY)? {
            ChildEvent::Ready { address: Some(address), .. } => Ok(Self { child, address, _events: events }),
            other => bail!("the directory said {other:?} instead of being ready"),
        }
    }

    /// Where it listens.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Ends it.
    ///
    /// # Errors
    /// It did not end well.
    pub fn stop(mut self) -> Result<()> {
        self.child.stop()
    }
}

/// A cluster of this parent process alone, so that nobody joins by mistake.
fn cluster_name() -> String {
    format!("kvfabric-{}", std::process::id())
}

/// Settings of a rank that demo or replay starts. Taken from the user's settings is what says how a rank works; who it
/// is and where it listens is decided here, since there are several of them on one machine.
pub fn rank_settings(user: &Settings, directory: &str, transport: Option<TransportArg>) -> Settings {
    Settings {
        directory: Some(directory.to_owned()),
        cluster: Some(cluster_name()),
        listen: Some("127.0.0.1:0".into()),
        transport: transport
            .map_or_else(|| user.transport.clone(), |transport| Some(transport.name().to_owned())),
        peer_timeout_ms: user.peer_timeout_ms.or(Some(PEER_TIMEOUT_MS)),
        verify: user.verify.clone(),
        data_tls: user.data_tls,
        ns_secret_file: user.ns_secret_file.clone(),
        extent_bytes: user.extent_bytes.clone(),
        huge_pages: user.huge_pages.clone(),
        socket_dir: user.socket_dir.clone(),
        lanes: user.lanes,
        start_timeout_ms: user.start_timeout_ms,
        name: None,
        engine: None,
        advertise: None,
        tls_dir: None,
        insecure_no_auth: None,
        metrics_listen: None,
        pool_bytes: None,
        table_bytes: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_take_how_they_work_from_the_user_and_who_they_are_from_here() {
        let user = Settings {
            name: Some("mine".into()),
            listen: Some("0.0.0.0:1".into()),
            metrics_listen: Some("0.0.0.0:2".into()),
            verify: Some("always".into()),
            transport: Some("tcp".into()),
            ..Settings::default()
        };
        let rank = rank_settings(&user, "127.0.0.1:7", None);
        assert_eq!((rank.name, rank.metrics_listen), (None, None));
        assert_eq!(rank.listen.as_deref(), Some("127.0.0.1:0"));
        assert_eq!((rank.verify.as_deref(), rank.transport.as_deref()), (Some("always"), Some("tcp")));
        assert_eq!(rank.peer_timeout_ms, Some(PEER_TIMEOUT_MS));
        let forced = rank_settings(&user, "127.0.0.1:7", Some(TransportArg::Shm));
        assert_eq!(forced.transport.as_deref(), Some("shm"));
    }
}
