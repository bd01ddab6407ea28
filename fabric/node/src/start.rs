//! The steps of a rank's start: each typed error names what is wrong and the remedy.

use std::net::SocketAddr;
use std::sync::mpsc::{channel, sync_channel, Sender};
use std::sync::Arc;
use std::time::Instant;

use kvfabric_core::directory::AnnouncerConfig;
use kvfabric_core::limits;
use kvfabric_core::load::VerifyPolicy;
use kvfabric_core::rank::{Rank, RankConfig};
use kvfabric_core::wire::{Address, AddressList, Advertised, EngineKey, Name};
use kvfabric_core::{Incarnation, TransportKind};
use kvfabric_memory::{HugePages, OwnerMemory, PoolConfig};
use kvfabric_transport_control::{Endpoint, Tls};
use kvfabric_transport_shm::{ShmProvider, ShmServer};
use kvfabric_transport_tcp::{
    ProviderOptions, ServeError, ServerOptions, TcpProvider, TcpServer, TlsClient, TokenStore,
};
use tokio::sync::watch;

use crate::command::Command;
use crate::control::Control;
use crate::driver::Driver;
use crate::filler::Filler;
use crate::handler::{Offer, RankHandler};
use crate::jobs::Jobs;
use crate::lane::Lane;
use crate::membership::{Membership, Starting};
use crate::node::{Node, CORE_ANSWER_MAX};
use crate::peers::Asker;
use crate::reads::Reads;
use crate::routes::{Routes, OWN_POOL};
use crate::session::LinkTask;
use crate::shared::Shared;
use crate::system::{endpoint_config, random_u64, runtime, security, socket_dir};
use crate::{
    ConfigError, DirectoryChoice, DirectoryConfig, DirectoryServer, HugePagesChoice, NodeConfig, NodeStats,
    StartError, TransportChoice,
};

/// The steps of a start.
pub(crate) struct Starter {
    config: NodeConfig,
    tls: Tls,
    incarnation: Incarnation,
    memory: Arc<OwnerMemory>,
    directory: Option<DirectoryServer>,
}

impl Starter {
    pub(crate) fn new(config: NodeConfig) -> Result<Self, StartError> {
        if config.transport == TransportChoice::Only(TransportKind::Rdma) {
            return Err(StartError::TransportUnavailable {
                transport: "rdma",
                reason: "this version has no RDMA verbs; use shm or tcp".into(),
            });
        }
        if config.listen.ip().is_unspecified() && config.advertise.is_none() {
            return Err(StartError::Config(ConfigError::BadValue {
                name: "advertise",
                value: String::new(),
                reason: format!(
                    "is needed when listening on {}: peers must be told a host name or address of this machine",
                    config.listen.ip()
                ),
            }));
        }
        tracing::info!(?config, "starting a rank");
        if config.ns_secret.as_bytes().is_empty() {
            tracing::info!(
                "the namespace secret is empty: whoever knows a namespace's name can look its blocks up"
            );
        }
        if let Some(warning) =
            memlock_warning(kvfabric_memory::locked_memory_limit_bytes(), config.pool_bytes)
        {
            tracing::warn!("{warning}");
        }
        if let Err(error) = kvfabric_memory::raise_fd_limit() {
            tracing::warn!(%error, "cannot raise the limit of open files");
        }
        let tls = Tls::load(&security(&config.security))
            .map_err(|error| StartError::Security(error.to_string()))?;
        if !tls.allows(&config.name) {
            return Err(StartError::Security(format!(
                "the certificate is for {:?}, which does not allow rank name {:?}; make one with `kvfabric certs DIR --name {}`",
                tls.names(),
                config.name,
                config.name
            )));
        }
        let incarnation = loop {
            if let Some(incarnation) = Incarnation::new(random_u64()?) {
                break incarnation;
            }
        };
        let memory = OwnerMemory::create(&PoolConfig {
            capacity_bytes: config.pool_bytes,
            word_slots: word_slots(config.pool_bytes),
            huge_pages: match config.huge_pages {
                HugePagesChoice::Off => HugePages::Off,
                HugePagesChoice::Auto => HugePages::Auto,
                HugePagesChoice::Require => HugePages::Require,
            },
            prefault: true,
        })
        .map_err(|error| StartError::Pool(error.to_string()))?;
        Ok(Self { config, tls, incarnation, memory, directory: None })
    }

