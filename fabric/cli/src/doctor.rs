//! `kvfabric doctor`: what works on this machine, and what to do about the rest.

use std::fs;
use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use anyhow::{bail, Result};
use kvfabric_memory::{available_memory, free_huge_pages, locked_memory_limit_bytes};
use kvfabric_node::Settings;
use rustix::fs::{fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create, MemfdFlags, SealFlags};
use rustix::process::{getrlimit, Resource};
use serde_json::{json, Value};

use crate::output::{bytes_text, Printer, Table};

/// Descriptors that a rank with a few dozen peers needs: sockets, pools and word tables of each.
const DESCRIPTORS_WANTED: u64 = 4096;
/// Receive buffer that the control plane's UDP socket asks for; less of it loses packets under load.
const UDP_BUFFER_WANTED: u64 = 4 << 20;
/// Less available memory than this is hardly a pool.
const MEMORY_WANTED: u64 = 1 << 30;
/// How long a connection to the directory may take.
const DIRECTORY_TIMEOUT: Duration = Duration::from_secs(3);

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    /// Works.
    Works,
    /// Works with restrictions, or is not used by this build.
    Limited,
    /// Does not work, and something needs it.
    Broken,
}

impl Status {
    fn name(self) -> &'static str {
        match self {
            Self::Works => "works",
            Self::Limited => "limited",
            Self::Broken => "broken",
        }
    }
}

/// One check.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Check {
    name: &'static str,
    status: Status,
    found: String,
    remedy: String,
}

impl Check {
    fn works(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, status: Status::Works, found: found.into(), remedy: String::new() }
    }

    fn limited(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, status: Status::Limited, found: found.into(), remedy: remedy.into() }
    }

    fn broken(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, status: Status::Broken, found: found.into(), remedy: remedy.into() }
    }

    fn to_json(&self) -> Value {
        json!({
            "event": "check", "name": self.name, "status": self.status.name(), "found": self.found,
            "remedy": self.remedy,
        })
    }
}

/// Runs all checks.
///
/// # Errors
/// Something that is needed does not work.
pub fn run(settings: &Settings, printer: Printer) -> Result<()> {
    let mut checks = vec![
        shared_memory(),
        memory(),
        cgroup(&read_text("/proc/self/cgroup"), Path::new("/sys/fs/cgroup")),
        huge_pages(),
        locked_memory(locked_memory_limit_bytes()),
        descriptors(getrlimit(Resource::Nofile).current, getrlimit(Resource::Nofile).maximum),
        udp_buffers(&read_text("/proc/sys/net/core/rmem_max")),
        rdma(&device_names(Path::new("/sys/class/infiniband"))),
        gpu(&device_names(Path::new("/dev"))),
    ];
    if let Some(address) = &settings.directory {
        checks.push(directory(address));
    }
    let mut table = Table::new(["check", "status", "found"]);
    for check in &checks {
        printer.event(&check.to_json())?;
        table.row([check.name, check.status.name(), check.found.as_str()]);
    }
    printer.text(&table.render())?;
    for check in checks.iter().filter(|check| !check.remedy.is_empty()) {
        printer.text(&format!("\n{}: {}", check.name, check.remedy))?;
    }
    let broken: Vec<&str> =
        checks.iter().filter(|check| check.status == Status::Broken).map(|check| check.name).collect();
    printer.event(&json!({ "event": "summary", "checks": checks.len(), "broken": broken }))?;
    if broken.is_empty() {
        return Ok(());
    }
    bail!("does not work here: {}", broken.join(", "))
}

fn read_text(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// Tries what the pool needs: a memfd with all seals.
fn shared_memory() -> Check {
    const NAME: &str = "shared memory";
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
    let tried =
        memfd_create("kvfabric-doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).and_then(|fd| {
            ftruncate(&fd, 4096)?;
            fcntl_add_seals(&fd, seals)?;
            fcntl_get_seals(&fd)
        });
    match tried {
        Ok(found) if found.contains(seals) => Check::works(NAME, "memfd with size and write seals"),
        Ok(found) => Check::broken(NAME, format!("memfd without all seals ({found:?})"), "use Linux 5.1 or later"),
        Err(error) => Check::broken(
            NAME,
            format!("no sealed memfd: {}", io::Error::from(error)),
            "use Linux 5.1 or later, and allow memfd_create and fcntl in the container's seccomp profile; every rank's \
             pool needs it",
        ),
    }
}

