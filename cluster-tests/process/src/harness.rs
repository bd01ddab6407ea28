//! Starts, stops and kills the processes of a test. Every wait is bounded, and no process outlives its test.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command as Program, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use rustix::process::{kill_process, Pid, Signal};

use crate::payload::Shape;
use crate::protocol::{
    Command, DirectoryFigures, DirectorySpec, Keys, LoadLoop, RankFigures, RankSpec, Reply, Role, Tally,
};
use crate::random::Random;

/// Bound of every wait that is not under test. Generous: the machine may be busy with other tests.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Silence limit under load: a busy machine must not look like a dead peer where a test is about something else.
pub const RELAXED_PEER_TIMEOUT_MS: u64 = 5_000;
/// Default layout of a block: 64 KiB in 16 pieces.
pub const SHAPE: Shape = Shape { object_bytes: 64 << 10, pieces: 16 };

/// A folder for certificates, sockets and logs of one test.
#[derive(Debug)]
pub struct Home {
    path: PathBuf,
}

impl Home {
    /// Makes one. Its path is short, since Unix sockets live in it.
    #[must_use]
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("kvf-test-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder for the test");
        Self { path }
    }

    /// Path of the folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Default for Home {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("logs of the processes are kept in {}", self.path.display());
        } else {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

/// A process of the test. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    log: PathBuf,
}

