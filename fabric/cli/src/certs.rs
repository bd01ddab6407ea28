//! `kvfabric certs`: a certificate authority and a certificate for hosts and ranks.

use anyhow::Result;
use kvfabric_transport_control::certs::{generate, Report};
use serde_json::{json, Value};

use crate::args::CertsArgs;
use crate::output::Printer;

/// Makes what is missing in the folder and issues the certificate with all names.
///
/// # Errors
/// A bad name, or a file that cannot be read or written.
pub fn run(args: &CertsArgs, printer: Printer) -> Result<()> {
    let report = generate(&args.dir, &args.names)?;
    printer.event(&report_json(&report))?;
    let made = if report.ca_created { "made" } else { "kept" };
    printer.text(&format!(
        "{made} the authority {} (key {}: keep it where certificates are made)\nissued {} with key {} for {}\n\
         give --tls-dir {} to directories and ranks; every host needs ca.pem, cert.pem and key.pem",
        report.ca.display(),
        report.ca_key.display(),
        report.cert.display(),
        report.key.display(),
        report.names.join(", "),
        args.dir.display(),
    ))?;
    Ok(())
}

fn report_json(report: &Report) -> Value {
    json!({
        "event": "certs",
        "ca_created": report.ca_created,
        "names": report.names,
        "ca": report.ca.display().to_string(),
        "ca_key": report.ca_key.display().to_string(),
        "cert": report.cert.display().to_string(),
        "key": report.key.display().to_string(),
    })
}
