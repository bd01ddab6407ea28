//! What scripts rely on besides results: help, exit codes, error messages, configuration.

mod common;

use common::{kvfabric, kvfabric_run, run, Scratch};

/// Fails, with nothing on standard output, an `error:` on standard error that holds these texts, and no backtrace.
fn fails_with(outcome: &common::Outcome, texts: &[&str]) {
    assert!(!outcome.success, "{outcome:?}");
    assert!(outcome.stderr.starts_with("error: "), "{outcome:?}");
    for text in texts {
        assert!(outcome.stderr.contains(text), "{text:?} is not in {outcome:?}");
    }
    assert!(!outcome.stderr.contains("backtrace") && !outcome.stderr.contains("panicked"), "{outcome:?}");
}

#[test]
fn every_command_has_help_with_its_documented_flags() {
    let scratch = Scratch::new("help");
    for (command, flags) in [
        ("demo", "--transport --blocks --json --config"),
        ("directory", "--listen --tls-dir --insecure-no-auth --json"),
        (
            "node",
            "--directory --pool-bytes --name --listen --advertise --tls-dir --ns-secret-file --transport \
             --insecure-no-auth",
        ),
        (
            "replay",
            "--ranks --pool-bytes --bytes-per-token --speed --concurrency --requests --verify --transport --json TRACE",
        ),
        ("certs", "--name DIR"),
        ("doctor", "--directory --json"),
    ] {
        let outcome = kvfabric_run(&scratch, &[command, "--help"]);
        assert!(outcome.success, "{outcome:?}");
        for flag in flags.split_whitespace() {
            assert!(outcome.stdout.contains(flag), "{command} lacks {flag}: {}", outcome.stdout);
        }
    }
    let outcome = kvfabric_run(&scratch, &["--help"]);
    for command in ["demo", "directory", "node", "replay", "certs", "doctor", "KVFABRIC_LOG"] {
        assert!(outcome.stdout.contains(command), "{}", outcome.stdout);
    }
    assert!(!outcome.stdout.contains("child"), "hidden commands stay hidden: {}", outcome.stdout);
    assert!(kvfabric_run(&scratch, &["--version"]).success);
}

#[test]
fn bad_flags_are_errors_that_name_them() {
    let scratch = Scratch::new("flags");
    for (args, text) in [
        (&["demo", "--transport", "infiniband"][..], "infiniband"),
        (&["demo", "--blocks", "1"], "--blocks"),
        (&["demo", "--bloks", "512"], "--bloks"),
        (&["replay", "t"], "--ranks"),
        (&["replay", "t", "--ranks", "two"], "two"),
        (&["replay", "t", "--ranks", "2", "--speed", "0"], "above 0"),
        (&["replay", "t", "--ranks", "2", "--pool-bytes", "much"], "unlimited"),
        (&["serve"], "serve"),
    ] {
        let outcome = kvfabric_run(&scratch, args);
        fails_with(&outcome, &[text]);
        assert!(outcome.stdout.is_empty(), "{outcome:?}");
    }
    assert!(!kvfabric_run(&scratch, &[]).success);
}

#[test]
fn rdma_is_refused_and_never_replaced() {
    let scratch = Scratch::new("rdma");
    let outcome = kvfabric_run(&scratch, &["demo", "--transport", "rdma", "--json"]);
    fails_with(&outcome, &["rdma is not available in this build", "--transport shm"]);
    let mut command = kvfabric(&scratch, &["demo"]);
    command.env("KVFABRIC_TRANSPORT", "rdma");
    fails_with(&run(command), &["rdma is not available in this build"]);
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/conversation_excerpt.jsonl");
    let outcome = kvfabric_run(&scratch, &["replay", trace, "--ranks", "2", "--transport", "rdma"]);
    fails_with(&outcome, &["rdma is not available in this build"]);
}

#[test]
fn unknown_settings_are_errors_wherever_they_come_from() {
    let scratch = Scratch::new("settings");
    let mut command = kvfabric(&scratch, &["demo"]);
    command.env("KVFABRIC_TRANSPROT", "tcp");
    fails_with(&run(command), &["KVFABRIC_TRANSPROT", "KVFABRIC_TRANSPORT"]);
    let file = scratch.path().join("config.toml");
    std::fs::write(&file, "transprot = \"tcp\"\n").unwrap();
    let path = file.to_str().unwrap();
    fails_with(&kvfabric_run(&scratch, &["demo", "--config", path]), &[path, "transprot"]);
    let mut command = kvfabric(&scratch, &["demo"]);
    command.env("KVFABRIC_CONFIG", "/nonexistent/config.toml");
    fails_with(&run(command), &["/nonexistent/config.toml"]);
    let mut command = kvfabric(&scratch, &["demo"]);
    command.env("KVFABRIC_TRANSPORT", "carrier-pigeon");
    fails_with(&run(command), &["carrier-pigeon", "shm"]);
    let mut command = kvfabric(&scratch, &["demo"]);
    command.env("KVFABRIC_LOG", "not=a=filter");
    fails_with(&run(command), &["KVFABRIC_LOG"]);
}

#[test]
fn flags_win_over_environment_over_file() {
    let scratch = Scratch::new("layers");
    let file = scratch.path().join("config.toml");
    std::fs::write(&file, "listen = \"127.0.0.1:badfile\"\n").unwrap();
    let path = file.to_str().unwrap();
    fails_with(&kvfabric_run(&scratch, &["directory", "--config", path]), &["127.0.0.1:badfile"]);
    let mut command = kvfabric(&scratch, &["directory", "--config", path]);
    command.env("KVFABRIC_LISTEN", "127.0.0.1:badenv");
    fails_with(&run(command), &["127.0.0.1:badenv"]);
    let mut command = kvfabric(&scratch, &["directory", "--config", path, "--listen", "127.0.0.1:badflag"]);
    command.env("KVFABRIC_LISTEN", "127.0.0.1:badenv");
    fails_with(&run(command), &["127.0.0.1:badflag"]);
}

