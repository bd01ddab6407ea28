//! What the system allows: memory, huge pages, file descriptors.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};

/// What bounds the memory that is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryBound {
    /// The machine's free and reclaimable memory.
    System,
    /// A cgroup's memory limit.
    Cgroup,
    /// The system refused, whatever its figures say (strict overcommit, a full file system, another process's claim).
    Refused,
    /// No figures could be read.
    Unknown,
}

impl fmt::Display for MemoryBound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::System => "bounded by the machine's memory",
            Self::Cgroup => "bounded by a cgroup limit",
            Self::Refused => "refused by the system",
            Self::Unknown => "bounds unknown",
        })
    }
}

/// How much memory this process can still get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AvailableMemory {
    /// Bytes; `u64::MAX` where no figures could be read.
    pub bytes: u64,
    /// What bounds it.
    pub bound: MemoryBound,
}

/// How much memory this process can still get, honouring the limits of its cgroups (v2 and v1).
#[must_use]
pub fn available_memory() -> AvailableMemory {
    let system = fs::read_to_string("/proc/meminfo").ok().and_then(|text| meminfo(&text, "MemAvailable"));
    let membership = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let cgroup = cgroup_available(Path::new("/sys/fs/cgroup"), &membership);
    match (system, cgroup) {
        (Some(system), Some(cgroup)) if cgroup < system => {
            AvailableMemory { bytes: cgroup, bound: MemoryBound::Cgroup }
        }
        (Some(system), _) => AvailableMemory { bytes: system, bound: MemoryBound::System },
        (None, Some(cgroup)) => AvailableMemory { bytes: cgroup, bound: MemoryBound::Cgroup },
        (None, None) => AvailableMemory { bytes: u64::MAX, bound: MemoryBound::Unknown },
    }
}

/// [`available_memory`] in bytes; `None` where no figures could be read.
#[must_use]
pub fn available_memory_bytes() -> Option<u64> {
    let available = available_memory();
    (available.bound != MemoryBound::Unknown).then_some(available.bytes)
}

/// A field of /proc/meminfo in bytes (the file counts in KiB; counts without a unit are given as they are).
fn meminfo(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    let mut parts = line.split_whitespace();
    let value: u64 = parts.next()?.parse().ok()?;
    match parts.next() {
        Some("kB") => value.checked_mul(1024),
        _ => Some(value),
    }
}

/// The least that any memory cgroup above this process leaves, or `None` without a limit.
fn cgroup_available(root: &Path, membership: &str) -> Option<u64> {
    let mut least: Option<u64> = None;
    for line in membership.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let (base, files) = if controllers.is_empty() {
            (root.to_path_buf(), ["memory.max", "memory.current", "inactive_file"])
        } else if controllers.split(',').any(|name| name == "memory") {
            (root.join("memory"), ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"])
        } else {
            continue;
        };
        for directory in cgroup_chain(&base, path) {
            if let Some(left) = cgroup_left(&directory, files) {
                least = Some(least.map_or(left, |known| known.min(left)));
            }
        }
    }
    least
}

/// The process's cgroup and everything above it, as far as they can be seen. In a container the path may be the host's;
/// then only the root of the mount is there, and that is the container's own cgroup.
fn cgroup_chain(base: &Path, path: &str) -> Vec<PathBuf> {
    let mut chain = vec![base.to_path_buf()];
    let mut at = base.to_path_buf();
    for part in path.split('/').filter(|part| !part.is_empty() && *part != "..") {
        at.push(part);
        chain.push(at.clone());
    }
    chain
}

fn cgroup_left(directory: &Path, [limit, usage, reclaimable]: [&str; 3]) -> Option<u64> {
    let number = |name: &str| fs::read_to_string(directory.join(name)).ok()?.trim().parse::<u64>().ok();
    // "max" does not parse, and v1 says "no limit" by a number near i64::MAX.
    let limit = number(limit).filter(|&limit| limit < 1 << 60)?;
    let usage = number(usage)?;
    // Page cache that was not used lately makes room on demand, and must not count as taken.
    let reclaimable = fs::read_to_string(directory.join("memory.stat"))
        .ok()
        .and_then(|text| {
            text.lines().find_map(|line| line.strip_prefix(reclaimable)?.trim().parse::<u64>().ok())
        })
        .unwrap_or(0);
    Some(limit.saturating_sub(usage.saturating_sub(reclaimable)))
}

/// Reserved huge pages of the default size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HugePageCounts {
    /// Free and not promised to anybody.
    pub free: u64,
    /// Size of a page, bytes; 0 where the kernel has none.
    pub page_bytes: u64,
}

/// Counts the free reserved huge pages.
///
/// # Errors
/// When /proc/meminfo cannot be read.
pub fn free_huge_pages() -> io::Result<HugePageCounts> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let field = |name| meminfo(&text, name).unwrap_or(0);
    Ok(HugePageCounts {
        free: field("HugePages_Free").saturating_sub(field("HugePages_Rsvd")),
        page_bytes: field("Hugepagesize"),
    })
}

/// Raises the limit of open files to what the system allows, and returns it. Each peer costs a socket, and connections of
/// the other transports more.
///
/// # Errors
/// When the system refuses to raise the soft limit up to the hard one.
pub fn raise_fd_limit() -> io::Result<u64> {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none() || limit.current == limit.maximum {
        return Ok(limit.current.unwrap_or(u64::MAX));
    }
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })?;
    Ok(getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX))
}

/// How much memory this process may lock, bytes; `None` means no limit. RDMA registration counts against it.
#[must_use]
pub fn locked_memory_limit_bytes() -> Option<u64> {
    getrlimit(Resource::Memlock).current
}

#[cfg(test)]
mod tests;