    pub(crate) fn start(mut self) -> Result<Node, StartError> {
        let target = match self.config.directory.clone() {
            DirectoryChoice::Remote(address) => address,
            DirectoryChoice::Embedded(listen) => {
                let server = DirectoryServer::start(DirectoryConfig {
                    cluster: self.config.cluster.clone(),
                    security: self.config.security.clone(),
                    peer_timeout: self.config.peer_timeout,
                    ..DirectoryConfig::new(listen)
                })?;
                let address = server.local_addr();
                self.directory = Some(server);
                address.to_string()
            }
        };
        let (runtime, handle) = runtime("kvf-control")?;
        let tokens = Arc::new(TokenStore::new());
        let tcp = self.tcp_server(&tokens)?;
        let shm = self.shm_server()?;
        let (commands, inbox) = channel();
        let shared = Arc::new(Shared::new(
            self.incarnation.get(),
            commands.clone(),
            self.config.ns_secret.as_bytes().to_vec(),
            self.config.pool_bytes,
        ));
        let offer = self.offer(&tcp, &shm, tokens)?;
        let handler = Arc::new(RankHandler::new(offer, commands.clone(), shared.touches.clone()));
        let endpoint = {
            let _guard = handle.enter();
            let settings = endpoint_config(self.tls.clone(), self.config.peer_timeout);
            Endpoint::bind(settings, self.config.listen, handler.clone())
                .map_err(|error| self.listen_error(error.to_string()))?
        };
        let identity = self.identity(&endpoint, &tcp, &shm)?;
        let control = Control::new(
            handle.clone(),
            commands.clone(),
            self.asker(&endpoint, &identity, commands.clone()),
            EngineKey::of(&self.config.engine),
        );
        let (started, result) = channel();
        let starting = Starting { reply: started, begun: Instant::now(), timeout: self.config.start_timeout };
        let membership =
            Membership::new(target.clone(), self.config.name.clone(), self.config.peer_timeout, starting);
        let driver = self.driver(&shared, inbox, &commands, control, identity, membership)?;
        let core = std::thread::Builder::new()
            .name("kvf-core".into())
            .spawn(move || driver.run())
            .map_err(|source| StartError::System { what: "cannot start the core thread".into(), source })?;
        let (stop, stopping) = watch::channel(false);
        let link = LinkTask {
            endpoint: endpoint.clone(),
            target: target.clone(),
            handler,
            core: commands,
            seed: self.incarnation.get(),
            stop: stopping,
        };
        handle.spawn(link.run());
        let mut node = Node {
            name: self.config.name.clone(),
            incarnation: self.incarnation,
            shared,
            core: Some(core),
            stop,
            endpoint,
            metrics: None,
            runtime: runtime.started(),
            _tcp: tcp,
            _shm: shm,
            _memory: self.memory.clone(),
            directory: self.directory.take(),
            reached_directory: false,
        };
        // From here on dropping the node undoes everything.
        let patience = self.config.start_timeout.saturating_add(CORE_ANSWER_MAX);
        let joined = result.recv_timeout(patience).unwrap_or_else(|_| {
            Err(StartError::DirectoryUnreachable { address: target, reason: "no answer in time".into() })
        });
        // The start timeout is over; a farewell to nobody would only delay its error.
        node.reached_directory = !matches!(joined, Err(StartError::DirectoryUnreachable { .. }));
        joined?;
        node.metrics = self.metrics(&node)?;
        Ok(node)
    }

    fn listen_error(&self, reason: String) -> StartError {
        StartError::Listen { address: self.config.listen.to_string(), reason }
    }

    fn offers(&self, kind: TransportKind) -> bool {
        self.config.transport == TransportChoice::Auto || self.config.transport == TransportChoice::Only(kind)
    }

    fn data_tls(&self) -> bool {
        self.config.data_tls.unwrap_or(!self.config.listen.ip().is_loopback() && self.tls.authenticates())
    }

    fn tcp_server(&self, tokens: &Arc<TokenStore>) -> Result<Option<TcpServer>, StartError> {
        if !self.offers(TransportKind::Tcp) {
            return Ok(None);
        }
        let options = ServerOptions {
            threads: self.config.lanes,
            tls: self.data_tls().then(|| self.tls.data_server_config()),
            ..ServerOptions::default()
        };
        let memory = self.memory.clone();
        TcpServer::start(self.config.listen, memory, tokens.clone(), self.incarnation.get(), options)
            .map(Some)
            .map_err(|error| match error {
                ServeError::AddressInUse(address) => StartError::Listen {
                    address: address.to_string(),
                    reason: "the TCP port is in use; choose another --listen, or port 0 for a free one"
                        .into(),
                },
                other => self.listen_error(other.to_string()),
            })
    }

