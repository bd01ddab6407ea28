//! The serving side: passes the pool's and the word table's descriptors, and tells which slabs exist.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvfabric_memory::OwnerMemory;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use thiserror::Error;

use crate::frame::{Answer, FrameError, Refusal, Request, NONCE_BYTES, REQUEST_BYTES_MAX};
use crate::limits::{
    ACCEPT_PAUSE, ANSWER_TIMEOUT, BACKLOG, BIND_TIMEOUT, CONNECTIONS_MAX, HELLO_TIMEOUT, SLABS_PER_FRAME_MAX,
    SWEEP_MAX,
};
use crate::socket::{self, UNIX_PATH_BYTES_MAX};

/// Names of the sockets that [`ShmServer::start_in`] makes.
const NAME_PREFIX: &str = "kvfabric-";
const NAME_SUFFIX: &str = ".sock";

/// Why the server could not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The path does not fit a Unix socket's address.
    #[error(
        "the socket path {path} has {bytes} bytes and a Unix socket allows {UNIX_PATH_BYTES_MAX}; use a shorter directory"
    )]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its length, bytes.
        bytes: usize,
    },
    /// A live process serves there.
    #[error("another process already serves at {0}")]
    InUse(PathBuf),
    /// Something that is not a socket has that name; it is left alone.
    #[error("{0} exists and is not a socket")]
    NotASocket(PathBuf),
    /// A system call failed.
    #[error("cannot {what} at {path}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// The path.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

impl ServeError {
    /// Whether starting again may succeed without any change.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Os { source, .. } if source.kind() == io::ErrorKind::WouldBlock)
    }

    /// Whether the cause lies on this rank (it always does).
    #[must_use]
    pub fn is_local(&self) -> bool {
        true
    }
}

/// Serves one owner's memory at one path, until dropped.
#[derive(Debug)]
pub struct ShmServer {
    path: PathBuf,
    /// Device and inode of our socket file: only that one is removed.
    identity: (u64, u64),
    stop: Arc<AtomicBool>,
    wake: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl ShmServer {
    /// Serves at `path`. The file of a dead process is replaced; that of a live one is an error.
    ///
    /// # Errors
    /// [`ServeError`].
    pub fn start(path: &Path, memory: Arc<OwnerMemory>, incarnation: u64) -> Result<Self, ServeError> {
        let bytes = path.as_os_str().len();
        if bytes > UNIX_PATH_BYTES_MAX {
            return Err(ServeError::PathTooLong { path: path.to_path_buf(), bytes });
        }
        let os = |what: &'static str| {
            move |source: io::Error| ServeError::Os { what, path: path.to_path_buf(), source }
        };
        let listener = bind(path)?;
        let identity = fs::symlink_metadata(path)
            .map(|file| (file.dev(), file.ino()))
            .map_err(os("look at the socket file"))?;
        let wake = Arc::new(socket::wake_fd().map_err(os("make an event descriptor"))?);
        let stop = Arc::new(AtomicBool::new(false));
        let serving = Serving {
            listener,
            wake: Arc::clone(&wake),
            stop: Arc::clone(&stop),
            memory,
            incarnation,
            connections: Vec::new(),
            accept_after: None,
        };
        let thread = std::thread::Builder::new()
            .name("kvfabric-shm".into())
            .spawn(move || serving.run())
            .map_err(os("start the serving thread"))?;
        Ok(Self { path: path.to_path_buf(), identity, stop, wake, thread: Some(thread) })
    }

    /// Serves at `kvfabric-<incarnation>.sock` in a directory. As incarnations never come back, nobody would ever replace
    /// the files that killed processes left there: those of this user are removed first.
    ///
    /// # Errors
    /// [`ServeError`].
    pub fn start_in(
        directory: &Path,
        memory: Arc<OwnerMemory>,
        incarnation: u64,
    ) -> Result<Self, ServeError> {
        let path = directory.join(format!("{NAME_PREFIX}{incarnation:016x}{NAME_SUFFIX}"));
        {
            let _lock = lock_directory(directory, &path)?;
            sweep(directory);
        }
        Self::start(&path, memory, incarnation)
    }

