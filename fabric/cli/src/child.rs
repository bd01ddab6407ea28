//! The hidden subcommand: one process of demo or replay.

use std::time::Duration;

use anyhow::{bail, Result};
use kvfabric_node::{DirectoryServer, Settings};

use crate::args::ChildArgs;
use crate::process::{die_with_parent, send_event, Commands};
use crate::protocol::{ChildEvent, DemoCommand, Role};
use crate::rank::{error_text, start_failed};
use crate::{demo, replay};

/// Runs the role that the parent gives on the first line.
///
/// # Errors
/// Whatever keeps the child from its work; the parent has been told.
pub fn run(args: &ChildArgs) -> Result<()> {
    die_with_parent(args.parent_pid)?;
    let mut commands = Commands::new();
    let Some(role) = commands.next::<Role>()? else { bail!("the parent process gave no role") };
    tracing::debug!(name = args.name, "child process started");
    let result = match &role {
        Role::Directory { settings } => directory(settings, &mut commands),
        Role::DemoRank { settings, blocks, start_within_ms } => {
            demo::run_rank(settings, *blocks, Duration::from_millis(*start_within_ms), &mut commands)
        }
        Role::ReplayRank(role) => replay::run_rank(role, &mut commands),
    };
    if let Err(error) = &result {
        // The parent shows it; if it cannot be told, it is gone.
        let _ = send_event(&ChildEvent::Failed { message: error_text(error), transport_unavailable: false });
    }
    result
}

fn directory(settings: &Settings, commands: &mut Commands) -> Result<()> {
    let server = match settings.directory().map_err(Into::into).and_then(DirectoryServer::start) {
        Ok(server) => server,
        Err(error) => return start_failed(error),
    };
    send_event(&ChildEvent::Ready { address: Some(server.local_addr().to_string()), incarnation: None })?;
    // A directory takes no commands: it waits for the end of the pipe.
    while commands.next::<DemoCommand>()?.is_some() {}
    server.close();
    Ok(())
}
