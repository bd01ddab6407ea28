//! The process side: reads a role, then commands, and answers each with one line.

mod loads;
mod rank;

use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use kvfabric_node::{DirectoryConfig, DirectoryServer, StartError};

use crate::protocol::{Command, DirectoryFigures, DirectorySpec, Reply, Role};

/// Entry point of the binary: ends when the harness closes its standard input.
pub fn main() {
    die_with_parent();
    let filter = std::env::var("KVFABRIC_LOG").unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    let mut lines = std::io::stdin().lock().lines().map(|line| line.expect("standard input is a pipe"));
    let Some(role) = lines.next() else { return };
    let commands = lines.map(|line| serde_json::from_str(&line).expect("the harness sends commands"));
    match serde_json::from_str(&role).expect("the first line is a role") {
        Role::Rank(spec) => rank::run(&spec, commands),
        Role::Directory(spec) => directory(&spec, commands),
    }
}

/// The kernel ends this process with the thread that started it.
fn die_with_parent() {
    let parent = std::env::args().nth(1).expect("the parent's process id is the first argument");
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .expect("a process may ask for its end");
    let adopted = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().to_string()) != Some(parent);
    assert!(!adopted, "the parent is gone");
}

fn reply(reply: &Reply) {
    let mut line = serde_json::to_vec(reply).expect("a reply is JSON");
    line.push(b'\n');
    let mut out = std::io::stdout().lock();
    out.write_all(&line).and_then(|()| out.flush()).expect("standard output is a pipe");
}

/// The name of an error's variant, without its fields.
fn kind_of(error: &impl std::fmt::Debug) -> String {
    format!("{error:?}").chars().take_while(char::is_ascii_alphanumeric).collect()
}

fn start_failed(error: &StartError, begun: Instant) {
    reply(&Reply::Error {
        kind: kind_of(error),
        message: error.to_string(),
        after_ms: millis(begun.elapsed()),
    });
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn directory(spec: &DirectorySpec, commands: impl Iterator<Item = Command>) {
    let begun = Instant::now();
    let mut config = DirectoryConfig::new(spec.listen.parse().expect("an address"));
    config.peer_timeout = Duration::from_millis(spec.peer_timeout_ms);
    let server = match DirectoryServer::start(config) {
        Ok(server) => server,
        Err(error) => return start_failed(&error, begun),
    };
    let address = server.local_addr().to_string();
    reply(&Reply::Ready { address, start_ms: millis(begun.elapsed()) });
    for command in commands {
        assert!(matches!(command, Command::Stats), "a directory only has figures, not {command:?}");
        let core = server.stats().core;
        reply(&Reply::Directory(DirectoryFigures {
            keys: core.keys,
            ranks_live: u64::from(core.ranks_live),
            ranks_hidden: u64::from(core.ranks_hidden),
        }));
    }
    server.close();
}
