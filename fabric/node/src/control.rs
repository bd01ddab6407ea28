//! Requests of the core thread to the directory and to peers. Each runs as a task; answers come back as commands.

use std::collections::HashMap;
use std::sync::mpsc::Sender;
use std::sync::Arc;
use std::time::Duration;

use kvfabric_core::load::{LocateId, ReportId};
use kvfabric_core::wire::{
    encode_request, ClearAck, EngineKey, MissRecord, MissReports, NsNumber, Query, Records, Reply, Request,
    Touch,
};
use kvfabric_core::{Fingerprint, Generation, Incarnation, RankId, SlotId};
use kvfabric_transport_control::{Connection, Responder};

use crate::backend::{Directory, Membership};
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
    /// The directory while this rank is a member.
    pub(crate) directory: Option<Arc<dyn Directory>>,
    /// Who is who, while there is a connection to the directory.
    pub(crate) membership: Option<Arc<dyn Membership>>,
    clears: HashMap<u64, Responder>,
}

impl Control {
    pub(crate) fn new(
        runtime: tokio::runtime::Handle,
        core: Sender<Command>,
        asker: Asker,
        engine: EngineKey,
    ) -> Self {
        Self { runtime, core, asker, engine, directory: None, membership: None, clears: HashMap::new() }
    }

    pub(crate) fn locate(&self, locate: LocateId, ns: NsNumber, keys: &[Fingerprint], within: Duration) {
        let mut records = Records::with_capacity(keys.len());
        keys.iter().for_each(|key| records.push(*key));
        let deadline_us = u32::try_from(within.as_micros()).unwrap_or(u32::MAX);
        let query = Query { ns, asker: self.engine, deadline_us, keys: records };
        let answer = self.directory.as_ref().map(|directory| directory.locate(query, within));
        let core = self.core.clone();
        self.runtime.spawn(async move {
            let result = match answer {
                Some(answer) => {
                    answer.await.map_err(|error| tracing::debug!(%error, "locate was not answered"))
                }
                None => Err(()),
            };
            // A core thread that is gone needs no answers.
            let _ = core.send(Command::Located { locate, result });
        });
    }

    pub(crate) fn greet(&self, rank: RankId, incarnation: Incarnation) {
        self.runtime.spawn(self.asker.clone().greet(self.membership.clone(), rank, incarnation));
    }

    pub(crate) fn report_misses(&self, reports: Vec<ReportId>, misses: &[MissRecord]) {
        let mut records = Records::with_capacity(misses.len());
        misses.iter().for_each(|record| records.push(*record));
        let message = MissReports { asker: self.engine, reports: records };
        let answer =
            self.directory.as_ref().map(|directory| directory.report_misses(&message, REQUEST_TIMEOUT));
        let keys: Vec<Fingerprint> = misses.iter().map(|miss| miss.fingerprint).collect();
        let core = self.core.clone();
        self.runtime.spawn(async move {
            let acknowledged = match answer {
                Some(answer) => answer.await.is_ok(),
                None => false,
            };
            // Not acknowledged: core goes on by itself after its own wait.
            if acknowledged {
                let _ = core.send(Command::MissReported { reports, keys });
            }
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
