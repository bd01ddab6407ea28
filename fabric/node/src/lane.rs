//! Data threads: each owns one provider, spins while there is work and sleeps when there is none.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kvfabric_core::TransportKind;
use kvfabric_transport_api::{
    Event, OpToken, PeerKey, PeerTarget, PostError, Provider, ReadDone, ReadError, ReadOp, Wake,
};

use crate::command::Command;

/// Polls without progress before a lane sleeps. About 20 us: longer than a loopback round trip, so that a ping-pong of
/// small reads never pays for a wake-up, and too short to show as load when idle.
const IDLE_POLLS_BEFORE_SLEEP: u32 = 64;
/// Longest sleep. Only a guard: every event that matters wakes the lane.
const SLEEP_MAX: Duration = Duration::from_millis(500);

/// What the core thread tells a lane.
pub(crate) enum LaneCommand {
    Connect { peer: PeerKey, target: PeerTarget },
    Disconnect { peer: PeerKey },
    Post(Vec<(PeerKey, ReadOp)>),
    Abort(OpToken),
}

/// Handle of a data thread.
pub(crate) struct Lane {
    pub(crate) kind: TransportKind,
    commands: Sender<LaneCommand>,
    waker: Arc<dyn Wake>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Lane {
    /// Starts the thread. Events go to the core thread as [`Command::Lane`].
    pub(crate) fn start(
        kind: TransportKind,
        index: usize,
        provider: Box<dyn Provider>,
        core: Sender<Command>,
    ) -> std::io::Result<Self> {
        let (commands, inbox) = std::sync::mpsc::channel();
        let waker = provider.waker();
        let stop = Arc::new(AtomicBool::new(false));
        let mut worker = Worker {
            kind,
            provider,
            inbox,
            core,
            stop: stop.clone(),
            backlog: VecDeque::new(),
            events: Vec::new(),
        };
        let thread =
            std::thread::Builder::new().name(format!("kvf-{kind}-{index}")).spawn(move || worker.run())?;
        Ok(Self { kind, commands, waker, stop, thread: Some(thread) })
    }

    /// Hands a command to the thread. A lane that has ended is being shut down together with its node.
    pub(crate) fn send(&self, command: LaneCommand) {
        if self.commands.send(command).is_ok() {
            self.waker.wake();
        }
    }

    /// Asks the thread to end after its operations retired.
    pub(crate) fn request_stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.waker.wake();
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.request_stop();
        if let Some(thread) = self.thread.take() {
            // A lane ends within its transport's drain bound after a stop request.
            if thread.join().is_err() {
                tracing::error!(transport = %self.kind, "a data thread panicked");
            }
        }
    }
}

struct Worker {
    kind: TransportKind,
    provider: Box<dyn Provider>,
    inbox: Receiver<LaneCommand>,
    core: Sender<Command>,
    stop: Arc<AtomicBool>,
    /// Operations that found the transport's queue full; bounded by core's in-flight limits.
    backlog: VecDeque<(PeerKey, ReadOp)>,
    events: Vec<Event>,
}

impl Worker {
    fn run(&mut self) {
        let mut idle_polls = 0;
        let mut peers_closed = false;
        loop {
            let mut busy = self.take_commands();
            busy |= self.retry_backlog();
            busy |= self.provider.poll(&mut self.events);
            if !self.events.is_empty() {
                busy = true;
                let events = std::mem::take(&mut self.events);
                // A core thread that is gone no longer needs events; the operations still retire below.
                let _ = self.core.send(Command::Lane { kind: self.kind, events });
            }
            if self.stop.load(Ordering::Acquire) {
                if !peers_closed {
                    peers_closed = true;
                    self.fail_backlog();
                }
                if self.provider.in_flight() == 0 {
                    return;
                }
            }
            idle_polls = if busy { 0 } else { idle_polls + 1 };
            if idle_polls > IDLE_POLLS_BEFORE_SLEEP {
                self.provider.wait(SLEEP_MAX);
                idle_polls = 0;
            } else if idle_polls > 0 {
                std::thread::yield_now();
            }
        }
    }

    fn take_commands(&mut self) -> bool {
        let mut any = false;
        loop {
            match self.inbox.try_recv() {
                Ok(command) => {
                    any = true;
                    self.handle(command);
                }
                Err(TryRecvError::Empty) => return any,
                Err(TryRecvError::Disconnected) => {
                    self.stop.store(true, Ordering::Release);
                    return any;
                }
            }
        }
    }

    fn handle(&mut self, command: LaneCommand) {
        match command {
            LaneCommand::Connect { peer, target } => self.provider.connect(peer, target),
            LaneCommand::Disconnect { peer } => self.provider.disconnect(peer),
            LaneCommand::Post(ops) => {
                for (peer, op) in ops {
                    self.post(peer, op);
                }
            }
            LaneCommand::Abort(token) => {
                if let Some(at) = self.backlog.iter().position(|(_, op)| op.token == token) {
                    if let Some((_, op)) = self.backlog.remove(at) {
                        self.retire(op, ReadError::Aborted);
                    }
                } else {
                    self.provider.abort(token);
                }
            }
        }
    }

    fn post(&mut self, peer: PeerKey, op: ReadOp) {
        // Reads of one peer stay in order; those of other peers do not wait for one whose queue is full.
        if self.backlog.iter().any(|(waiting, _)| *waiting == peer) {
            self.backlog.push_back((peer, op));
            return;
        }
        self.try_post(peer, op);
    }

    /// Returns false when the transport's queue is full.
    fn try_post(&mut self, peer: PeerKey, op: ReadOp) -> bool {
        match self.provider.post(peer, op) {
            Ok(()) => true,
            Err(PostError::QueueFull(op)) => {
                self.backlog.push_front((peer, *op));
                false
            }
            Err(PostError::BadRange(op)) => {
                self.retire(*op, ReadError::SizeMismatch);
                true
            }
            Err(error) => {
                let reason = error.to_string();
                self.retire(error.into_op(), ReadError::PeerLost(reason));
                true
            }
        }
    }

    fn retry_backlog(&mut self) -> bool {
        let mut any = false;
        let mut full: Vec<PeerKey> = Vec::new();
        for _ in 0..self.backlog.len() {
            let Some((peer, op)) = self.backlog.pop_front() else { break };
            if full.contains(&peer) {
                self.backlog.push_back((peer, op));
            } else if self.try_post(peer, op) {
                any = true;
            } else {
                full.push(peer);
                // It was put back in front; behind the others it keeps its place among its peer's.
                self.backlog.rotate_left(1);
            }
        }
        any
    }

    fn fail_backlog(&mut self) {
        while let Some((_, op)) = self.backlog.pop_front() {
            self.retire(op, ReadError::Aborted);
        }
    }

    /// An operation that the provider does not hold is over at once.
    fn retire(&mut self, op: ReadOp, error: ReadError) {
        self.events.push(Event::Read(ReadDone {
            token: op.token,
            destination: op.destination,
            outcome: Err(error),
        }));
    }
}
