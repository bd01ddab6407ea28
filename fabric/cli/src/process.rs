//! Child processes of this binary, and the line protocol with them. Every wait is bounded, and no child outlives its
//! parent.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{sync_channel, Receiver, RecvTimeoutError, SyncSender, TrySendError};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, Context, Result};
use serde::de::DeserializeOwned;
use serde::Serialize;

use crate::limits;
use crate::protocol::{ChildEvent, Role};

/// Name of the hidden subcommand that a child runs.
pub const CHILD_COMMAND: &str = "child";

/// What comes from a child.
#[derive(Debug)]
pub enum Incoming {
    /// An event.
    Event(ChildEvent),
    /// A line that is none.
    Garbled(String),
    /// The child closed its standard output: it ended, or is about to.
    Ended,
}

/// A message from one of several children.
#[derive(Debug)]
pub struct FromChild {
    /// Index given at [`ChildProcess::spawn`].
    pub child: usize,
    /// What came.
    pub incoming: Incoming,
}

/// A child process. Dropping it kills the process.
#[derive(Debug)]
pub struct ChildProcess {
    name: String,
    process: Child,
    commands: Option<SyncSender<String>>,
    status: Option<ExitStatus>,
}

impl ChildProcess {
    /// Starts a child. Its events go to `events`, marked with `index`.
    ///
    /// Must be called on a thread that lives as long as the child should: the kernel kills the child when that thread
    /// ends.
    ///
    /// # Errors
    /// The system's reason.
    pub fn spawn(name: &str, role: &Role, index: usize, events: SyncSender<FromChild>) -> Result<Self> {
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let mut process = Command::new(program)
            .args([CHILD_COMMAND, "--parent-pid", &std::process::id().to_string(), "--name", name])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start process {name:?}"))?;
        let (Some(stdin), Some(stdout)) = (process.stdin.take(), process.stdout.take()) else {
            bail!("process {name:?} was started without pipes");
        };
        let (commands, queue) = sync_channel(limits::CHILD_QUEUE_MAX);
        let mut child = Self { name: name.to_owned(), process, commands: Some(commands), status: None };
        std::thread::Builder::new()
            .name(format!("to-{name}"))
            .spawn(move || write_commands(stdin, &queue))
            .context("cannot start a thread")?;
        std::thread::Builder::new()
            .name(format!("from-{name}"))
            .spawn(move || read_events(stdout, index, &events))
            .context("cannot start a thread")?;
        child.send(role)?;
        Ok(child)
    }

    /// Name of the child.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Queues a command; never blocks.
    ///
    /// # Errors
    /// The child ended, or does not read.
    pub fn send<T: Serialize>(&mut self, command: &T) -> Result<()> {
        let line = serde_json::to_string(command).context("cannot write a command")?;
        let sent = self.commands.as_ref().map(|commands| commands.try_send(line));
        match sent {
            Some(Ok(())) => Ok(()),
            Some(Err(TrySendError::Full(_))) => {
                bail!("process {:?} does not take its commands; is it stopped?", self.name)
            }
            Some(Err(TrySendError::Disconnected(_))) | None => Err(self.ended()),
        }
    }

    /// An error that says how the child ended, for a child that was expected to go on.
    pub fn ended(&mut self) -> anyhow::Error {
        match self.reap(limits::CHILD_REAP) {
            Some(status) => anyhow!("process {:?} ended unexpectedly ({status})", self.name),
            None => anyhow!("process {:?} closed its pipe without ending", self.name),
        }
    }

    /// Kills the child at once (SIGKILL) and waits for its end.
    ///
    /// # Errors
    /// The kernel did not end it in time.
    pub fn kill(&mut self) -> Result<()> {
        self.commands = None;
        if self.status.is_none() {
            // An error means that it is gone already, which reap finds out.
            let _ = self.process.kill();
        }
        match self.reap(limits::CHILD_REAP) {
            Some(_) => Ok(()),
            None => bail!("process {:?} does not end although it was killed", self.name),
        }
    }

    /// Closes the child's standard input, which tells it to end.
    pub fn close(&mut self) {
        self.commands = None;
    }

    /// Closes the child's standard input and waits for its end; kills it when that takes too long.
    ///
    /// # Errors
    /// It had to be killed, or ended with another code than 0.
    pub fn stop(&mut self) -> Result<()> {
        self.commands = None;
        match self.reap(limits::CHILD_STOP) {
            Some(status) if status.success() => Ok(()),
            Some(status) => bail!("process {:?} ended with {status}", self.name),
            None => {
                self.kill()?;
                bail!("process {:?} did not end within {:?} and was killed", self.name, limits::CHILD_STOP)
            }
        }
    }

    fn reap(&mut self, timeout: Duration) -> Option<ExitStatus> {
        let until = Instant::now() + timeout;
        while self.status.is_none() {
            match self.process.try_wait() {
                Ok(Some(status)) => self.status = Some(status),
                Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(2)),
                Ok(None) | Err(_) => break,
            }
        }
        self.status
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            tracing::warn!("{error}");
        }
    }
}

fn write_commands(mut stdin: ChildStdin, queue: &Receiver<String>) {
    // Ends when the parent drops its sender, which closes the child's standard input, or when the child is gone.
    for mut line in queue {
        line.push('\n');
        if stdin.write_all(line.as_bytes()).is_err() {
            return;
        }
    }
}