impl Process {
    /// Starts a process; [`Process::ready`] waits for it. The calling thread must live as long as the process should.
    #[must_use]
    pub fn spawn(home: &Home, name: &str, role: &Role) -> Self {
        static LIFE: AtomicU32 = AtomicU32::new(0);
        let life = LIFE.fetch_add(1, Ordering::Relaxed);
        let log = home.path.join(format!("{name}-{life}.log"));
        let mut child = Program::new(binary("kvfabric-test-rank"))
            .arg(std::process::id().to_string())
            .env("XDG_STATE_HOME", home.path.join("state"))
            .env("XDG_RUNTIME_DIR", home.path.join("run"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(&log).expect("a log file"))
            .spawn()
            .expect("the test rank starts");
        let stdout = child.stdout.take().expect("a pipe");
        let (sender, lines) = std::sync::mpsc::channel();
        // Ends with the process.
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let stdin = child.stdin.take();
        let mut process = Self { name: name.to_owned(), child, stdin, lines, log };
        process.send(role);
        process
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    fn send(&mut self, message: &impl serde::Serialize) {
        let mut line = serde_json::to_vec(message).expect("a message is JSON");
        line.push(b'\n');
        let sent = self.stdin.as_mut().expect("the process was not killed").write_all(&line);
        if let Err(error) = sent {
            self.fail(&format!("takes no command: {error}"));
        }
    }

    fn fail(&self, what: &str) -> ! {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let tail: Vec<&str> = log.lines().rev().take(40).collect();
        let tail: Vec<&str> = tail.into_iter().rev().collect();
        panic!("process {:?} {what}; the end of its log:\n{}", self.name, tail.join("\n"));
    }

    /// The next reply.
    pub fn reply(&mut self, patience: Duration) -> Reply {
        match self.lines.recv_timeout(patience) {
            Ok(line) => serde_json::from_str(&line).expect("the process answers in the protocol"),
            Err(RecvTimeoutError::Timeout) => self.fail(&format!("did not answer within {patience:?}")),
            Err(RecvTimeoutError::Disconnected) => self.fail("ended"),
        }
    }

    /// Says something without waiting for the reply.
    pub fn tell(&mut self, command: &Command) {
        self.send(command);
    }

    /// Says something and waits for the reply.
    pub fn ask(&mut self, command: &Command) -> Reply {
        self.send(command);
        self.reply(PATIENCE)
    }

    /// Waits until the role runs; returns a directory's address and the time of the start.
    pub fn ready(&mut self) -> (String, Duration) {
        match self.reply(PATIENCE) {
            Reply::Ready { address, start_ms } => (address, Duration::from_millis(start_ms)),
            other => self.fail(&format!("could not start: {other:?}")),
        }
    }

    /// A command that answers with a number.
    pub fn count(&mut self, command: &Command) -> u64 {
        match self.ask(command) {
            Reply::Count(count) => count,
            other => self.fail(&format!("answered {command:?} with {other:?}")),
        }
    }

    /// A command that answers with the figures of loads; whatever it is about, the bytes must be right.
    pub fn tally(&mut self, command: &Command) -> Tally {
        match self.ask(command) {
            Reply::Tally(tally) => {
                tally.assert_safe(&self.name);
                tally
            }
            other => self.fail(&format!("answered {command:?} with {other:?}")),
        }
    }

    /// Stores keys; all of them must be stored.
    pub fn store(&mut self, keys: Keys, put: u64) {
        assert_eq!(self.count(&Command::Store { keys, put }), keys.count, "{}: not all stored", self.name);
    }

    /// Loads and checks keys.
    pub fn load(&mut self, keys: Keys, deadline: Duration) -> Tally {
        self.tally(&Command::Load { keys, deadline_ms: millis(deadline) })
    }

    /// Number of keys that the directory says exist, and whether it answered.
    pub fn lookup(&mut self, keys: Keys, budget: Duration) -> (u64, bool) {
        match self.ask(&Command::Lookup { keys, budget_ms: millis(budget) }) {
            Reply::Lookup { hits, complete, .. } => (hits, complete),
            other => self.fail(&format!("answered a lookup with {other:?}")),
        }
    }

    /// Starts a load loop.
    pub fn start_loads(&mut self, spec: LoadLoop) {
        self.done(&Command::StartLoads(spec));
    }

    /// A command that just answers.
    pub fn done(&mut self, command: &Command) {
        let reply = self.ask(command);
        assert!(matches!(reply, Reply::Done), "{}: {command:?} was answered with {reply:?}", self.name);
    }

    /// Figures of a rank.
    pub fn rank(&mut self) -> RankFigures {
        match self.ask(&Command::Stats) {
            Reply::Rank(figures) => figures,
            other => self.fail(&format!("is no rank: {other:?}")),
        }
    }

    /// Figures of a directory.
    pub fn directory(&mut self) -> DirectoryFigures {
        match self.ask(&Command::Stats) {
            Reply::Directory(figures) => figures,
            other => self.fail(&format!("is no directory: {other:?}")),
        }
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).expect("a process id");
        kill_process(pid, signal).expect("the process is ours");
    }

    /// SIGSTOP; returns once every thread stands still, which is a moment after the signal was sent.
    pub fn stop(&mut self) {
        self.signal(Signal::STOP);
        eventually("every thread of the process is stopped", || self.stands_still());
    }

    fn stands_still(&self) -> bool {
        let tasks =
            std::fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("the process is ours");
        tasks.flatten().all(|task| {
            // A thread that has ended meanwhile has no state. The state is the first letter after the name.
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
        })
    }

    /// SIGCONT.
    pub fn cont(&mut self) {
        self.signal(Signal::CONT);
    }

    /// SIGKILL; returns once the process is gone.
    pub fn kill(&mut self) {
        self.stdin = None;
        self.child.kill().expect("the process is ours");
        self.child.wait().expect("the process is ours");
    }

    /// Closes its standard input, so that it ends in good order, and waits for that.
    pub fn close(&mut self) {
        self.stdin = None;
        let until = Instant::now() + PATIENCE;
        loop {
            match self.child.try_wait().expect("the process is ours") {
                Some(status) if status.success() => return,
                Some(status) => self.fail(&format!("ended with {status}")),
                None if Instant::now() > until => self.fail("does not end"),
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // SIGKILL also ends a stopped process.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Path of a binary of this build, beside the test's own.
#[must_use]
pub fn binary(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the test has a path");
    let folder = test.parent().expect("a file has a folder");
    let folder = if folder.ends_with("deps") { folder.parent().expect("deps has a parent") } else { folder };
    folder.join(name)
}

/// A port free for UDP and TCP, outside the range from which the system gives ports to others: a process that restarts
/// finds its port still free.
#[must_use]
pub fn free_port() -> u16 {
    let mut random = Random::new(getrandom::u64().expect("the system has random numbers"));
    for _ in 0..1000 {
        let port = 10_000 + u16::try_from(random.below(20_000)).expect("a small number");
        let address = (Ipv4Addr::LOCALHOST, port);
        if TcpListener::bind(address).is_ok() && UdpSocket::bind(address).is_ok() {
            return port;
        }
    }
    panic!("no free port");
}

/// Polls until something holds; panics when it takes longer than [`PATIENCE`]. Returns how long it took.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) -> Duration {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "still not after {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
    begun.elapsed()
}

/// A directory, and what its ranks have in common.
#[derive(Debug)]
pub struct Fabric {
    /// The directory's process.
    pub directory: Process,
    /// Its address.
    pub address: String,
    spec: DirectorySpec,
    home: Home,
}

impl Fabric {
    /// Starts a directory on a port that it can come back to.
    #[must_use]
    pub fn start(peer_timeout_ms: u64) -> Self {
        let home = Home::new();
        let spec = DirectorySpec { listen: format!("127.0.0.1:{}", free_port()), peer_timeout_ms };
        let mut directory = Process::spawn(&home, "directory", &Role::Directory(spec.clone()));
        let (address, _) = directory.ready();
        Self { directory, address, spec, home }
    }

    /// The folder of the test.
    #[must_use]
    pub fn home(&self) -> &Home {
        &self.home
    }

    /// Kills the directory.
    pub fn kill_directory(&mut self) {
        self.directory.kill();
    }

    /// Starts the directory again at its address.
    pub fn restart_directory(&mut self) {
        self.directory = Process::spawn(&self.home, "directory", &Role::Directory(self.spec.clone()));
        self.directory.ready();
    }

    /// A rank's settings: 64 MiB pool, blocks of [`SHAPE`], a port that it can come back to.
    #[must_use]
    pub fn spec(&self, name: &str, transport: &str) -> RankSpec {
        RankSpec {
            name: name.into(),
            directory: self.address.clone(),
            transport: transport.into(),
            listen: format!("127.0.0.1:{}", free_port()),
            pool_bytes: 64 << 20,
            extent_bytes: 4 << 20,
            peer_timeout_ms: self.spec.peer_timeout_ms,
            start_timeout_ms: 30_000,
            shape: SHAPE,
            load_blocks: 64,
        }
    }

    /// Starts a rank without waiting for it.
    #[must_use]
    pub fn spawn(&self, spec: &RankSpec) -> Process {
        Process::spawn(&self.home, &spec.name, &Role::Rank(spec.clone()))
    }

    /// Starts a rank and waits until it is a member.
    #[must_use]
    pub fn rank(&self, spec: &RankSpec) -> Process {
        let mut process = self.spawn(spec);
        process.ready();
        process
    }
}
