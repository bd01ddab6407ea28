//! `kvfabric node`: a rank without an engine.

use anyhow::{bail, Result};
use kvfabric_node::Settings;

/// Checks the settings and says what is missing.
///
/// # Errors
/// Always: bad settings, or that remote puts are not in this version.
pub fn run(settings: &Settings) -> Result<()> {
    let config = settings.node()?;
    bail!(
        "rank {:?} cannot donate its {} bytes: a rank without an engine is filled by remote puts (GRANT, write, COMMIT), \
         and those are not in this version. What works now: ranks inside engines, which store into their own pools \
         (the kvfabric-node library), `kvfabric directory` to connect them, and `kvfabric demo` and `kvfabric replay` \
         to see it at work",
        config.name,
        config.pool_bytes
    )
}