#[test]
fn node_says_what_is_missing_and_what_works() {
    let scratch = Scratch::new("node");
    fails_with(
        &kvfabric_run(&scratch, &["node", "--pool-bytes", "1G"]),
        &["directory", "--directory HOST:PORT"],
    );
    fails_with(
        &kvfabric_run(&scratch, &["node", "--directory", "127.0.0.1:1", "--pool-bytes", "some"]),
        &["pool_bytes", "some"],
    );
    let args = "node --directory 127.0.0.1:1 --pool-bytes 1G --name spare --listen 127.0.0.1:0 --advertise localhost \
                --transport tcp --insecure-no-auth";
    let args: Vec<&str> = args.split_whitespace().collect();
    fails_with(
        &kvfabric_run(&scratch, &args),
        &["remote puts", "not in this version", "kvfabric demo", "spare"],
    );
}

#[test]
fn certificates_are_made_once_and_names_grow() {
    let scratch = Scratch::new("certs");
    let dir = scratch.path().join("tls");
    let dir = dir.to_str().unwrap();
    let made = kvfabric_run(&scratch, &["certs", dir, "--name", "rank-1", "--json"]);
    assert!(made.success, "{made:?}");
    let event = &made.events()[0];
    assert_eq!((&event["event"], &event["ca_created"]), (&"certs".into(), &true.into()));
    for file in ["ca.pem", "cert.pem", "key.pem"] {
        assert!(scratch.path().join("tls").join(file).is_file(), "{file}");
    }
    let again = kvfabric_run(&scratch, &["certs", dir, "--name", "rank-2", "--json"]);
    let event = &again.events()[0];
    assert_eq!(event["ca_created"], false);
    let names: Vec<&str> =
        event["names"].as_array().unwrap().iter().filter_map(|name| name.as_str()).collect();
    assert!(
        names.contains(&"rank-1") && names.contains(&"rank-2") && names.contains(&"localhost"),
        "{names:?}"
    );
    let file = scratch.path().join("occupied");
    std::fs::write(&file, "").unwrap();
    let path = file.to_str().unwrap();
    fails_with(&kvfabric_run(&scratch, &["certs", path]), &[path]);
}

#[test]
fn doctor_names_every_check_and_fails_for_what_is_needed() {
    let scratch = Scratch::new("doctor");
    let outcome = kvfabric_run(&scratch, &["doctor", "--json"]);
    assert!(outcome.success, "{outcome:?}");
    let events = outcome.events();
    for name in [
        "shared memory",
        "memory",
        "cgroup",
        "huge pages",
        "locked memory",
        "open files",
        "UDP buffers",
        "gpu",
        "rdma",
    ] {
        let check = events.iter().find(|event| event["name"] == name);
        let check = check.unwrap_or_else(|| panic!("no check {name}"));
        assert!(!check["found"].as_str().unwrap().is_empty());
    }
    assert_eq!(outcome.summary()["broken"], serde_json::json!([]));
    let text = kvfabric_run(&scratch, &["doctor"]);
    assert!(text.success && text.stdout.contains("not in this build"), "{text:?}");
    let outcome = kvfabric_run(&scratch, &["doctor", "--directory", "127.0.0.1:1"]);
    assert!(!outcome.success);
    assert!(outcome.stdout.contains("127.0.0.1:1 cannot be reached"), "{outcome:?}");
    assert!(outcome.stderr.contains("directory"), "{outcome:?}");
    // A typo in a host name is found out in bounded time and named.
    let outcome = kvfabric_run(&scratch, &["doctor", "--directory", "no-such-host.invalid:7400"]);
    assert!(!outcome.success, "{outcome:?}");
    assert!(outcome.stdout.contains("no-such-host.invalid:7400 cannot be reached"), "{outcome:?}");
}

#[test]
fn bad_traces_are_named_with_file_line_and_reason() {
    let scratch = Scratch::new("trace");
    let missing = kvfabric_run(&scratch, &["replay", "/nonexistent/t.jsonl", "--ranks", "1"]);
    fails_with(&missing, &["/nonexistent/t.jsonl", "caused by"]);
    let file = scratch.path().join("t.jsonl");
    let path = file.to_str().unwrap();
    for (text, reason) in [
        ("{\"timestamp\": 0, \"hash_ids\": [1]}\n{\"timestamp\": 1}\n", "line 2: missing field `hash_ids`"),
        ("{\"timestamp\": 0, \"hash_ids\": [1]}\n\n{\"timestamp\": 1, \"hash_ids\": [1", "line 3: EOF"),
        ("timestamp,hash_ids\n", "line 1: not a JSON object"),
        ("\n", "holds no request"),
    ] {
        std::fs::write(&file, text).unwrap();
        let outcome = kvfabric_run(&scratch, &["replay", path, "--ranks", "1", "--json"]);
        fails_with(&outcome, &[path, reason]);
        assert!(outcome.stdout.is_empty(), "nothing starts before the trace was read: {outcome:?}");
    }
}

#[test]
fn children_do_not_run_without_their_parent() {
    let scratch = Scratch::new("child");
    let outcome = kvfabric_run(&scratch, &["child", "--parent-pid", "1", "--name", "orphan"]);
    fails_with(&outcome, &["parent process"]);
}
