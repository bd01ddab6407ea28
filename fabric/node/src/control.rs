//! Requests of the core thread to the directory and to peers. Each runs as a task; answers come back as commands.

use std::collections::HashMap;
use std::sync::mpsc::Sender;
use std::time::Duration;

use bytes::Bytes;
use kvfabric_core::load::{LocateId, ReportId};
use kvfabric_core::wire::{
    decode_reply, encode_request, ClearAck, EngineKey, Locate, MissRecord, MissReports, NsNumber, Query,
    Records, Reply, Request, Touch,
};
use kvfabric_core::{Fingerprint, Generation, Incarnation, RankId, SlotId};
use kvfabric_transport_control::{Connection, Responder};

use crate::command::Command;
use crate::handler::respond;
use crate::peers::Asker;

/// A request without a deadline of its own.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// The core thread's hand on the control plane.
pub(crate) struct Control {
    pub(crate) runtime: tokio::runtime::Handle,
    pub(crate) core: Sender<Command>,
    pub(crate) asker: Asker,
    pub(crate) engine: EngineKey,
    /// Connection to the directory while this rank is a member.
    pub(crate) directory: Option<Connection>,
    clears: HashMap<u64, Responder>,
}

impl Control {
    pub(crate) fn new(
        runtime: tokio::runtime::Handle,
        core: Sender<Command>,
        asker: Asker,
        engine: EngineKey,
    ) -> Self {
        Self {
            runtime,
            core,
            asker,
            engine,
            directory: None,
            clears: HashMap::new(),
        }
    }

    /// Sends an encoded request to the directory; `done` turns the answer (or its absence) into a command.
    pub(crate) fn ask(
        &self,
        request: &Request<'_>,
        within: Duration,
        done: impl FnOnce(Option<Bytes>) -> Command + Send + 'static,
    ) {
        let mut frame = Vec::with_capacity(64);
        let encoded = encode_request(request, &mut frame).is_ok();
        let (core, directory) = (self.core.clone(), self.directory.clone());
        self.runtime.spawn(async move {
            let reply = match directory {
                Some(directory) if encoded => match directory.request(frame.into(), within).await {
                    Ok(reply) => Some(reply),
                    Err(error) => {
                        tracing::debug!(%error, "the directory did not answer");
                        None
                    }
                },
                _ => None,
            };
            // A core thread that is gone needs no answers.
            let _ = core.send(done(reply));
        });
    }

    pub(crate) fn locate(
        &self,
        locate: LocateId,
        ns: NsNumber,
        keys: &[Fingerprint],
        within: Duration,
    ) {
        let mut records = Records::with_capacity(keys.len());
        keys.iter().for_each(|key| records.push(*key));
        let count = keys.len();
        let deadline_us = u32::try_from(within.as_micros()).unwrap_or(u32::MAX);
        let request = Request::Locate(Locate(Query { ns, asker: self.engine, deadline_us, keys: records }));
        self.ask(&request, within, move |reply| {
            let result = match reply.as_deref().map(decode_reply) {
                Some(Ok(Reply::Locate(reply))) if reply.len() == count => Ok(reply.iter().collect()),
                Some(Ok(other)) => {
                    tracing::debug!(answer = other.name(), "locate was refused");
                    Err(())
                }
                _ => Err(()),
            };
            Command::Located { locate, result }
        });
    }

    pub(crate) fn greet(&self, rank: RankId, incarnation: Incarnation) {
        self.runtime.spawn(self.asker.clone().greet(self.directory.clone(), rank, incarnation));
    }

    pub(crate) fn report_misses(&self, reports: Vec<ReportId>, misses: &[MissRecord]) {
        let mut records = Records::with_capacity(misses.len());
        misses.iter().for_each(|record| records.push(*record));
        let request = Request::MissReports(MissReports { asker: self.engine, reports: records });
        self.ask(&request, REQUEST_TIMEOUT, move |reply| match reply.as_deref().map(decode_reply) {
            Some(Ok(Reply::Done(_))) => Command::MissReported { reports },
            // Not acknowledged: core goes on by itself after its own wait.
            _ => Command::MissReported { reports: Vec::new() },
        });
    }

    pub(crate) fn touch(
        &self,
        connection: &Connection,
        incarnation: Incarnation,
        entries: &[(SlotId, Generation)],
    ) {
        let mut records = Records::with_capacity(entries.len());
        entries.iter().for_each(|entry| records.push(*entry));
        let mut frame = Vec::new();
        if encode_request(&Request::Touch(Touch { incarnation, entries: records }), &mut frame).is_err() {
            return;
        }
        let connection = connection.clone();
        self.runtime.spawn(async move {
            // Advisory and lossy by design.
            let _ = connection.notify(frame.into()).await;
        });
    }

    /// Remembers who waits for the acknowledgement of a clear.
    pub(crate) fn begin_clear(&mut self, clear: u64, responder: Responder) {
        self.clears.insert(clear, responder);
    }

    pub(crate) fn acknowledge_clear(&mut self, ack: ClearAck) {
        if let Some(responder) = self.clears.remove(&ack.clear) {
            respond(responder, &Reply::ClearAck(ack));
        }
    }
}
