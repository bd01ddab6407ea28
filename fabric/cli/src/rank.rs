//! What the rank processes of demo and replay share.

use anyhow::{anyhow, Result};
use kvfabric_node::{Node, StartError};

use crate::process::send_event;
use crate::protocol::{ChildEvent, RankCounters};

/// Tells the parent that the rank could not start, and ends.
///
/// # Errors
/// The pipe's.
pub fn start_failed(error: StartError) -> Result<()> {
    let transport_unavailable = matches!(error, StartError::TransportUnavailable { .. });
    send_event(&ChildEvent::Failed { message: error_text(&anyhow!(error)), transport_unavailable })
}

/// Counters at the end.
pub fn counters(node: &Node) -> RankCounters {
    let stats = node.stats();
    RankCounters {
        tag_mismatches: stats.tag_mismatches,
        checksum_mismatches: stats.checksum_mismatches,
        evictions: stats.evictions,
        pool_used_bytes: stats.pool_used_bytes,
    }
}

/// An error with its causes, in one line.
pub fn error_text(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        // Some errors print their cause themselves.
        if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_named_once() {
        let error = anyhow!("port in use").context("cannot listen").context("directory: cannot listen");
        assert_eq!(error_text(&error), "directory: cannot listen: port in use");
    }
}
