//! The same over TLS with certificates on both sides.

use std::sync::Arc;

use kvfabric_memory::ScatterList;
use kvfabric_transport_api::{ConnectError, Provider, ReadError};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use super::{object, Arena, Owner, Random, Reader};
use crate::{ProviderOptions, ServerOptions, TlsClient};

type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self { issuer: CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap() }
    }

    fn roots(&self) -> Arc<RootCertStore> {
        let mut roots = RootCertStore::empty();
        roots.add(self.issuer.der().clone()).unwrap();
        Arc::new(roots)
    }

    fn identity(&self, name: &str) -> Identity {
        let key = KeyPair::generate().unwrap();
        let certificate =
            CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&key, &self.issuer).unwrap();
        (vec![certificate.der().clone()], PrivateKeyDer::try_from(key.serialize_der()).unwrap())
    }

    fn server(&self) -> ServerOptions {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(self.roots(), Arc::clone(&provider)).build().unwrap();
        let (chain, key) = self.identity("rank-0");
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)
            .unwrap();
        ServerOptions { tls: Some(Arc::new(config)), ..Default::default() }
    }

    fn client(&self, identity: Option<Identity>, name: &str) -> ProviderOptions {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(self.roots());
        let config = match identity {
            Some((chain, key)) => builder.with_client_auth_cert(chain, key).unwrap(),
            None => builder.with_no_client_auth(),
        };
        ProviderOptions {
            tls: Some(TlsClient {
                config: Arc::new(config),
                server_name: Some(ServerName::try_from(name.to_owned()).unwrap()),
            }),
            ..Default::default()
        }
    }
}

fn start(authority: &Authority, sizes: &[usize]) -> Owner {
    Owner::start_with(sizes, "127.0.0.1:0".parse().unwrap(), authority.server())
}

fn tls_refusal(options: ProviderOptions, owner: &Owner) -> String {
    let mut reader = Reader::with(options);
    match reader.connect(1, owner.target(1)) {
        Err(ConnectError::Unreachable(reason)) => reason,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn reads_over_tls_land_the_same_bytes() {
    let mut random = Random::new("reads_over_tls");
    let authority = Authority::new();
    let sizes = [1, 5000, 100_000, 3_000_000];
    let owner = start(&authority, &sizes);
    let mut reader = Reader::with(authority.client(Some(authority.identity("rank-1")), "rank-0"));
    reader.connect(1, owner.target(2)).unwrap();
    for round in 0..60 {
        let slots: Vec<usize> = (0..1 + random.below(6)).map(|_| random.below(sizes.len())).collect();
        let mut arenas = std::collections::HashMap::new();
        for &slot in &slots {
            let size = sizes[slot];
            let arena = Arena::new(size * 2 + 10);
            let mut list = ScatterList::default();
            // Two pieces in the wrong order, where there are two bytes.
            let first = size / 2;
            list.push(&arena.region, size + 5, first).unwrap();
            list.push(&arena.region, 1, size - first).unwrap();
            let token = reader.post(1, slot as u32, size, 0, list, true).unwrap();
            arenas.insert(token, (slot, arena));
        }
        let mut aborted = None;
        if round % 5 == 4 {
            reader.poll(random.below(5));
            aborted = arenas.keys().next().copied();
            aborted.into_iter().for_each(|token| reader.provider.abort(token));
        }
        while !arenas.is_empty() {
            let done = reader.next_read();
            let (slot, arena) = arenas.remove(&done.token).unwrap();
            match done.outcome {
                Ok(landed) => {
                    assert_eq!(landed.check, Some(landed.word.check));
                    let (size, bytes) = (sizes[slot], arena.bytes());
                    let whole = object(slot as u32, 1, size);
                    let first = size / 2;
                    assert!(bytes[size + 5..size + 5 + first] == whole[..first]);
                    assert!(bytes[1..1 + size - first] == whole[first..]);
                }
                Err(error) => assert_eq!((error, Some(done.token)), (ReadError::Aborted, aborted)),
            }
        }
    }
}

#[test]
fn a_stranger_is_refused_on_either_side() {
    let (authority, other) = (Authority::new(), Authority::new());
    let owner = start(&authority, &[100]);
    // The reader trusts another authority: the owner's certificate does not convince it.
    let reason = tls_refusal(other.client(Some(authority.identity("rank-1")), "rank-0"), &owner);
    assert!(reason.contains("TLS"), "{reason}");
    // The owner's certificate bears another name.
    let reason = tls_refusal(authority.client(Some(authority.identity("rank-1")), "rank-9"), &owner);
    assert!(reason.contains("TLS"), "{reason}");
    // The reader's certificate comes from another authority, or is missing.
    let mut strange = authority.client(Some(other.identity("rank-1")), "rank-0");
    strange.connections_per_peer = 1;
    tls_refusal(strange, &owner);
    tls_refusal(authority.client(None, "rank-0"), &owner);
    // A reader without TLS finds no welcome.
    let mut plain = Reader::new();
    assert!(plain.connect(1, owner.target(1)).is_err());
    let stats = owner.server.stats();
    assert!(stats.objects_sent == 0);
    super::eventually("all are gone", || owner.server.stats().connections == 0);
    let mut good = Reader::with(authority.client(Some(authority.identity("rank-1")), "rank-0"));
    good.connect(1, owner.target(1)).unwrap();
    good.read_whole(1, 0, 100, 1);
}