    /// The path to advertise.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ShmServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        socket::wake(&self.wake);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let ours =
            fs::symlink_metadata(&self.path).is_ok_and(|file| (file.dev(), file.ino()) == self.identity);
        if ours {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Binds and listens, replacing the file of a dead process. Starters on one path take turns by a lock on its directory,
/// so that none removes the fresh file of another.
fn bind(path: &Path) -> Result<OwnedFd, ServeError> {
    let os =
        |what: &'static str, source: io::Error| ServeError::Os { what, path: path.to_path_buf(), source };
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let _lock = lock_directory(directory, path)?;
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(os("look at the socket file", error)),
        Ok(file) if !file.file_type().is_socket() => return Err(ServeError::NotASocket(path.to_path_buf())),
        Ok(_) if is_served(path) => return Err(ServeError::InUse(path.to_path_buf())),
        Ok(_) => {
            fs::remove_file(path).map_err(|error| os("remove the socket file of a dead process", error))?;
        }
    }
    let listener = socket::socket().map_err(|error| os("make a socket", error))?;
    let address = socket::address(path).map_err(|error| os("use the path", error))?;
    rustix::net::bind(&listener, &address).map_err(|error| os("bind", error.into()))?;
    // The kernel checks write permission on connect; the peer's user is checked again after accept.
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))
        .map_err(|error| os("set the socket file's permissions", error))?;
    rustix::net::listen(&listener, BACKLOG).map_err(|error| os("listen", error.into()))?;
    Ok(listener)
}

/// Locks a directory until the descriptor is closed. Whoever binds holds the lock until it also listens, so that under
/// the lock a socket that refuses connections is a dead one.
fn lock_directory(directory: &Path, path: &Path) -> Result<OwnedFd, ServeError> {
    let os = |what: &'static str, error: Errno| ServeError::Os {
        what,
        path: path.to_path_buf(),
        source: error.into(),
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let lock = rustix::fs::open(directory, flags, Mode::empty())
        .map_err(|error| os("open the socket's directory", error))?;
    let deadline = Instant::now() + BIND_TIMEOUT;
    loop {
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(lock),
            Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(error) => return Err(os("lock the socket's directory", error)),
        }
    }
}

/// Removes this user's sockets of dead processes, a bounded number; what cannot be removed stays.
fn sweep(directory: &Path) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    let own_uid = rustix::process::geteuid().as_raw();
    let named = entries.flatten().filter(|entry| {
        let name = entry.file_name();
        name.to_str().is_some_and(|name| name.starts_with(NAME_PREFIX) && name.ends_with(NAME_SUFFIX))
    });
    for entry in named.take(SWEEP_MAX) {
        let Ok(file) = fs::symlink_metadata(entry.path()) else { continue };
        if file.file_type().is_socket() && file.uid() == own_uid && !is_served(&entry.path()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Whether a process listens at the path: a full backlog counts, a refusal means that nobody does.
fn is_served(path: &Path) -> bool {
    let (Ok(probe), Ok(address)) = (socket::socket(), socket::address(path)) else { return true };
    !matches!(
        rustix::net::connect(&probe, &address),
        Err(Errno::CONNREFUSED | Errno::NOENT | Errno::PROTOTYPE)
    )
}

struct Connection {
    fd: OwnedFd,
    /// Whether HELLO was answered.
    greeted: bool,
    /// An answer that did not fit the socket's buffer.
    pending: Option<Answer>,
    /// When the connection is closed unless it moves on; `None` while it may be silent.
    deadline: Option<Instant>,
    /// Closed once the pending answer is out.
    closing: bool,
}

struct Serving {
    listener: OwnedFd,
    wake: Arc<OwnedFd>,
    stop: Arc<AtomicBool>,
    memory: Arc<OwnerMemory>,
    incarnation: u64,
    connections: Vec<Connection>,
    accept_after: Option<Instant>,
}

impl Serving {
    fn run(mut self) {
        while !self.stop.load(Ordering::Acquire) {
            let now = Instant::now();
            if self.accept_after.is_some_and(|after| after <= now) {
                self.accept_after = None;
            }
            let Some(ready) = self.wait(now) else { continue };
            if ready.accept {
                self.accept();
            }
            let now = Instant::now();
            let mut index = 0;
            for events in ready.connections {
                let alive = match self.connections.get_mut(index) {
                    Some(connection) => serve(connection, events, now, &self.memory, self.incarnation),
                    None => true,
                };
                if alive {
                    index += 1;
                } else {
                    self.connections.remove(index);
                }
            }
        }
    }

    fn wait(&mut self, now: Instant) -> Option<Ready> {
        let accept = if self.accept_after.is_some() { PollFlags::empty() } else { PollFlags::IN };
        let mut fds = Vec::with_capacity(self.connections.len() + 2);
        fds.push(PollFd::new(&*self.wake, PollFlags::IN));
        fds.push(PollFd::new(&self.listener, accept));
        for connection in &self.connections {
            // One answer at a time: no new request is read while one waits to be taken.
            let events = if connection.pending.is_some() { PollFlags::OUT } else { PollFlags::IN };
            fds.push(PollFd::new(&connection.fd, events));
        }
        let deadlines = self.connections.iter().filter_map(|connection| connection.deadline);
        let next = deadlines.chain(self.accept_after).min();
        let timeout = next.map(|next| timespec(next.saturating_duration_since(now)));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return None,
            Err(error) => {
                tracing::warn!(%error, "waiting on the shared-memory sockets failed");
                std::thread::sleep(ACCEPT_PAUSE);
                return None;
            }
        }
        let mut revents = fds.iter().map(PollFd::revents);
        let _ = revents.next();
        let accept = revents.next().is_some_and(|events| !events.is_empty());
        Some(Ready { accept, connections: revents.collect() })
    }

    fn accept(&mut self) {
        loop {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let fd = match rustix::net::accept_with(&self.listener, flags) {
                Ok(fd) => fd,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::AGAIN) => return,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a shared-memory connection");
                    self.accept_after = Some(Instant::now() + ACCEPT_PAUSE);
                    return;
                }
            };
            let refusal = match socket::peer_is_allowed(fd.as_fd()) {
                Ok(true) if self.connections.len() < CONNECTIONS_MAX => None,
                Ok(true) => Some(Refusal::Busy),
                Ok(false) => Some(Refusal::User),
                Err(_) => continue,
            };
            if let Some(why) = refusal {
                tracing::warn!(?why, "refused a shared-memory connection");
                let _ = socket::send(fd.as_fd(), &Answer::Refused(why).encode(), &[]);
                continue;
            }
            self.connections.push(Connection {
                fd,
                greeted: false,
                pending: None,
                deadline: Some(Instant::now() + HELLO_TIMEOUT),
                closing: false,
            });
        }
    }
}

