//! A small owner, a small reader, and an owner whose every byte a test scripts.

// Small numbers of the tests' own.
#![allow(clippy::cast_possible_truncation)]

mod aborts;
mod frames;
mod greeting;
mod hostile;
mod reads;
mod tls;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::AtomicBool;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvfabric_memory::{HugePages, OwnerMemory, PoolConfig, RawWord, Region, ScatterList, Slab};
use kvfabric_transport_api::{
    ConnectError, Event, OpToken, PeerKey, PeerTarget, PostError, Provider, ReadDone, ReadOp,
};

use crate::wire::{
    Hello, Reply, Request, RequestParser, Status, Verdict, Welcome, HELLO_BYTES, WELCOME_BYTES,
};
use crate::{ProviderOptions, ServerOptions, TcpProvider, TcpServer, TokenStore};

/// Far beyond what anything here takes; a test that gets there has failed.
const LIMIT: Duration = Duration::from_secs(60);
const INCARNATION: u64 = 0x1234_5678_9abc_def0;
const CANARY: u8 = 0xEE;

/// A generator of numbers that a seed replays.
struct Random(u64);

impl Random {
    /// From `KVFABRIC_TEST_SEED`, or from the system; the seed is printed either way.
    fn new(test: &str) -> Self {
        let seed = std::env::var("KVFABRIC_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = seed.unwrap_or_else(|| getrandom::u64().unwrap());
        println!("KVFABRIC_TEST_SEED={seed} cargo test -p kvfabric-transport-tcp {test}");
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.next() as u8).collect()
    }
}

