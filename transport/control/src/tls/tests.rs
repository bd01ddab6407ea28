//! Certificates: making, reusing, checking, and using them over TCP.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use rcgen::date_time_ymd;
use rustls::pki_types::ServerName;

use super::*;
use crate::tests::{new_tls, TempDir};

fn strings(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn load(dir: &Path) -> Result<Tls, TlsError> {
    Tls::load(&Security::Dir(dir.to_owned()))
}

fn mode(file: &Path) -> u32 {
    fs::metadata(file).unwrap().permissions().mode() & 0o777
}

#[test]
fn a_run_makes_all_files_with_the_right_modes() {
    let parent = TempDir::new();
    let dir = parent.path().join("new/certs");
    let report =
        certs::generate(&dir, &strings(&["engine0", "host.example", "10.1.2.3", "2001:db8::1"])).unwrap();
    assert!(report.ca_created);
    for name in ["localhost", "127.0.0.1", "::1", "engine0", "host.example", "10.1.2.3", "2001:db8::1"] {
        assert!(report.names.contains(&name.to_owned()), "{name} is missing in {:?}", report.names);
    }
    assert_eq!((mode(&report.ca_key), mode(&report.key), mode(&dir)), (0o600, 0o600, 0o700));
    assert_eq!((mode(&report.ca), mode(&report.cert)), (0o644, 0o644));
    let tls = load(&dir).unwrap();
    assert_eq!(tls.names(), report.names);
    assert!(tls.allows("engine0-tp1") && !tls.allows("engine1"));
    // Nothing but what was asked for.
    let mut files: Vec<String> =
        fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    files.sort();
    assert_eq!(files, [".lock", "ca-key.pem", "ca.pem", "cert.pem", "key.pem"]);
}

#[test]
fn another_run_keeps_authority_and_key_and_adds_names() {
    let dir = TempDir::new();
    let first = certs::generate(dir.path(), &strings(&["engine0"])).unwrap();
    let before = load(dir.path()).unwrap();
    let (ca, key) = (fs::read(&first.ca).unwrap(), fs::read(&first.key).unwrap());
    let second = certs::generate(dir.path(), &strings(&["engine1"])).unwrap();
    assert!(!second.ca_created);
    assert!(second.names.contains(&"engine0".to_owned()) && second.names.contains(&"engine1".to_owned()));
    assert_eq!((fs::read(&second.ca).unwrap(), fs::read(&second.key).unwrap()), (ca, key));
    let after = load(dir.path()).unwrap();
    assert!(!before.allows("engine1") && after.allows("engine1"));
    // Processes from before and after understand each other.
    talk(&before, &after, None).unwrap();
    talk(&after, &before, Some("engine0")).unwrap();
}

#[test]
fn another_hosts_directory_starts_from_the_authority() {
    let (here, there) = (TempDir::new(), TempDir::new());
    certs::generate(here.path(), &strings(&["engine0"])).unwrap();
    for file in [CA_FILE, CA_KEY_FILE] {
        fs::copy(here.path().join(file), there.path().join(file)).unwrap();
    }
    let report = certs::generate(there.path(), &strings(&["engine1"])).unwrap();
    assert!(!report.ca_created);
    assert!(!report.names.contains(&"engine0".to_owned()));
    talk(&load(here.path()).unwrap(), &load(there.path()).unwrap(), Some("engine1")).unwrap();
}

#[test]
fn names_that_make_no_certificate() {
    let dir = TempDir::new();
    for name in ["", "with space", "ümlaut", "tab\there", &"x".repeat(256)] {
        let error = certs::generate(dir.path(), &strings(&[name])).unwrap_err();
        assert!(matches!(error, TlsError::InvalidName { .. }), "{name}: {error}");
    }
    let many: Vec<String> = (0..2000).map(|number| format!("engine{number}")).collect();
    let error = certs::generate(dir.path(), &many).unwrap_err();
    assert!(matches!(error, TlsError::TooManyNames { .. }), "{error}");
    assert!(!dir.path().join(CERT_FILE).exists(), "nothing is made of wrong names");
}

#[test]
fn missing_and_spoilt_files_are_named_with_a_remedy() {
    for file in [CA_FILE, CERT_FILE, KEY_FILE] {
        let dir = TempDir::new();
        certs::generate(dir.path(), &[]).unwrap();
        let path = dir.path().join(file);
        fs::write(&path, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
        let error = load(dir.path()).unwrap_err();
        assert!(matches!(&error, TlsError::Malformed { file, .. } if *file == path), "{error:?}");
        fs::write(&path, "nothing").unwrap();
        let error = load(dir.path()).unwrap_err();
        assert!(matches!(&error, TlsError::Malformed { file, .. } if *file == path), "{error:?}");
        fs::write(&path, vec![b'x'; usize::try_from(crate::limits::PEM_BYTES_MAX + 1).unwrap()]).unwrap();
        let error = load(dir.path()).unwrap_err();
        assert!(error.to_string().contains("larger than"), "{error}");
        fs::remove_file(&path).unwrap();
        let error = load(dir.path()).unwrap_err();
        assert_eq!(error, TlsError::Missing { file: path.clone(), dir: dir.path().to_owned() });
        let text = error.to_string();
        assert!(text.contains(&*path.to_string_lossy()) && text.contains("kvfabric certs"), "{text}");
    }
    let nowhere = Path::new("/nonexistent/kvfabric");
    let error = load(nowhere).unwrap_err();
    assert_eq!(error, TlsError::Missing { file: nowhere.join(CA_FILE), dir: nowhere.to_owned() });
    assert!(matches!(certs::generate(Path::new("/proc/kvfabric"), &[]), Err(TlsError::Io { .. })));
}

#[test]
fn keys_and_authorities_that_do_not_fit() {
    let (one, two) = (TempDir::new(), TempDir::new());
    certs::generate(one.path(), &[]).unwrap();
    certs::generate(two.path(), &[]).unwrap();
    let path = |dir: &TempDir, file: &str| dir.path().join(file);
    let own_key = fs::read(path(&one, KEY_FILE)).unwrap();
    fs::copy(path(&two, KEY_FILE), path(&one, KEY_FILE)).unwrap();
    let error = load(one.path()).unwrap_err();
    assert_eq!(error, TlsError::KeyMismatch { key: path(&one, KEY_FILE), cert: path(&one, CERT_FILE) });
    fs::write(path(&one, KEY_FILE), own_key).unwrap();
    load(one.path()).unwrap();
    fs::copy(path(&two, CA_FILE), path(&one, CA_FILE)).unwrap();
    let error = load(one.path()).unwrap_err();
    assert!(matches!(error, TlsError::NotIssuedByCa { .. }), "{error:?}");
    // The key here is not of the authority that was brought in.
    let error = certs::generate(one.path(), &[]).unwrap_err();
    assert_eq!(error, TlsError::KeyMismatch { key: path(&one, CA_KEY_FILE), cert: path(&one, CA_FILE) });
    fs::remove_file(path(&one, CA_KEY_FILE)).unwrap();
    let error = certs::generate(one.path(), &[]).unwrap_err();
    assert_eq!(error, TlsError::CaKeyMissing { ca: path(&one, CA_FILE), key: path(&one, CA_KEY_FILE) });
}

/// An authority and a certificate with the given years of validity, written to `dir`.
fn write_dated(dir: &Path, ca_years: (i32, i32), cert_years: (i32, i32)) {
    let mut ca = rcgen::CertificateParams::default();
    (ca.not_before, ca.not_after) = (date_time_ymd(ca_years.0, 1, 1), date_time_ymd(ca_years.1, 1, 1));
    ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca_key = rcgen::KeyPair::generate().unwrap();
    fs::write(dir.join(CA_FILE), ca.self_signed(&ca_key).unwrap().pem()).unwrap();
    fs::write(dir.join(CA_KEY_FILE), ca_key.serialize_pem()).unwrap();
    let mut leaf = rcgen::CertificateParams::new(strings(&["localhost", "engine0"])).unwrap();
    (leaf.not_before, leaf.not_after) =
        (date_time_ymd(cert_years.0, 1, 1), date_time_ymd(cert_years.1, 1, 1));
    let key = rcgen::KeyPair::generate().unwrap();
    let issuer = rcgen::Issuer::new(ca, ca_key);
    fs::write(dir.join(CERT_FILE), leaf.signed_by(&key, &issuer).unwrap().pem()).unwrap();
    fs::write(dir.join(KEY_FILE), key.serialize_pem()).unwrap();
}

#[test]
fn certificates_out_of_their_time() {
    let dir = TempDir::new();
    let cert = dir.path().join(CERT_FILE);
    write_dated(dir.path(), (2000, 2200), (2000, 2020));
    let error = load(dir.path()).unwrap_err();
    assert!(matches!(&error, TlsError::Expired { file, .. } if *file == cert), "{error:?}");
    assert!(error.to_string().contains("to renew it"), "{error}");
    // The remedy works, and keeps the names.
    certs::generate(dir.path(), &[]).unwrap();
    assert!(load(dir.path()).unwrap().allows("engine0"));
    write_dated(dir.path(), (2000, 2200), (2150, 2200));
    let error = load(dir.path()).unwrap_err();
    assert!(matches!(&error, TlsError::NotYetValid { file, .. } if *file == cert), "{error:?}");
    write_dated(dir.path(), (2000, 2020), (2000, 2200));
    let ca = dir.path().join(CA_FILE);
    for error in [load(dir.path()).unwrap_err(), certs::generate(dir.path(), &[]).unwrap_err()] {
        assert!(matches!(&error, TlsError::Expired { file, .. } if *file == ca), "{error:?}");
        assert!(error.to_string().contains("delete ca.pem and ca-key.pem"), "{error}");
    }
    for file in [CA_FILE, CA_KEY_FILE] {
        fs::remove_file(dir.path().join(file)).unwrap();
    }
    certs::generate(dir.path(), &[]).unwrap();
    load(dir.path()).unwrap();
}

#[test]
fn sixteen_threads_make_one_development_authority() {
    let parent = TempDir::new();
    let dir = parent.path().join("state/kvfabric/dev-ca");
    let loaded: Vec<Tls> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..16).map(|_| scope.spawn(|| Tls::load_dev(&dir).unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(mode(&dir), 0o700);
    for tls in &loaded {
        assert_eq!(tls.chain, loaded[0].chain);
        assert_eq!(tls.security(), &Security::Dev);
        assert!(tls.allows("any-rank"));
    }
    talk(&loaded[0], &loaded[15], None).unwrap();
}

/// The parent starts this very test in processes of their own, which take the other branch.
#[test]
fn processes_that_start_together_share_the_development_authority() {
    const STATE: &str = "KVFABRIC_TEST_DEV_CA_PROCESS";
    if std::env::var_os(STATE).is_some() {
        let tls = Tls::load(&Security::Dev).unwrap();
        println!("chain {:?}", tls.chain[0].as_ref());
        return;
    }
    let state = TempDir::new();
    let children: Vec<_> = (0..8)
        .map(|_| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "--nocapture", "--test-threads=1"])
                .arg("tls::tests::processes_that_start_together_share_the_development_authority")
                .env(STATE, "1")
                .env("XDG_STATE_HOME", state.path())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    let mut chains = std::collections::BTreeSet::new();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        let text = String::from_utf8(output.stdout).unwrap();
        let chain =
            text.lines().find(|line| line.contains("chain [")).expect("the child says its chain").to_owned();
        chains.insert(chain);
    }
    assert_eq!(chains.len(), 1, "the processes have different certificates");
    assert_eq!(mode(&state.path().join("kvfabric/dev-ca")), 0o700);
}

#[test]
fn a_spoilt_development_authority_is_repaired_and_opened_to_nobody() {
    let parent = TempDir::new();
    let dir = parent.path().join("dev-ca");
    let first = Tls::load_dev(&dir).unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
    // The certificate can be made anew by the authority that is there, so older processes still agree with new ones.
    for spoilt in [CERT_FILE, KEY_FILE] {
        fs::write(dir.join(spoilt), "spoilt").unwrap();
        let again = Tls::load_dev(&dir).unwrap();
        talk(&first, &again, None).unwrap();
    }
    assert_eq!(mode(&dir), 0o700);
    // Without the authority there is nothing to keep.
    for spoilt in [CA_FILE, CA_KEY_FILE] {
        fs::write(dir.join(spoilt), "spoilt").unwrap();
        fs::remove_file(dir.join(CERT_FILE)).unwrap();
        let again = Tls::load_dev(&dir).unwrap();
        assert_ne!(again.chain, first.chain);
    }
    write_dated(&dir, (2000, 2200), (2000, 2020));
    Tls::load_dev(&dir).unwrap();
    write_dated(&dir, (2000, 2020), (2000, 2020));
    Tls::load_dev(&dir).unwrap();
}

#[test]
fn a_process_that_was_killed_half_way_leaves_nothing_that_stays_in_the_way() {
    let parent = TempDir::new();
    let dir = parent.path().join("dev-ca");
    Tls::load_dev(&dir).unwrap();
    // The files are written in this order; each prefix of it may be all that is left.
    let order = [CA_KEY_FILE, CA_FILE, KEY_FILE, CERT_FILE];
    for kept in 0..order.len() {
        for file in &order[kept..] {
            fs::remove_file(dir.join(file)).unwrap();
        }
        Tls::load_dev(&dir).unwrap();
    }
}

#[test]
fn certificates_are_made_under_the_lock() {
    let dir = TempDir::new();
    let lock = files::DirLock::acquire(dir.path()).unwrap();
    let waiting = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| certs::generate(dir.path(), &[]));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!dir.path().join(CA_FILE).exists(), "made while another holds the lock");
        drop(lock);
        waiting.join().unwrap()
    });
    waiting.unwrap();
}