struct Ready {
    accept: bool,
    /// In the order of the connections that were waited on; connections accepted since are behind them.
    connections: Vec<PollFlags>,
}

/// Moves one connection on; returns whether it stays.
fn serve(
    connection: &mut Connection,
    events: PollFlags,
    now: Instant,
    memory: &OwnerMemory,
    incarnation: u64,
) -> bool {
    if connection.deadline.is_some_and(|deadline| deadline <= now) {
        return false;
    }
    if events.intersects(PollFlags::ERR | PollFlags::NVAL) {
        return false;
    }
    if events.contains(PollFlags::OUT) {
        return match connection.pending.take() {
            Some(answer) => send(connection, answer, memory, now),
            None => true,
        };
    }
    if !events.contains(PollFlags::IN) {
        return !events.contains(PollFlags::HUP);
    }
    // One byte more than the longest request shows what is too long.
    let mut buffer = [0u8; REQUEST_BYTES_MAX + 1];
    let packet = match socket::receive(connection.fd.as_fd(), &mut buffer) {
        Ok(packet) => packet,
        Err(error) => return socket::would_block(&error),
    };
    if packet.length_bytes == 0 || packet.truncated || !packet.fds.is_empty() {
        return false;
    }
    let request = Request::decode(buffer.get(..packet.length_bytes).unwrap_or(&[]));
    let answer = match request {
        Ok(Request::Hello { nonce }) if !connection.greeted => hello(nonce, memory, incarnation),
        Ok(Request::Slabs { since, start }) if connection.greeted => slabs(memory, since, start),
        Err(FrameError::Version(_)) => {
            connection.closing = true;
            Answer::Refused(Refusal::Version)
        }
        Ok(_) | Err(_) => return false,
    };
    send(connection, answer, memory, now)
}

fn send(connection: &mut Connection, answer: Answer, memory: &OwnerMemory, now: Instant) -> bool {
    let fds = [memory.pool_fd(), memory.words_fd()];
    let with = if matches!(answer, Answer::Hello { .. }) { &fds[..] } else { &[] };
    match socket::send(connection.fd.as_fd(), &answer.encode(), with) {
        Ok(()) => {
            connection.greeted |= matches!(answer, Answer::Hello { .. });
            connection.deadline = None;
            !connection.closing
        }
        Err(error) if socket::would_block(&error) => {
            connection.pending = Some(answer);
            connection.deadline.get_or_insert(now + ANSWER_TIMEOUT);
            true
        }
        Err(_) => false,
    }
}

fn hello(nonce: [u8; NONCE_BYTES], memory: &OwnerMemory, incarnation: u64) -> Answer {
    Answer::Hello { nonce, incarnation, pool_bytes: memory.pool_bytes(), words_bytes: memory.words_bytes() }
}

fn slabs(memory: &OwnerMemory, since: u64, start: u32) -> Answer {
    let (version, all) = memory.slabs();
    let total = u32::try_from(all.len()).unwrap_or(u32::MAX);
    let rest = if since == version { &[] } else { all.get(start as usize..).unwrap_or(&[]) };
    let slabs = rest.iter().take(SLABS_PER_FRAME_MAX).copied().collect();
    Answer::Slabs { version, total, start: start.min(total), slabs }
}

fn timespec(duration: Duration) -> Timespec {
    // Rounded up by a microsecond, so that a deadline has passed when the wait for it returns.
    Timespec::try_from(duration + Duration::from_micros(1)).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 })
}
