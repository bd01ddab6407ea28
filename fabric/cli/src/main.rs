//! The `kvfabric` command line.
#![forbid(unsafe_code)]

mod args;
mod certs;
mod child;
mod cluster;
mod content;
mod demo;
mod directory;
mod doctor;
mod keys;
mod limits;
mod node;
mod output;
mod process;
mod protocol;
mod rank;
mod replay;
mod summary;
mod tensors;
mod trace;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use kvfabric_node::Settings;
use tracing_subscriber::EnvFilter;

use args::{Cli, Command};
use output::Printer;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_error(&error);
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<()> {
    start_logging(&cli.command)?;
    let printer = Printer { json: cli.global.json };
    let settings = |flags: Settings| Settings::layered(flags, cli.global.config.as_deref());
    match &cli.command {
        Command::Demo(args) => demo::run(args, &settings(Settings::default())?, printer),
        Command::Directory(args) => directory::run(&settings(args.settings())?, printer),
        Command::Node(args) => node::run(&settings(args.settings())?),
        Command::Replay(args) => replay::run(args, &settings(args.settings())?, printer),
        Command::Certs(args) => certs::run(args, printer),
        Command::Doctor(args) => {
            let flags = Settings { directory: args.directory.clone(), ..Settings::default() };
            doctor::run(&settings(flags)?, printer)
        }
        Command::Child(args) => child::run(args),
    }
}

/// Logs go to standard error; standard output is for results. What a command does by itself is said once, the rest is
/// for `KVFABRIC_LOG`.
fn start_logging(command: &Command) -> Result<()> {
    let default = match command {
        Command::Directory(_) | Command::Node(_) => "info",
        // Demo kills ranks: that others complain about it is expected there.
        Command::Child(_) => "error",
        _ => "warn",
    };
    let filter = match std::env::var("KVFABRIC_LOG") {
        Ok(text) => EnvFilter::try_new(&text).with_context(|| {
            format!("KVFABRIC_LOG = {text:?} is no log filter; give a level or crate=level")
        })?,
        Err(_) => EnvFilter::new(default),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    Ok(())
}

/// Prints an error and its causes. Where an error prints its cause itself, the cause is not repeated.
fn print_error(error: &anyhow::Error) {
    let mut text = format!("error: {error}\n");
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text.push_str(&format!("  caused by: {cause}\n"));
        }
    }
    // There is nobody left to tell if standard error is closed.
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}