#[test]
fn only_loopback_is_listened_on_with_development_certificates() {
    for (address, allowed) in [
        ("127.0.0.1:1", true),
        ("127.9.9.9:1", true),
        ("[::1]:1", true),
        ("[::ffff:127.0.0.1]:1", true),
        ("0.0.0.0:1", false),
        ("[::]:1", false),
        ("10.0.0.1:1", false),
        ("[2001:db8::1]:1", false),
    ] {
        assert_eq!(Security::Dev.check_listen(address.parse().unwrap()).is_ok(), allowed, "{address}");
        assert!(Security::InsecureNoAuth.check_listen(address.parse().unwrap()).is_ok());
        assert!(Security::Dir("x".into()).check_listen(address.parse().unwrap()).is_ok());
    }
}

/// TLS over TCP as the data path does it: `client` asks `server`, either as `localhost` or as the rank `rank`.
fn talk(client: &Tls, server: &Tls, rank: Option<&str>) -> Result<Vec<String>, std::io::Error> {
    let config = match rank {
        None => client.data_client_config(),
        Some(rank) => client.data_client_config_for(rank).unwrap(),
    };
    talk_with(config, server.data_server_config())
}

fn talk_with(client: Arc<ClientConfig>, server: Arc<ServerConfig>) -> Result<Vec<String>, std::io::Error> {
    let limit = Some(Duration::from_secs(20));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::scope(|scope| {
        let serving = scope.spawn(move || -> Result<Vec<String>, std::io::Error> {
            let tcp = listener.accept()?.0;
            tcp.set_read_timeout(limit)?;
            let mut stream = rustls::StreamOwned::new(rustls::ServerConnection::new(server).unwrap(), tcp);
            let mut request = [0u8; 4];
            stream.read_exact(&mut request)?;
            stream.write_all(&request)?;
            stream.flush()?;
            let names = stream.conn.peer_certificates().and_then(<[_]>::first).map(peer_names);
            Ok(names.unwrap_or_default())
        });
        let tcp = TcpStream::connect(address)?;
        tcp.set_read_timeout(limit)?;
        let name = ServerName::try_from("localhost").unwrap();
        let mut stream = rustls::StreamOwned::new(rustls::ClientConnection::new(client, name).unwrap(), tcp);
        let asked = stream.write_all(b"ping").and_then(|()| {
            let mut reply = [0u8; 4];
            stream.read_exact(&mut reply)?;
            assert_eq!(&reply, b"ping");
            Ok(())
        });
        drop(stream);
        let served = serving.join().unwrap();
        asked.and(served)
    })
}