fn memory() -> Check {
    let available = available_memory();
    let found = format!("{} available, {}", bytes_text(available.bytes), available.bound);
    if available.bytes >= MEMORY_WANTED {
        Check::works("memory", found)
    } else {
        Check::limited("memory", found, "free memory or raise the cgroup's limit; pools come out of it")
    }
}

/// The limits of the process's cgroup, which count for pools too: shared memory belongs to who touched it first.
fn cgroup(membership: &str, root: &Path) -> Check {
    let v2_path = membership.lines().find_map(|line| line.strip_prefix("0::"));
    let candidates = [
        v2_path.map(|path| root.join(path.trim_start_matches('/')).join("memory.max")),
        Some(root.join("memory.max")),
        Some(root.join("memory/memory.limit_in_bytes")),
    ];
    let limit = candidates.into_iter().flatten().find_map(|path| fs::read_to_string(path).ok());
    let found = match limit.as_deref().map(str::trim) {
        None => "no memory limit found".to_owned(),
        Some("max") => "no memory limit".to_owned(),
        Some(text) => match text.parse::<u64>() {
            Ok(bytes) if bytes < 1 << 60 => format!("limit {}", bytes_text(bytes)),
            _ => "no memory limit".to_owned(),
        },
    };
    Check::works("cgroup", found)
}

fn huge_pages() -> Check {
    const NAME: &str = "huge pages";
    const REMEDY: &str = "optional: `sysctl vm.nr_hugepages=N` before ranks start gives pools huge pages \
                          (KVFABRIC_HUGE_PAGES=auto uses them when they are there)";
    match free_huge_pages() {
        Ok(counts) if counts.free > 0 => {
            Check::works(NAME, format!("{} free of {} each", counts.free, bytes_text(counts.page_bytes)))
        }
        Ok(_) => Check::limited(NAME, "none reserved", REMEDY),
        Err(error) => Check::limited(NAME, format!("unknown: {error}"), REMEDY),
    }
}

fn locked_memory(limit_bytes: Option<u64>) -> Check {
    const NAME: &str = "locked memory";
    match limit_bytes {
        None => Check::works(NAME, "no limit"),
        Some(bytes) => Check::limited(
            NAME,
            format!("limit {}", bytes_text(bytes)),
            "only RDMA needs more: `ulimit -l unlimited`, LimitMEMLOCK=infinity in a systemd unit, or --ulimit \
             memlock=-1 for a container",
        ),
    }
}

fn descriptors(soft: Option<u64>, hard: Option<u64>) -> Check {
    const NAME: &str = "open files";
    let text = |limit: Option<u64>| limit.map_or_else(|| "no limit".to_owned(), |limit| limit.to_string());
    let found = format!("{} (ranks raise it to {})", text(soft), text(hard));
    if hard.is_none_or(|hard| hard >= DESCRIPTORS_WANTED) {
        Check::works(NAME, found)
    } else {
        Check::limited(
            NAME,
            found,
            format!("raise the hard limit to {DESCRIPTORS_WANTED} or more (ulimit -Hn, LimitNOFILE); each peer costs some"),
        )
    }
}

fn udp_buffers(rmem_max: &str) -> Check {
    const NAME: &str = "UDP buffers";
    match rmem_max.trim().parse::<u64>() {
        Ok(bytes) if bytes >= UDP_BUFFER_WANTED => {
            Check::works(NAME, format!("net.core.rmem_max {}", bytes_text(bytes)))
        }
        Ok(bytes) => Check::limited(
            NAME,
            format!("net.core.rmem_max {}", bytes_text(bytes)),
            format!("`sysctl net.core.rmem_max={UDP_BUFFER_WANTED}` (and wmem_max) keeps control packets from being lost under load"),
        ),
        Err(_) => Check::limited(NAME, "net.core.rmem_max cannot be read", "check it by hand; 4 MiB are enough"),
    }
}

fn device_names(class: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(class)
        .map(|entries| {
            entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect::<Vec<String>>()
        })
        .unwrap_or_default();
    names.sort_unstable();
    names
}

fn rdma(devices: &[String]) -> Check {
    let found = if devices.is_empty() {
        "not in this build; no device in /sys/class/infiniband".to_owned()
    } else {
        format!("not in this build; devices here: {}", devices.join(", "))
    };
    Check::limited(
        "rdma",
        found,
        "use shm on one host and tcp between hosts; this build has no RDMA verbs provider",
    )
}

