use super::*;

struct Tree(PathBuf);

impl Tree {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvfabric-cgroup-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).expect("temporary directory");
        Self(path)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("directory");
        fs::write(path, text).expect("file");
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn version_2_takes_the_tightest_group_above() {
    let tree = Tree::new("v2");
    tree.write("a/memory.max", "1000000\n");
    tree.write("a/memory.current", "400000\n");
    tree.write("a/b/memory.max", "max\n");
    tree.write("a/b/memory.current", "5\n");
    tree.write("a/b/c/memory.max", "900000\n");
    tree.write("a/b/c/memory.current", "350000\n");
    tree.write("a/b/c/memory.stat", "anon 1\ninactive_file 100000\nactive_file 7\n");
    assert_eq!(cgroup_available(&tree.0, "0::/a/b/c\n"), Some(600_000));
    tree.write("a/b/c/memory.current", "990000\n");
    assert_eq!(cgroup_available(&tree.0, "0::/a/b/c\n"), Some(10_000));
    tree.write("a/b/c/memory.current", "2000000\n");
    assert_eq!(cgroup_available(&tree.0, "0::/a/b/c\n"), Some(0));
    assert_eq!(cgroup_available(&tree.0, "0::/elsewhere\n"), None);
}

#[test]
fn version_1_knows_no_limit_by_its_size() {
    let tree = Tree::new("v1");
    tree.write("memory/memory.limit_in_bytes", "9223372036854771712\n");
    tree.write("memory/memory.usage_in_bytes", "1\n");
    let membership = "12:cpu,cpuacct:/x\n4:memory:/job\n0::/\n";
    assert_eq!(cgroup_available(&tree.0, membership), None);
    tree.write("memory/job/memory.limit_in_bytes", "5000\n");
    tree.write("memory/job/memory.usage_in_bytes", "3000\n");
    tree.write("memory/job/memory.stat", "cache 9\ntotal_inactive_file 500\n");
    assert_eq!(cgroup_available(&tree.0, membership), Some(2500));
}

/// In a container the path is the host's, and only the mount's root is there: the container's own group.
#[test]
fn a_container_sees_its_own_group_at_the_root() {
    let tree = Tree::new("container");
    tree.write("memory.max", "7000\n");
    tree.write("memory.current", "1000\n");
    assert_eq!(cgroup_available(&tree.0, "0::/kubepods/pod/abc\n"), Some(6000));
    assert_eq!(cgroup_available(&tree.0, "0::/../../outside\n"), Some(6000));
}

#[test]
fn nonsense_is_no_limit() {
    let tree = Tree::new("nonsense");
    tree.write("memory.max", "many\n");
    tree.write("memory.current", "-3\n");
    for membership in ["", "0", "0:", "garbage\n::\n:::::\n", "0::/\n"] {
        assert_eq!(cgroup_available(&tree.0, membership), None);
    }
}

#[test]
fn meminfo_counts_in_kib_but_for_pages() {
    let text = "MemTotal:       100 kB\nMemAvailable:    64 kB\nHugePages_Free:       3\nHugepagesize:       2048 kB\n";
    assert_eq!(meminfo(text, "MemAvailable"), Some(65536));
    assert_eq!(meminfo(text, "HugePages_Free"), Some(3));
    assert_eq!(meminfo(text, "Hugepagesize"), Some(2 << 20));
    assert_eq!(meminfo(text, "Mem"), None);
    assert_eq!(meminfo("MemAvailable: x kB", "MemAvailable"), None);
}

#[test]
fn this_machine_answers() {
    let available = available_memory();
    assert_ne!(available.bound, MemoryBound::Unknown);
    assert!(available.bytes > 0);
    assert_eq!(available_memory_bytes().is_some(), available.bound != MemoryBound::Unknown);
    let limit = raise_fd_limit().expect("raised");
    assert!(limit >= 64);
    assert_eq!(raise_fd_limit().expect("again"), limit);
    let _ = locked_memory_limit_bytes();
}