    fn shm_server(&self) -> Result<Option<ShmServer>, StartError> {
        if !self.offers(TransportKind::Shm) {
            return Ok(None);
        }
        let dir = socket_dir(self.config.socket_dir.as_deref())?;
        ShmServer::start_in(&dir, self.memory.clone(), self.incarnation.get()).map(Some).map_err(|error| {
            StartError::System { what: error.to_string(), source: std::io::Error::other("shm") }
        })
    }

    /// The host that peers use for an address of ours.
    fn advertised(&self, address: SocketAddr) -> String {
        match &self.config.advertise {
            Some(host) if host.contains(':') && !host.starts_with('[') => {
                format!("[{host}]:{}", address.port())
            }
            Some(host) => format!("{host}:{}", address.port()),
            None => address.to_string(),
        }
    }

    fn address(&self, text: String) -> Result<Address<'static>, StartError> {
        Address::new(text.clone()).ok_or_else(|| {
            StartError::Config(ConfigError::BadValue {
                name: "advertise",
                value: text,
                reason: format!("must have 1 to {} bytes", limits::ADDRESS_BYTES_MAX),
            })
        })
    }

    fn name(name: &'static str, text: &str) -> Result<Name<'static>, StartError> {
        Name::new(text.to_owned()).ok_or_else(|| {
            StartError::Config(ConfigError::BadValue {
                name,
                value: text.chars().take(64).collect(),
                reason: format!("must have 1 to {} bytes", limits::NAME_BYTES_MAX),
            })
        })
    }

    fn offer(
        &self,
        tcp: &Option<TcpServer>,
        shm: &Option<ShmServer>,
        tokens: Arc<TokenStore>,
    ) -> Result<Offer, StartError> {
        Ok(Offer {
            cluster: Self::name("cluster", &self.config.cluster)?,
            name: Self::name("name", &self.config.name)?,
            incarnation: self.incarnation,
            unix: shm.as_ref().map(|shm| self.address(shm.path().display().to_string())).transpose()?,
            tcp: tcp.as_ref().map(|tcp| self.address(self.advertised(tcp.local_addr()))).transpose()?,
            tokens,
        })
    }

    fn identity(
        &self,
        endpoint: &Endpoint,
        tcp: &Option<TcpServer>,
        shm: &Option<ShmServer>,
    ) -> Result<AnnouncerConfig, StartError> {
        let list = |addresses: Vec<Address<'static>>| AddressList::new(addresses).unwrap_or_default();
        let control = self.address(self.advertised(endpoint.local_addr()))?;
        let tcp = tcp.as_ref().map(|tcp| self.address(self.advertised(tcp.local_addr()))).transpose()?;
        let unix = shm.as_ref().map(|shm| self.address(shm.path().display().to_string())).transpose()?;
        Ok(AnnouncerConfig {
            cluster: Self::name("cluster", &self.config.cluster)?,
            name: Self::name("name", &self.config.name)?,
            engine: Self::name("engine", &self.config.engine)?,
            incarnation: self.incarnation,
            advertised: Advertised {
                control: list(vec![control]),
                tcp: list(tcp.into_iter().collect()),
                unix: list(unix.into_iter().collect()),
                nics: AddressList::default(),
            },
        })
    }

    fn asker(&self, endpoint: &Endpoint, identity: &AnnouncerConfig, core: Sender<Command>) -> Asker {
        let connections = ProviderOptions::default().connections_per_peer;
        Asker {
            endpoint: endpoint.clone(),
            cluster: identity.cluster.clone(),
            name: identity.name.clone(),
            incarnation: self.incarnation,
            choice: self.config.transport,
            tcp_connections: u8::try_from(connections).unwrap_or(1),
            core,
        }
    }

    fn lanes(&self, core: &Sender<Command>) -> Result<Vec<Lane>, StartError> {
        let system = |what: &str| {
            let what = what.to_owned();
            move |source: std::io::Error| StartError::System { what, source }
        };
        let mut lanes = Vec::new();
        // A rank's own pool is read over shm, whatever the transport to peers.
        for index in 0..self.config.lanes {
            let mut provider = ShmProvider::new().map_err(system("cannot start the shm provider"))?;
            provider.add_local(OWN_POOL, self.memory.clone());
            let lane = Lane::start(TransportKind::Shm, index, Box::new(provider), core.clone());
            lanes.push(lane.map_err(system("cannot start a data thread"))?);
        }
        if self.offers(TransportKind::Tcp) {
            for index in 0..self.config.lanes {
                let mut options = ProviderOptions::default();
                if self.data_tls() {
                    // The peer was told apart by the authenticated HELLO whose one-time token opens this connection.
                    let config = self
                        .tls
                        .data_client_config_any()
                        .map_err(|error| StartError::Security(error.to_string()))?;
                    options.tls = Some(TlsClient { config, server_name: None });
                }
                let provider = TcpProvider::new(options).map_err(|error| StartError::System {
                    what: error.to_string(),
                    source: std::io::Error::other("tcp"),
                })?;
                let lane = Lane::start(TransportKind::Tcp, index, Box::new(provider), core.clone());
                lanes.push(lane.map_err(system("cannot start a data thread"))?);
            }
        }
        Ok(lanes)
    }

    fn driver(
        &self,
        shared: &Arc<Shared>,
        inbox: std::sync::mpsc::Receiver<Command>,
        commands: &Sender<Command>,
        control: Control,
        identity: AnnouncerConfig,
        membership: Membership,
    ) -> Result<Driver, StartError> {
        let mut rank = RankConfig::new(identity, self.config.pool_bytes);
        rank.owner.extent_bytes = self.config.extent_bytes;
        rank.owner.slots_max = word_slots(self.config.pool_bytes);
        rank.load.verify = self.config.verify.map_or_else(VerifyPolicy::default, VerifyPolicy::all);
        let checksums = rank.owner.checksums;
        let rank = Rank::new(rank).map_err(|error| StartError::Pool(error.to_string()))?;
        let filler = Filler::start(self.config.lanes, &self.memory, commands)
            .map_err(|source| StartError::System { what: "cannot start a fill thread".into(), source })?;
        Ok(Driver {
            shared: shared.clone(),
            inbox,
            started: Instant::now(),
            rank,
            memory: self.memory.clone(),
            filler,
            routes: Routes::new(self.lanes(commands)?),
            control,
            jobs: Jobs::default(),
            reads: Reads::default(),
            closing: None,
            checksums,
            membership,
            pool_bytes: self.config.pool_bytes,
        })
    }

    fn metrics(&self, node: &Node) -> Result<Option<crate::metrics::MetricsServer>, StartError> {
        let (Some(address), Some(runtime)) = (self.config.metrics_listen, &node.runtime) else {
            return Ok(None);
        };
        let shared = node.shared.clone();
        let server = crate::metrics::MetricsServer::start(runtime.handle(), address, move || {
            let (reply, answer) = sync_channel(1);
            let stats = if shared.send(Command::Stats { reply }) {
                answer.recv_timeout(CORE_ANSWER_MAX).unwrap_or_default()
            } else {
                NodeStats::default()
            };
            crate::metrics::node_text(&stats, &shared.latencies)
        })?;
        Ok(Some(server))
    }
}

