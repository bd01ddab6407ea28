//! `kvfabric directory`: the directory service in the foreground.

use anyhow::{Context, Result};
use kvfabric_node::{DirectoryConfig, DirectoryServer, SecurityChoice, Settings};
use serde_json::{json, Value};
use tokio::signal::unix::{signal, SignalKind};

use crate::output::Printer;

/// Runs the directory until SIGINT or SIGTERM.
///
/// # Errors
/// Bad settings, or the directory could not start.
pub fn run(settings: &Settings, printer: Printer) -> Result<()> {
    let config = settings.directory()?;
    print_config(&config, printer)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the signal handler")?;
    // Signals are caught before the directory says that it is ready, so that none of them is lost afterwards.
    let (mut interrupt, mut terminate) = runtime
        .block_on(async {
            Ok::<_, std::io::Error>((signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?))
        })
        .context("cannot catch SIGINT and SIGTERM")?;
    let server = DirectoryServer::start(config)?;
    let address = server.local_addr().to_string();
    printer.event(&json!({ "event": "ready", "listen": address }))?;
    printer.text(&format!("directory ready on {address}"))?;
    let name = runtime.block_on(async {
        tokio::select! {
            _ = interrupt.recv() => "SIGINT",
            _ = terminate.recv() => "SIGTERM",
        }
    });
    server.close();
    printer.event(&json!({ "event": "stopped", "signal": name }))?;
    printer.text(&format!("directory stopped by {name}"))?;
    Ok(())
}

fn print_config(config: &DirectoryConfig, printer: Printer) -> Result<()> {
    let value = config_json(config);
    printer.event(&value)?;
    if let (false, Value::Object(fields)) = (printer.json, &value) {
        printer.text("directory settings:")?;
        for (name, value) in fields.iter().filter(|(name, _)| *name != "event") {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            printer.text(&format!("  {name} = {text}"))?;
        }
    }
    Ok(())
}

fn config_json(config: &DirectoryConfig) -> Value {
    let security = match &config.security {
        SecurityChoice::Development => "development certificates of this user, loopback only".to_owned(),
        SecurityChoice::TlsDir(dir) => format!("certificates in {}", dir.display()),
        SecurityChoice::InsecureNoAuth => "none: anybody who reaches the port reads all blocks".to_owned(),
    };
    json!({
        "event": "config",
        "cluster": config.cluster,
        "listen": config.listen.to_string(),
        "security": security,
        "table_bytes": config.table_bytes_max,
        "peer_timeout_ms": crate::summary::micros(config.peer_timeout) / 1000,
        "metrics_listen": config.metrics_listen.map_or_else(|| "off".to_owned(), |address| address.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_printed_as_resolved() {
        let settings = Settings {
            listen: Some("127.0.0.1:0".into()),
            insecure_no_auth: Some(true),
            table_bytes: Some("1M".into()),
            ..Settings::default()
        };
        let value = config_json(&settings.directory().unwrap());
        assert_eq!(value["listen"], "127.0.0.1:0");
        assert_eq!(value["table_bytes"], 1 << 20);
        assert_eq!(value["peer_timeout_ms"], 1000);
        assert!(value["security"].as_str().unwrap().starts_with("none"));
    }
}