/// GPUs by their device files: `nvidia0` and so on, `kfd` for AMD.
fn gpu(device_files: &[String]) -> Check {
    let is_gpu = |name: &&String| {
        let number = name.strip_prefix("nvidia");
        *name == "kfd" || number.is_some_and(|n| !n.is_empty() && n.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let devices: Vec<&str> = device_files.iter().filter(is_gpu).map(String::as_str).collect();
    let found = if devices.is_empty() {
        "GPU memory is not in this build; no GPU in /dev".to_owned()
    } else {
        format!("GPU memory is not in this build; devices here: {}", devices.join(", "))
    };
    Check::limited("gpu", found, "register host memory; this build copies no GPU memory")
}

/// Whether something accepts connections where the directory should be. Name resolution has no time limit of its own,
/// so all of it happens on another thread.
fn directory(address: &str) -> Check {
    const NAME: &str = "directory";
    let (sender, answer) = sync_channel(1);
    let target = address.to_owned();
    std::thread::spawn(move || {
        // Nobody listens any more if this took too long.
        let _ = sender.send(connect(&target));
    });
    let tried = answer
        .recv_timeout(DIRECTORY_TIMEOUT + DIRECTORY_TIMEOUT)
        .unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in time")));
    match tried {
        Ok(()) => Check::works(NAME, format!("{address} accepts connections")),
        Err(error) => Check::broken(
            NAME,
            format!("{address} cannot be reached: {error}"),
            format!(
                "check the address, start `kvfabric directory --listen {address}` there, and open TCP and UDP of that \
                 port in firewalls"
            ),
        ),
    }
}

fn connect(address: &str) -> io::Result<()> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for resolved in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&resolved, DIRECTORY_TIMEOUT) {
            Ok(_) => return Ok(()),
            Err(error) => last = error,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_restriction_has_a_remedy() {
        let checks = [
            shared_memory(),
            memory(),
            huge_pages(),
            locked_memory(Some(65_536)),
            descriptors(Some(256), Some(256)),
            udp_buffers("212992\n"),
            udp_buffers("unreadable"),
            rdma(&[]),
            gpu(&[]),
            directory("127.0.0.1:1"),
        ];
        for check in &checks {
            assert_eq!(check.status == Status::Works, check.remedy.is_empty(), "{check:?}");
            assert!(!check.found.is_empty());
        }
    }

    #[test]
    fn generous_systems_pass() {
        assert_eq!(locked_memory(None).status, Status::Works);
        assert_eq!(descriptors(Some(1024), None).status, Status::Works);
        assert_eq!(descriptors(Some(1024), Some(DESCRIPTORS_WANTED)).status, Status::Works);
        assert_eq!(udp_buffers("8388608").status, Status::Works);
    }

    #[test]
    fn rdma_is_never_claimed() {
        let check = rdma(&["mlx5_0".into(), "rxe0".into()]);
        assert_eq!(check.status, Status::Limited);
        assert!(
            check.found.contains("not in this build") && check.found.contains("mlx5_0, rxe0"),
            "{check:?}"
        );
    }

    #[test]
    fn gpus_are_told_from_other_devices() {
        let files = ["kfd", "null", "nvidia", "nvidia-uvm", "nvidia12", "nvidiactl"].map(str::to_owned);
        assert!(gpu(&files).found.ends_with("devices here: kfd, nvidia12"), "{}", gpu(&files).found);
    }

    #[test]
    fn an_open_port_is_reached_and_a_closed_one_is_broken() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        assert_eq!(directory(&address).status, Status::Works);
        drop(listener);
        let check = directory(&address);
        assert_eq!(check.status, Status::Broken);
        assert!(check.found.contains(&address) && check.remedy.contains("kvfabric directory"), "{check:?}");
    }

    #[test]
    fn cgroup_limits_are_named() {
        let root = std::env::temp_dir().join(format!("kvfabric-doctor-{}", std::process::id()));
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::write(root.join("a/b/memory.max"), "2000000000\n").unwrap();
        assert_eq!(cgroup("0::/a/b\n", &root).found, "limit 2.00 GB");
        fs::write(root.join("a/b/memory.max"), "max\n").unwrap();
        assert_eq!(cgroup("0::/a/b\n", &root).found, "no memory limit");
        assert_eq!(cgroup("", &root).found, "no memory limit found");
        fs::remove_dir_all(&root).unwrap();
    }
}
