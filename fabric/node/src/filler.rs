//! Fill threads: they copy stores into slots and get extents from the system.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::Arc;
use std::thread::JoinHandle;

use kvfabric_core::owner::{FillError, PutId};
use kvfabric_memory::{OwnerMemory, ScatterList};
use parking_lot::Mutex;

use crate::command::Command;

/// Work for a fill thread.
pub(crate) enum FillTask {
    /// Copy a put's source into its slot. The slot's word was invalidated before (rule O1).
    Fill { put: PutId, slot: u32, source: ScatterList, checksum: bool, stop: Arc<AtomicBool> },
    /// Get memory for an extent.
    Extent { extent: u32, offset: u64, length_bytes: u64 },
}

/// The fill threads of a node. Dropping it ends them after their current task.
pub(crate) struct Filler {
    tasks: Option<Sender<FillTask>>,
    threads: Vec<JoinHandle<()>>,
}

impl Filler {
    pub(crate) fn start(
        threads: usize,
        memory: &Arc<OwnerMemory>,
        core: &Sender<Command>,
    ) -> std::io::Result<Self> {
        let (tasks, inbox) = std::sync::mpsc::channel();
        let inbox = Arc::new(Mutex::new(inbox));
        let threads = (0..threads)
            .map(|index| {
                let (inbox, memory, core) = (inbox.clone(), memory.clone(), core.clone());
                std::thread::Builder::new()
                    .name(format!("kvf-fill-{index}"))
                    .spawn(move || run(&inbox, &memory, &core))
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { tasks: Some(tasks), threads })
    }

    pub(crate) fn send(&self, task: FillTask) {
        if let Some(tasks) = &self.tasks {
            // The threads live as long as the sender, so this cannot fail before drop.
            let _ = tasks.send(task);
        }
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        self.tasks = None;
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a fill thread panicked");
            }
        }
    }
}

fn run(inbox: &Mutex<Receiver<FillTask>>, memory: &OwnerMemory, core: &Sender<Command>) {
    loop {
        // One thread waits inside the lock, the others for the lock: whoever gets a task leaves both.
        let task = inbox.lock().recv();
        let command = match task {
            Err(_) => return,
            Ok(FillTask::Fill { put, slot, source, checksum, stop }) => {
                let result = if stop.load(Ordering::Acquire) {
                    Err(FillError::Cancelled)
                } else {
                    memory.fill(slot, &source, checksum, &stop).map_err(|error| {
                        if stop.load(Ordering::Acquire) {
                            FillError::Cancelled
                        } else {
                            tracing::warn!(slot, %error, "copying a block into the pool failed");
                            FillError::Failed
                        }
                    })
                };
                drop(source);
                Command::Filled { put, result }
            }
            Ok(FillTask::Extent { extent, offset, length_bytes }) => {
                let result = memory.allocate_extent(offset, length_bytes);
                if let Err(error) = &result {
                    tracing::warn!(%error, "the pool cannot grow");
                }
                Command::Extent { extent, ok: result.is_ok() }
            }
        };
        if core.send(command).is_err() {
            return;
        }
    }
}