fn read_events(stdout: ChildStdout, child: usize, events: &SyncSender<FromChild>) {
    let mut lines = LineReader::new(stdout);
    loop {
        let incoming = match lines.next_line() {
            Ok(Some(line)) => match serde_json::from_slice(line) {
                Ok(event) => Incoming::Event(event),
                Err(error) => Incoming::Garbled(format!("{error}: {}", String::from_utf8_lossy(line))),
            },
            Ok(None) | Err(_) => Incoming::Ended,
        };
        let ended = matches!(incoming, Incoming::Ended);
        if events.send(FromChild { child, incoming }).is_err() || ended {
            return;
        }
    }
}

/// A child could not start because the transport asked for does not work on this machine.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TransportUnavailable(pub String);

/// Waits for the next event of one child.
///
/// # Errors
/// The child failed, ended, wrote something else, or nothing came in time.
pub fn next_event(
    child: &mut ChildProcess,
    events: &Receiver<FromChild>,
    timeout: Duration,
) -> Result<ChildEvent> {
    match events.recv_timeout(timeout) {
        Ok(FromChild {
            incoming: Incoming::Event(ChildEvent::Failed { message, transport_unavailable }),
            ..
        }) => {
            if transport_unavailable {
                bail!(TransportUnavailable(message));
            }
            Err(anyhow!(message).context(format!("process {:?} failed", child.name())))
        }
        Ok(FromChild { incoming: Incoming::Event(event), .. }) => Ok(event),
        Ok(FromChild { incoming: Incoming::Garbled(line), .. }) => {
            bail!("process {:?} wrote a line that is no event: {line}", child.name())
        }
        Ok(FromChild { incoming: Incoming::Ended, .. }) | Err(RecvTimeoutError::Disconnected) => {
            Err(child.ended())
        }
        Err(RecvTimeoutError::Timeout) => {
            bail!("process {:?} did not answer within {timeout:?}", child.name())
        }
    }
}

/// Lines of bounded length from a pipe.
pub struct LineReader<R> {
    source: BufReader<R>,
    line: Vec<u8>,
}

impl<R: Read> LineReader<R> {
    /// Reads from `source`.
    pub fn new(source: R) -> Self {
        Self { source: BufReader::new(source), line: Vec::new() }
    }

    /// The next line, or `None` at the end. A last line without newline was cut off: it counts as the end.
    ///
    /// # Errors
    /// Those of the source, and a line beyond [`limits::LINE_BYTES_MAX`].
    pub fn next_line(&mut self) -> std::io::Result<Option<&[u8]>> {
        self.line.clear();
        let limit = limits::LINE_BYTES_MAX as u64 + 1;
        (&mut self.source).take(limit).read_until(b'\n', &mut self.line)?;
        if self.line.last() == Some(&b'\n') {
            self.line.pop();
            return Ok(Some(&self.line));
        }
        if self.line.len() > limits::LINE_BYTES_MAX {
            return Err(std::io::Error::other(format!("line longer than {} bytes", limits::LINE_BYTES_MAX)));
        }
        Ok(None)
    }
}

/// The child's side: commands in.
pub struct Commands(LineReader<std::io::Stdin>);

impl Commands {
    /// From standard input.
    pub fn new() -> Self {
        Self(LineReader::new(std::io::stdin()))
    }

    /// The next command, `None` when the parent closed the pipe.
    ///
    /// # Errors
    /// The pipe's, and a line that is no command.
    pub fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        match self.0.next_line().context("cannot read from the parent process")? {
            Some(line) => {
                Ok(Some(serde_json::from_slice(line).context("the parent process sent a bad command")?))
            }
            None => Ok(None),
        }
    }
}

/// The child's side: writes one event.
///
/// # Errors
/// The pipe's.
pub fn send_event(event: &ChildEvent) -> Result<()> {
    let mut line = serde_json::to_vec(event).context("cannot write an event")?;
    line.push(b'\n');
    let mut out = std::io::stdout().lock();
    out.write_all(&line).and_then(|()| out.flush()).context("cannot write to the parent process")
}

/// Makes the kernel kill this process when its parent ends.
///
/// # Errors
/// The parent is gone already, or the kernel refuses.
pub fn die_with_parent(parent_pid: u32) -> Result<()> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .context("cannot bind this process to its parent")?;
    // The parent may have ended before the call above; then another process has adopted this one.
    let parent = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get());
    if parent.and_then(|pid| u32::try_from(pid).ok()) != Some(parent_pid) {
        bail!("the parent process {parent_pid} is gone");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_bounded_and_cut_off_lines_are_not_used() {
        let mut lines = LineReader::new(&b"one\n\ntwo\nthr"[..]);
        assert_eq!(lines.next_line().unwrap(), Some(&b"one"[..]));
        assert_eq!(lines.next_line().unwrap(), Some(&b""[..]));
        assert_eq!(lines.next_line().unwrap(), Some(&b"two"[..]));
        assert_eq!(lines.next_line().unwrap(), None);
        let long = vec![b'x'; limits::LINE_BYTES_MAX + 2];
        assert!(LineReader::new(&long[..]).next_line().is_err());
    }
}