#[test]
fn the_data_path_is_mutually_authenticated() {
    let (ours, theirs) = (new_tls(&["engine0"]), new_tls(&["engine0"]));
    let names = talk(&ours, &ours, None).unwrap();
    assert_eq!(names, ours.names(), "the server knows its client");
    talk(&ours, &ours, Some("engine0-tp1")).unwrap();
    assert!(talk(&ours, &ours, Some("engine1")).is_err());
    assert!(talk(&ours, &theirs, None).is_err());
    assert!(talk(&theirs, &ours, Some("engine0")).is_err());
    let insecure = Tls::load(&Security::InsecureNoAuth).unwrap();
    assert!(talk(&insecure, &ours, None).is_err(), "a client without certificate is refused");
    assert!(talk(&ours, &insecure, None).is_err());
    let other = Tls::load(&Security::InsecureNoAuth).unwrap();
    assert!(talk(&insecure, &other, Some("anybody")).unwrap().is_empty());
}

#[test]
fn control_and_data_do_not_talk_to_each_other() {
    let tls = new_tls(&[]);
    let control = Arc::new(tls.control_client_config(NameRule::Any).unwrap());
    assert!(talk_with(control, tls.data_server_config()).is_err());
}

#[test]
fn names_of_peers_decide() {
    let tls = new_tls(&["engine0", "10.0.0.9"]);
    let certificates = tls.chain.clone();
    assert!(tls.peer_allows(Some(&certificates), "engine0-tp0"));
    assert!(!tls.peer_allows(Some(&certificates), "engine1"));
    assert!(!tls.peer_allows(None, "engine0"));
    assert!(!tls.peer_allows(Some(&[]), "engine0"));
    assert!(peer_names(&CertificateDer::from(vec![1, 2, 3])).is_empty());
    assert!(tls.names().contains(&"10.0.0.9".to_owned()));
    let insecure = Tls::load(&Security::InsecureNoAuth).unwrap();
    assert!(insecure.peer_allows(None, "engine0") && insecure.allows("engine0"));
    assert!(!format!("{tls:?}").contains("Pkcs8"), "keys stay out of logs");
}