/// What a limit of locked memory below the pool means: nothing for shm and tcp, a refused registration for rdma.
fn memlock_warning(limit_bytes: Option<u64>, pool_bytes: u64) -> Option<String> {
    let limit = limit_bytes.filter(|limit| *limit < pool_bytes)?;
    Some(format!(
        "locked memory is limited to {limit} bytes, the pool has {pool_bytes}: shm and tcp do not mind, RDMA registration \
         would fail; raise it with `ulimit -l unlimited` or LimitMEMLOCK=infinity"
    ))
}

/// Words for a pool: as many as it could hold objects of 512 bytes, and room for extents that change hands. The table is
/// sparse: unused words cost nothing.
fn word_slots(pool_bytes: u64) -> u32 {
    const OBJECT_BYTES: u64 = 512;
    const SLOTS_MIN: u64 = 1 << 20;
    let slots = (pool_bytes / OBJECT_BYTES).clamp(SLOTS_MIN, u64::from(limits::SLOTS_MAX));
    u32::try_from(slots).unwrap_or(limits::SLOTS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_memlock_limit_is_a_warning() {
        assert!(memlock_warning(None, 1 << 30).is_none());
        assert!(memlock_warning(Some(1 << 30), 1 << 30).is_none());
        let warning = memlock_warning(Some(8 << 20), 1 << 30).unwrap();
        assert!(warning.contains("ulimit -l"), "{warning}");
    }
}