/// What a slot's object holds under a generation.
fn object(slot: u32, generation: u64, length: usize) -> Vec<u8> {
    let mut random = Random((u64::from(slot) << 32) ^ generation);
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        bytes.extend_from_slice(&random.next().to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

struct Owner {
    memory: Arc<OwnerMemory>,
    tokens: Arc<TokenStore>,
    server: TcpServer,
}

impl Owner {
    /// One slot for each size, all published under generation 1.
    fn start(sizes: &[usize]) -> Self {
        Self::start_with(sizes, "127.0.0.1:0".parse().unwrap(), ServerOptions::default())
    }

    fn start_with(sizes: &[usize], address: SocketAddr, options: ServerOptions) -> Self {
        let memory = owner_memory(sizes);
        let tokens = Arc::new(TokenStore::new());
        let server =
            TcpServer::start(address, memory.clone(), Arc::clone(&tokens), INCARNATION, options).unwrap();
        Self { memory, tokens, server }
    }

    fn target(&self, connections: usize) -> PeerTarget {
        let tokens = self.tokens.issue(connections, Instant::now(), LIMIT).unwrap();
        target(self.server.local_addr(), tokens)
    }
}

fn target(address: SocketAddr, tcp_tokens: Vec<[u8; 32]>) -> PeerTarget {
    PeerTarget {
        incarnation: INCARNATION,
        unix_path: None,
        tcp_address: Some(address.to_string()),
        tcp_tokens,
    }
}

fn owner_memory(sizes: &[usize]) -> Arc<OwnerMemory> {
    let strides: Vec<u64> = sizes.iter().map(|&size| size.next_multiple_of(64) as u64).collect();
    let mut config = PoolConfig::new(strides.iter().sum(), sizes.len() as u32);
    config.huge_pages = HugePages::Off;
    let memory = OwnerMemory::create(&config).unwrap();
    memory.allocate_extent(0, strides.iter().sum()).unwrap();
    let mut base_offset = 0;
    for (slot, (&size, stride)) in sizes.iter().zip(&strides).enumerate() {
        let slab = Slab {
            layout: 1,
            group_id: 0,
            object_bytes: size as u64,
            first_slot: slot as u32,
            slots: 1,
            base_offset,
        };
        memory.add_slab(slab).unwrap();
        base_offset += stride;
        publish(&memory, slot as u32, 1);
    }
    memory
}

/// O1, fill, O2. The tag is the generation plus 1000.
fn publish(memory: &OwnerMemory, slot: u32, generation: u64) {
    let length = memory.object(slot).unwrap().object_bytes();
    let source = Region::allocate(length).unwrap();
    source.write(0, &object(slot, generation, length)).unwrap();
    memory.invalidate(slot, generation).unwrap();
    let check = memory.fill(slot, &ScatterList::whole(&source), true, &AtomicBool::new(false)).unwrap();
    let word = RawWord { generation, tag: generation + 1000, check, reserved: 0 };
    assert!(memory.publish(slot, word).unwrap());
}

struct Reader {
    provider: TcpProvider,
    events: Vec<Event>,
    next_token: u64,
}

impl Reader {
    fn new() -> Self {
        Self::with(ProviderOptions::default())
    }

    fn with(options: ProviderOptions) -> Self {
        Self { provider: TcpProvider::new(options).unwrap(), events: Vec::new(), next_token: 1 }
    }

    /// The next event.
    fn next(&mut self) -> Event {
        let started = Instant::now();
        while self.events.is_empty() {
            assert!(started.elapsed() < LIMIT, "nothing happened");
            if !self.provider.poll(&mut self.events) {
                self.provider.wait(Duration::from_millis(100));
            }
        }
        self.events.remove(0)
    }

    fn next_read(&mut self) -> ReadDone {
        match self.next() {
            Event::Read(done) => done,
            other => panic!("not a read: {other:?}"),
        }
    }

    /// Polls without waiting for anything.
    fn poll(&mut self, times: usize) {
        for _ in 0..times {
            self.provider.poll(&mut self.events);
        }
    }

    fn connect(&mut self, peer: u64, target: PeerTarget) -> Result<(), ConnectError> {
        self.provider.connect(PeerKey(peer), target);
        match self.next() {
            Event::Connected { peer: PeerKey(key) } if key == peer => Ok(()),
            Event::ConnectFailed { error, .. } => Err(error),
            other => panic!("neither connected nor refused: {other:?}"),
        }
    }

    fn post(
        &mut self,
        peer: u64,
        slot: u32,
        object_bytes: usize,
        offset: usize,
        destination: ScatterList,
        checksum: bool,
    ) -> Result<OpToken, PostError> {
        let token = OpToken(self.next_token);
        let op = ReadOp {
            token,
            slot,
            object_bytes: object_bytes as u64,
            object_offset: offset as u64,
            destination,
            checksum,
        };
        self.provider.post(PeerKey(peer), op)?;
        self.next_token += 1;
        Ok(token)
    }

    /// Reads a whole object and checks its bytes.
    fn read_whole(&mut self, peer: u64, slot: u32, length: usize, generation: u64) {
        let arena = Arena::new(length);
        self.post(peer, slot, length, 0, ScatterList::whole(&arena.region), true).unwrap();
        let done = self.next_read();
        let landed = done.outcome.unwrap();
        assert_eq!(landed.word.generation, generation);
        assert_eq!(landed.check, Some(landed.word.check));
        let mut bytes = vec![0; length];
        done.destination.read_object(&mut bytes).unwrap();
        assert_eq!(bytes, object(slot, generation, length));
    }
}

/// A region full of canaries.
struct Arena {
    region: Region,
}

impl Arena {
    fn new(length: usize) -> Self {
        let region = Region::allocate(length).unwrap();
        region.fill(0, length, CANARY).unwrap();
        Self { region }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.region.length_bytes()];
        self.region.read(0, &mut bytes).unwrap();
        bytes
    }

    fn is_untouched(&self) -> bool {
        self.bytes().iter().all(|&byte| byte == CANARY)
    }
}

/// An owner whose bytes are the test's own.
struct Script {
    listener: TcpListener,
}

impl Script {
    fn new() -> Self {
        Self { listener: TcpListener::bind("127.0.0.1:0").unwrap() }
    }

    fn target(&self) -> PeerTarget {
        target(self.listener.local_addr().unwrap(), vec![[7; 32]])
    }

    /// Lets a reader in as peer 1.
    fn welcome(&self, reader: &mut Reader) -> Scripted {
        reader.provider.connect(PeerKey(1), self.target());
        let mut socket = self.listener.accept().unwrap().0;
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket.set_nodelay(true).unwrap();
        socket.write_all(&Welcome { verdict: Verdict::Ready, incarnation: INCARNATION }.encode()).unwrap();
        assert!(matches!(reader.next(), Event::Connected { .. }));
        let mut hello = [0; HELLO_BYTES];
        socket.read_exact(&mut hello).unwrap();
        assert_eq!(Hello::decode(&hello).unwrap(), Hello { token: [7; 32], incarnation: INCARNATION });
        Scripted { socket, parser: RequestParser::default(), buffer: Vec::new() }
    }
}

struct Scripted {
    socket: TcpStream,
    parser: RequestParser,
    buffer: Vec<u8>,
}

impl Scripted {
    fn request(&mut self) -> Request {
        loop {
            let mut rest = self.buffer.as_slice();
            let request = self.parser.next_request(&mut rest).unwrap();
            self.buffer = rest.to_vec();
            if let Some(request) = request {
                return request;
            }
            let mut piece = [0; 4096];
            let count = self.socket.read(&mut piece).unwrap();
            assert!(count > 0, "the reader went away");
            self.buffer.extend_from_slice(&piece[..count]);
        }
    }

    fn send(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).unwrap();
    }

    fn send_header(&mut self, sequence: u64, status: Status, length: usize) {
        self.send(&Reply { sequence, status, length_bytes: length as u64 }.encode());
    }

    fn send_word(&mut self, generation: u64) {
        self.send(&RawWord { generation, tag: 9, check: 0, reserved: 0 }.to_le_bytes());
    }
}

/// A bare connection to a server that has said its hello and was let in.
fn raw_reader(owner: &Owner) -> TcpStream {
    let token = owner.tokens.issue(1, Instant::now(), LIMIT).unwrap()[0];
    let mut socket = TcpStream::connect(owner.server.local_addr()).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket.write_all(&Hello { token, incarnation: INCARNATION }.encode()).unwrap();
    let mut welcome = [0; WELCOME_BYTES];
    socket.read_exact(&mut welcome).unwrap();
    assert_eq!(Welcome::decode(&welcome).unwrap().verdict, Verdict::Ready);
    socket
}

/// Waits, within bounds, until something holds.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < LIMIT, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A wake that `poll` took back was forgotten: its sender's command waited for the longest sleep.
#[test]
fn a_wake_taken_back_by_poll_is_reported() {
    let mut provider = TcpProvider::new(ProviderOptions::default()).unwrap();
    let mut events = Vec::new();
    assert!(!provider.poll(&mut events));
    provider.waker().wake();
    assert!(provider.poll(&mut events), "somebody has something to say");
    assert!(!provider.poll(&mut events), "and has said it");
}
