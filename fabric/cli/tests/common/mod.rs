//! Running the built binary with a time limit and an environment of its own.
#![allow(dead_code, clippy::unwrap_used, clippy::panic)] // Test support; each test binary uses a part of it.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// How long any command of these tests may take before it counts as hanging. Far above what it needs.
const HANGS_AFTER: Duration = Duration::from_secs(180);

/// What a command did.
#[derive(Debug)]
pub struct Outcome {
    pub success: bool,
    pub stdout: String,
    pub stderr: String,
}

impl Outcome {
    /// The JSON objects of standard output, each line one.
    pub fn events(&self) -> Vec<Value> {
        self.stdout
            .lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
            .collect()
    }

    /// The last line, which must be the summary.
    pub fn summary(&self) -> Value {
        let last = self.events().pop().unwrap_or_else(|| panic!("no output; stderr: {}", self.stderr));
        assert_eq!(last["event"], "summary", "{self:?}");
        last
    }
}

/// A folder that goes when the test ends.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvfabric-cli-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The binary with these arguments, its own state folder and none of the caller's settings.
pub fn kvfabric(scratch: &Scratch, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvfabric"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("KVFABRIC_")) {
        command.env_remove(name);
    }
    command
        .args(args)
        .env("XDG_STATE_HOME", scratch.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Runs a command to its end.
pub fn run(mut command: Command) -> Outcome {
    let mut child = command.spawn().unwrap();
    let read = |mut pipe: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut text = String::new();
            pipe.read_to_string(&mut text).map(|_| text)
        })
    };
    let stdout = read(Box::new(child.stdout.take().unwrap()));
    let stderr = read(Box::new(child.stderr.take().unwrap()));
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if started.elapsed() > HANGS_AFTER {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{command:?} hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    Outcome {
        success: status.success(),
        stdout: stdout.join().unwrap().unwrap(),
        stderr: stderr.join().unwrap().unwrap(),
    }
}

/// Runs the binary with these arguments.
pub fn kvfabric_run(scratch: &Scratch, args: &[&str]) -> Outcome {
    run(kvfabric(scratch, args))
}
